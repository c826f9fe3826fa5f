"""python dec.py: decode on a GPU: right, then timed by graph replay beside SDPA (rotating caches)."""
import sys, time, statistics, os
sys.path.insert(0, '.'); sys.path.insert(0, 'tests')
import numpy as np, cupy as cp, ml_dtypes, cufa, torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
BF = ml_dtypes.bfloat16
rng = cp.random.default_rng(0)
def rnd(*s, dt=BF): return rng.standard_normal(s, dtype=cp.float32).astype(dt)
def tt(x): return torch.from_dlpack(x.view(cp.int16)).view(torch.bfloat16)
def ref(q, k, v, lens, causal=True):
    b, hq, sq, d = q.shape; g = hq // k.shape[1]; out = cp.zeros((*q.shape[:3], v.shape[3]), cp.float32)
    for i in range(b):
        n = int(lens[i])
        if n == 0: continue
        K = cp.repeat(k[i, :, :n].astype(cp.float32), g, 0); V = cp.repeat(v[i, :, :n].astype(cp.float32), g, 0)
        s = q[i].astype(cp.float32) @ K.swapaxes(1, 2) * d ** -.5
        if causal: s = cp.where(cp.arange(n)[None] <= cp.arange(sq)[:, None] + n - sq, s, -cp.inf)
        m = s.max(-1, keepdims=True); m = cp.where(cp.isinf(m), 0, m); p = cp.exp(s - m); l = p.sum(-1, keepdims=True)
        out[i] = cp.where(l > 0, (p @ V) / cp.maximum(l, 1e-30), 0)
    return out
def check(b, hq, hk, sq, cap, d, lens, page=0, dt=BF, **o):
    q, k, v = rnd(b, hq, sq, d, dt=dt), rnd(b, hk, cap, d, dt=dt), rnd(b, hk, cap, d, dt=dt)
    L = cp.asarray(lens, dtype=cp.int32); r = ref(q, k, v, lens)
    for i, n in enumerate(lens): k[i, :, n:] = np.nan; v[i, :, n:] = np.nan
    kw = {}
    if page:
        per = -(-cap // page); perm = cp.random.permutation(b * per).astype(cp.int32)
        pad = per * page - cap
        def pg(x):
            x = cp.concatenate([x, cp.full((b, hk, pad, d), np.nan, dt)], 2) if pad else x
            x = x.reshape(b, hk, per, page, d).transpose(0, 2, 1, 3, 4).reshape(b * per, hk, page, d)
            y = cp.empty_like(x); y[perm] = x; return y
        k, v = pg(k), pg(v); kw['block_table'] = perm.reshape(b, per)
    out = cufa.decode(q, k, v, lengths=L, **kw, **o)
    e = float(cp.abs(out.astype(cp.float32) - r).max()); ok = e < (2e-5 if dt is np.float32 else 2e-2)
    again = cufa.decode(q, k, v, lengths=L, **kw, **o)
    same = bool((out.view(cp.uint8) == again.view(cp.uint8)).all())
    print('OK ' if ok and same else 'BAD', b, hq, hk, sq, cap, d, lens, page, np.dtype(dt).name, o, f'err {e:.2e} same {same}', flush=True)
if 'check' in sys.argv or len(sys.argv) == 1:
    for dt in (BF, np.float16, np.float32):
        check(1, 32, 8, 1, 8192, 128, [8192], dt=dt)
        check(5, 8, 2, 1, 3000, 64, [0, 1, 97, 3000, 339], dt=dt)
        check(3, 14, 2, 5, 3000, 128, [3, 3000, 1024], dt=dt)
        check(2, 71, 1, 3, 1000, 64, [1000, 7], dt=dt)
        check(4, 8, 8, 1, 1000, 256, [1000, 7, 0, 555], dt=dt)
        for page in (1, 7, 16, 64): check(3, 8, 2, 1, 1000, 128, [1000, 7, 555], page, dt=dt)
        check(3, 8, 2, 1, 1000, 128, [1000, 7, 555], dt=dt, num_splits=9)
    check(1, 32, 8, 1, 131072, 128, [131072])
def graph(calls):
    s = cp.cuda.Stream(non_blocking=True)
    with s:
        for c in calls: c()
        s.synchronize(); s.begin_capture()
        for c in calls: c()
        g = s.end_capture()
    return g
def timed(launches, n):
    out = {k: [] for k in launches}
    for r in range(15):
        for k in sorted(launches, key=lambda x: hash((x, r))):
            a, z = cp.cuda.Event(), cp.cuda.Event(); a.record(); launches[k](); z.record(); z.synchronize()
            out[k].append(cp.cuda.get_elapsed_time(a, z) / n * 1e3)
    return {k: statistics.median(x) for k, x in out.items()}
if 'time' in sys.argv or len(sys.argv) == 1:
    for (b, kv, hq, hk, d, sq) in ((1,1024,32,8,128,1),(1,8192,32,8,128,1),(1,32768,32,8,128,1),(1,131072,32,8,128,1),(4,8192,32,8,128,1),(16,8192,32,8,128,1),(64,4096,32,8,128,1),(256,512,32,8,128,1),(16,8192,32,1,128,1),(16,8192,64,8,64,1),(8,8192,16,8,256,1),(1,8192,64,8,64,1),(16,8192,32,8,128,4),(16,8192,32,8,128,16)):
        nbytes = 2 * b * hk * kv * d * 2; sets = min(60, 1 + -(-2 * 60_000_000 // nbytes)); n = max(sets, 8)
        S = [(rnd(b, hq, sq, d), rnd(b, hk, kv, d), rnd(b, hk, kv, d)) for _ in range(sets)]
        O = [cp.empty_like(q) for q, _, _ in S]; L = cp.full(b, kv, cp.int32)
        launches = {'cufa': graph([lambda i=i: cufa.decode(*S[i % sets], lengths=L, out=O[i % sets]) for i in range(n)]).launch}
        try:
            tabs = []
            for q, k, v in S:
                pg = lambda x: cp.ascontiguousarray(x.reshape(b, hk, kv // 64, 64, d).transpose(0, 2, 1, 3, 4)).reshape(-1, hk, 64, d)
                tabs.append((pg(k), pg(v)))
            table = cp.arange(b * (kv // 64), dtype=cp.int32).reshape(b, -1)
            launches['page64'] = graph([lambda i=i: cufa.decode(S[i % sets][0], *tabs[i % sets], lengths=L, block_table=table, out=O[i % sets]) for i in range(n)]).launch
        except Exception as e: print('paged', e)
        for name, be in (('cudnn', SDPBackend.CUDNN_ATTENTION), ('fa2', SDPBackend.FLASH_ATTENTION)):
            if sq > 1: continue
            try:
                T = [tuple(map(tt, s)) for s in S]
                def call(i): 
                    with sdpa_kernel(be): return F.scaled_dot_product_attention(*T[i % sets], enable_gqa=hq != hk)
                st = torch.cuda.Stream(); g = torch.cuda.CUDAGraph()
                with torch.cuda.stream(st): call(0)
                torch.cuda.synchronize()
                with torch.cuda.graph(g, stream=st):
                    keep = [call(i) for i in range(n)]
                launches[name] = g.replay
            except Exception as e: print(name, str(e)[:100])
        torch.cuda.synchronize()
        r = timed(launches, n)
        print((b, kv, hq, hk, d, sq), ' '.join(f'{k} {x:.1f}us {nbytes/x/1e3:.0f}GB/s' for k, x in r.items()), flush=True)
        del S, O, launches
        cp.get_default_memory_pool().free_all_blocks()
