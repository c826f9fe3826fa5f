"""python var.py: variants of decode beside SDPA by graph replay."""
import sys; sys.argv=['dec.py','none']
exec(open('drafts/dec.py').read().split("if 'time' in sys.argv")[0])
from cufa.variant import Variant
CONF=[(16,3,4),(16,5,4),(16,3,8),(32,3,4),(16,2,8)]
for (b, kv, hq, hk, d, sq) in ((1,1024,32,8,128,1),(1,8192,32,8,128,1),(1,32768,32,8,128,1),(16,8192,32,8,128,1),(64,4096,32,8,128,1),(256,512,32,8,128,1),(16,8192,32,1,128,1)):
    nbytes = 2 * b * hk * kv * d * 2; sets = min(60, 1 + -(-2 * 60_000_000 // nbytes)); n = max(sets, 8)
    S = [(rnd(b, hq, sq, d), rnd(b, hk, kv, d), rnd(b, hk, kv, d)) for _ in range(sets)]
    O = [cp.empty_like(q) for q, _, _ in S]; L = cp.full(b, kv, cp.int32)
    launches = {}
    for c in CONF:
        for bm in ((16,32) if hq//hk>16 else (16,)):
            v = Variant('decode','bfloat16',d,d,bm,*c,1,score=(),kv='Contiguous')
            try: launches[f'{bm}:'+'/'.join(map(str,c))] = graph([lambda i=i: cufa.decode(*S[i % sets], lengths=L, out=O[i % sets], kernel=v) for i in range(n)]).launch
            except Exception as e: print(c, str(e)[:80])
    T = [tuple(map(tt, s)) for s in S]
    def call(i):
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION): return F.scaled_dot_product_attention(*T[i % sets], enable_gqa=hq != hk)
    st = torch.cuda.Stream(); g = torch.cuda.CUDAGraph()
    with torch.cuda.stream(st): call(0)
    torch.cuda.synchronize()
    with torch.cuda.graph(g, stream=st): keep = [call(i) for i in range(n)]
    launches['cudnn'] = g.replay
    torch.cuda.synchronize(); r = timed(launches, n)
    print((b, kv, hq, hk, d, sq), ' '.join(f'{k} {x:.1f}' for k, x in r.items()), f'best {nbytes/min(r.values())/1e3:.0f}GB/s', flush=True)
    del S, O, T, launches, keep, g
    cp.get_default_memory_pool().free_all_blocks()
