"""Run kernels on the host: compiled(root, kernel, expr, args_type) -> f(params_bytes, grid, threads, smem)."""
import ctypes,re,subprocess,pathlib,hashlib,mmap
import numpy as np
HERE=pathlib.Path(__file__).parent
def text(folder,kernel):
    done=set()
    def expand(name):
        content=((HERE if name.startswith('ptx') else folder)/name).read_text()
        def inc(m):
            h=m[1]
            if h in done: return ""
            done.add(h)
            return expand(h)
        return re.sub(r'^#include "(\w+\.cuh)"$',inc,content,flags=re.M).replace("#pragma once\n","\n")
    return expand(kernel+".cu")
def compiled(root,kernel,expr,arguments):
    src='#include "emu.h"\n'+text(pathlib.Path(root)/'cufa/kernels',kernel)
    src+=f'''
extern "C" int run(const void* params, int grid, int threads, unsigned bytes, int reverse) {{
    const auto& p = *reinterpret_cast<const {arguments}*>(params);
    emu::run(smem, sizeof smem, grid, threads, bytes, [&] {{ {expr}(p); }}, reverse);
    return emu::failed;
}}
extern "C" int size() {{ return sizeof({arguments}); }}
'''
    h=hashlib.sha1((src+(HERE/'emu.h').read_text()).encode()).hexdigest()[:16]
    so=HERE/f'k_{h}.so'
    if not so.exists():
        c=HERE/f'k_{h}.cpp'; c.write_text(src)
        r=subprocess.run(['g++','-std=c++17','-O1','-w','-shared','-fPIC','-mf16c',f'-I{HERE}',str(c),'-o',str(so)],capture_output=True,text=True)
        if r.returncode: print(r.stderr[:3000]); raise SystemExit(1)
    lib=ctypes.CDLL(str(so)); return lib
_keep=[]
def guarded(array):
    """A copy whose end lies at a page that cannot be read."""
    n=max(1,array.nbytes); page=mmap.PAGESIZE; size=(n+page-1)//page*page
    libc=ctypes.CDLL(None); libc.mmap.restype=ctypes.c_void_p
    libc.mmap.argtypes=[ctypes.c_void_p,ctypes.c_size_t,ctypes.c_int,ctypes.c_int,ctypes.c_int,ctypes.c_long]
    p=libc.mmap(None,size+2*page,3,0x22,-1,0)
    libc.mprotect(ctypes.c_void_p(p),ctypes.c_size_t(page),0); libc.mprotect(ctypes.c_void_p(p+page+size),ctypes.c_size_t(page),0)
    at=p+page+size-(n+15)//16*16
    buf=(ctypes.c_ubyte*n).from_address(at)
    out=np.frombuffer(buf,dtype=np.uint8)[:array.nbytes].view(array.dtype).reshape(array.shape)
    out[...]=array; return out
