import sys; root=sys.argv[1]; sys.path.insert(0,root)
import numpy as np, emu, struct, ml_dtypes
rng=np.random.default_rng(0)
BF=ml_dtypes.bfloat16
def tensor(x):
    s=[t//x.itemsize for t in x.strides]; return struct.pack('<Qqqq',x.ctypes.data,s[0],s[1],s[2])
def oracle(q,k,v,lengths,causal,scale):
    b,hq,sq,d=q.shape; hk=k.shape[1]; g=hq//hk
    out=np.zeros((b,hq,sq,v.shape[3])); lse=np.full((b,hq,sq),-np.inf)
    for i in range(b):
        n=int(lengths[i])
        for h in range(hq):
            K=k[i,h//g,:n].astype(np.float64); V=v[i,h//g,:n].astype(np.float64)
            s=q[i,h].astype(np.float64)@K.T*scale
            if causal: s=np.where(np.arange(n)[None]<=np.arange(sq)[:,None]+n-sq,s,-np.inf)
            if n==0: continue
            m=s.max(1,keepdims=True); ok=np.isfinite(m[:,0])
            with np.errstate(all='ignore'): p=np.exp(s-m); l=p.sum(1,keepdims=True)
            o=p@V/l
            out[i,h][ok]=o[ok]; lse[i,h][ok]=(m+np.log(l))[ok,0]
    return out,lse
def case(b,hq,hk,sq,cap,d,dv,lengths,*,bm=16,bn=16,stages=3,warps=8,grid=7,splits=0,page=0,causal=True,dt=BF,reverse=0):
    scale=d**-.5
    q=emu.guarded(rng.standard_normal((b,hq,sq,d)).astype(dt))
    k=rng.standard_normal((b,hk,cap,d)).astype(dt); v=rng.standard_normal((b,hk,cap,dv)).astype(dt)
    L=np.full(b,cap) if lengths is None else np.array(lengths)
    for i in range(b): k[i,:,L[i]:]=np.nan; v[i,:,L[i]:]=np.nan
    e,el=oracle(q,k,v,L,causal,scale)
    dp=lambda x:(x+31)//32*32 if x>32 else 32
    D=next(x for x in (32,64,96,128,256) if x>=d); DV=next(x for x in (32,64,96,128,256) if x>=dv)
    if page:
        per=-(-cap//page); n=b*per+3; perm=rng.permutation(n)[:b*per].astype(np.int32)
        K=np.full((n,hk,page,d),np.nan,dt); V=np.full((n,hk,page,dv),np.nan,dt); table=perm.reshape(b,per)
        for i in range(b):
            for j in range(per):
                w=min(page,cap-j*page); K[table[i,j],:,:w]=k[i,:,j*page:j*page+w]; V[table[i,j],:,:w]=v[i,:,j*page:j*page+w]
        k,v=K,V; table=emu.guarded(table)
    k,v=emu.guarded(k),emu.guarded(v)
    out=emu.guarded(np.full((b,hq,sq,dv),np.nan,dt)); lse=emu.guarded(np.full((b,hq,sq),np.nan,np.float32))
    group=hq//hk; row_tiles=-(-group*sq//bm)
    if splits: grid=b*hk*row_tiles*splits
    partial=emu.guarded(np.full(2*grid*bm*(dv+2),np.nan,np.float32)); arrived=emu.guarded(np.zeros(grid,np.int32))
    lens=None if lengths is None else emu.guarded(np.array(lengths,np.int32))
    P=b''.join(tensor(x) for x in (q,k,v,out))+struct.pack('<QQQQ',lse.ctypes.data,partial.ctypes.data,arrived.ctypes.data,0 if lens is None else lens.ctypes.data)
    P+=struct.pack('<f10i',scale*1.4426950408889634,b,hq,hk,group,sq,cap,d,dv,row_tiles,splits)
    P+=b'\0'*(-len(P)%8)
    if page: P+=struct.pack('<Q3i',table.ctypes.data,table.shape[1],k.shape[0],page)
    P+=b'\0'*64
    T='bfloat16' if dt is BF else 'float16'; S='Score<Causal>' if causal else 'Score<>'; KV='Paged' if page else 'Contiguous'
    lib=emu.compiled(root,'decode',f'decode<{T}, {D}, {DV}, {bm}, {bn}, {stages}, {warps}, 1, {S}, {KV}>',f'DecodeArguments<{S}, {KV}>')
    KVB=stages*bn*(D+DV)*2*warps; cols=64//(bm//16); pitch=cols+2
    smem=bm*D*2+KVB+warps*bm*pitch*4+2*warps*bm*4+16
    rc=lib.run(P,grid,warps*32,smem,reverse)
    err=np.nanmax(np.abs(out.astype(np.float64)-e)) if e.size else 0
    okn=not np.isnan(out.astype(np.float32)).any()
    with np.errstate(all='ignore'): el_ok=np.allclose(lse,el,rtol=1e-4,atol=1e-4)
    good=rc==0 and okn and err<0.03 and el_ok and not arrived.any()
    print('OK ' if good else 'BAD',b,hq,hk,sq,cap,d,dv,lengths,'grid',grid,'splits',splits,'page',page,f'err {err:.4f} lse {el_ok} nan-free {okn} arrived {arrived.any()} rc {rc}',flush=True)
    return out,lse
if __name__=='__main__':
    case(1,4,1,1,300,64,64,None)
    case(1,4,1,1,300,64,64,None,reverse=1)
    case(2,8,2,1,500,128,128,None,grid=13)
    case(3,8,2,1,500,64,64,[0,500,77],grid=13)
    case(5,4,2,1,300,64,64,[1,3,97,0,299],grid=132)
    case(2,8,2,3,200,64,64,[150,2],grid=5)
    case(2,14,2,2,200,64,64,[150,200],grid=5)
    case(1,71,1,1,200,64,64,[150],grid=9)
    case(2,8,2,1,500,64,64,[500,31],splits=3)
    case(2,8,2,1,500,64,64,[500,31],splits=40)
    case(3,8,2,1,500,64,64,[0,500,77],grid=13,page=16)
    case(3,8,2,1,100,64,64,[0,100,77],grid=6,page=1)
    case(3,8,2,1,300,64,64,[3,300,77],grid=6,page=7)
    case(40,4,2,1,64,64,64,list(rng.integers(0,65,40)),grid=11)
    case(2,4,2,1,100,40,72,[100,50],grid=4)
    case(2,4,2,1,100,64,64,None,grid=4,causal=False,dt=np.float16)
    case(2,40,2,1,100,64,64,[99,40],grid=4,bm=32)
    a=case(1,4,2,1,300,64,64,[211],splits=4)
