"""race.py ROOT...: speed of each tree relative to the first, interleaved bursts."""
import sys,importlib,pkgutil,statistics,os
def load(root):
    for k in [k for k in sys.modules if k=='cufa' or k.startswith('cufa.')]: del sys.modules[k]
    sys.path.insert(0,root)
    m=importlib.import_module('cufa')
    for x in pkgutil.walk_packages(m.__path__,'cufa.'):
        if '__main__' in x.name or '.cli' in x.name: continue
        try: importlib.import_module(x.name)
        except Exception as e: print('skip',x.name,e)
    src=importlib.import_module('cufa.source') if os.path.exists(root+'/cufa/source.py') else importlib.import_module('cufa.compiler.source')
    [src.text(k) for k in ('fa3_wgmma','fa2_mma','fa2_fp32','fa1_fp32')]; src.digest()
    sys.path.pop(0)
    return m
import cupy as cp, numpy as np, ml_dtypes
roots=sys.argv[1:]
mods=[load(r) for r in roots]
dims=[int(x) for x in os.environ.get('DIMS','64,128,256').split(',')]
seqs=[int(x) for x in os.environ.get('SEQS','512,1024,2048,4096,8192,16384').split(',')]
dts=os.environ.get('DTS','bfloat16').split(',')
kern=os.environ.get('KERNEL') or None
rounds=int(os.environ.get('ROUNDS','12')); causals=[c=='c' for c in os.environ.get('MASK','fc')]
rng=cp.random.default_rng(1)
res=[[] for _ in roots]
for dt in dts:
  T={'bfloat16':ml_dtypes.bfloat16,'float16':np.float16,'float32':np.float32}[dt]
  for d in dims:
    for causal in causals:
      for s in seqs:
        h=2048//d; b=16384//s
        q,k,v=(rng.standard_normal((b,h,s,d),dtype=cp.float32).astype(T) for _ in range(3))
        fs=[lambda m=m:m.attention(q,k,v,causal=causal,kernel=kern) for m in mods]
        os_=[f().astype(cp.float32) for f in fs]; e=[float(cp.abs(x-os_[0]).max()) for x in os_]
        fl=4*b*h*s*s*d/(2 if causal else 1); n=max(1,int(8e-3/(fl/4e14 if dt!='float32' else fl/4e13)))
        t=[[] for _ in fs]; idx=list(range(len(fs)))
        for r in range(rounds):
            ev=[]
            for i in idx[r%len(fs):]+idx[:r%len(fs)]:
                a,z=cp.cuda.Event(),cp.cuda.Event(); fs[i](); a.record()
                for _ in range(n): fs[i]()
                z.record(); ev.append((i,a,z))
            for i,a,z in ev: z.synchronize(); t[i].append(cp.cuda.get_elapsed_time(a,z)/n)
        m=[statistics.median(x) for x in t]
        for i in idx: res[i].append(m[0]/m[i])
        print(f"{dt} D{d} {'c' if causal else 'f'} S{s}: {fl/m[0]/1e9:.0f} TF",' '.join(f'{m[0]/x:.3f}' for x in m[1:]),'diff',' '.join(f'{x:.1e}' for x in e[1:]),mods[-1].explain(q,k,v,causal=causal,kernel=kern).variant.split('<')[1] if isinstance(mods[-1].explain(q,k,v,causal=causal,kernel=kern).variant,str) else '',flush=True)
for i,r in enumerate(roots): print(r,'geomean %.4f min %.3f'%(statistics.geometric_mean(res[i]),min(res[i])))
