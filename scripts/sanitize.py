"""A small grid of calls that reaches every kernel, to be run under compute-sanitizer.

compute-sanitizer --tool memcheck python scripts/sanitize.py
and the same with --tool racecheck, and with --tool initcheck and --kernel-regex kns=fa, kns=decode,
kns=append, kns=block, kns=bwd, kns=merge and kns=quantize: initcheck does not see what TMA writes,
and so complains about CuPy's copies of it. The words attention, scores, own, varlen, gradients,
decode, decode8, caches, merge and fp8 run only those parts.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator
from typing import Any

import cupy
import ml_dtypes
import numpy as np

import cufa
from cufa.specs import ATTENTION_KERNELS

_DTYPES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32}
# Batch, heads, seq: odd. One has more tiles than blocks run at once; it and the last, many keys.
_SHAPES = (
    *((2, 4, 2, 131, 197), (1, 7, 1, 65, 40), (1, 2, 2, 3, 300)),
    *((1, 92, 23, 301, 460), (1, 2, 1, 70, 900)),
)
_HEAD_DIMS = ((8, 100), (24, 24), (59, 59), (64, 64), (128, 128), (192, 128), (256, 256))

# Keys of each sequence: none, fewer than queries, and odd numbers of several tiles.
_LENGTHS = (333, 0, 1, 150, 77)
# Heads of queries and of keys, and queries of a sequence: few rows of a tile, and several tiles.
_ROWS = ((8, 2, 1), (14, 2, 3), (71, 1, 1))
_PAGE_SIZES = (0, 1, 7, 64)  # 0: contiguous

_rng = np.random.default_rng(0)


def main() -> None:
    """Run the grid, or the parts that are named; a CUDA error ends it with an exception."""
    parts = {
        **{"attention": attention, "scores": scores, "own": own, "varlen": varlen},
        **{"gradients": gradients, "decode": decode, "decode8": decode8, "caches": caches},
        **{"merge": merge, "fp8": fp8},
    }
    parser = argparse.ArgumentParser(description="Calls that reach every kernel.")
    parser.add_argument("parts", nargs="*", metavar="part", help=", ".join(parts))
    chosen = parser.parse_args().parts
    for name in chosen:
        if name not in parts:
            parser.error(f"{name!r} is none of {', '.join(parts)}")
    for name in chosen or parts:
        calls = sum(1 for _ in parts[name]())
        cupy.cuda.get_current_stream().synchronize()
        print(f"{name}: {calls} calls")


def _normal(*shape: int) -> np.ndarray:
    return _rng.standard_normal(shape, dtype=np.float32)


def _random(dtype: str, *shape: int, first_rows: float = 1) -> cupy.ndarray:
    x = _normal(*shape)
    x[..., : shape[-2] // 3, :] *= first_rows
    return cupy.asarray(x.astype(_DTYPES[dtype]))


def attention() -> Iterator[cupy.ndarray]:
    """Call each kernel of `cufa.attention`."""
    for kernel in ATTENTION_KERNELS.values():
        grid = itertools.product(kernel.dtypes, _HEAD_DIMS, _SHAPES, (False, True))
        for dtype, (d, dv), (b, hq, hk, sq, sk), causal in grid:
            q = _random(dtype, b, sq, hq, d).swapaxes(1, 2)  # strided
            # The keys that fa3_wgmma takes last outgrow what it knows of the others.
            k = _random(dtype, b, hk, sk, d, first_rows=30)
            v = _random(dtype, b, hk, sk, dv)
            yield cufa.attention(q, k, v, causal=causal, return_lse=True, kernel=kernel.name)


def scores() -> Iterator[cupy.ndarray]:
    """Call each kernel with masks, and with arrays that parts of the score read."""
    for kernel in ATTENTION_KERNELS.values():
        if "Mask" not in kernel.scores:
            continue
        grid = itertools.product(kernel.dtypes, ((24, 24), (64, 64), (128, 128)), _SHAPES)
        for dtype, (d, dv), (b, hq, hk, sq, sk) in grid:
            q, k, v = (
                _random(dtype, b, *sizes) for sizes in ((hq, sq, d), (hk, sk, d), (hk, sk, dv))
            )
            mask = cupy.asarray(_rng.random((b, 1, sq, sk)) < 0.5)
            bits = cupy.asarray(np.packbits(_rng.random((hq, 1, sk)) < 0.5, axis=-1))
            found: tuple[dict[str, Any], ...] = (
                {"window": (40, 9), "dropout_p": 0.3, "seed": 5},
                {"causal": "top-left", "softcap": 5.0},
                {"causal": True, "alibi_slopes": _random("float32", 1, hq)[0]},
                {"bias": _random("bfloat16", hq, sq, sk), "sinks": _random("float32", 1, hq)[0]},
                {"mask": mask, "window": (None, 0)},
                {"mask": bits, "bias": _random("float32", 1, sk)},
            )
            for options in found:
                yield cufa.attention(q, k, v, return_lse=True, kernel=kernel.name, **options)


def fp8() -> Iterator[cupy.ndarray]:
    """Call attention in 8 bits, also of sequences of several lengths, and all passes before it."""
    grid = itertools.product(("float16", "bfloat16"), (64, 96, 100, 128, 192, 256), _SHAPES)
    for dtype, d, (b, hq, hk, sq, sk) in grid:
        q = _random(dtype, b, sq, hq, d).swapaxes(1, 2)  # strided
        k, v = _random(dtype, b, hk, sk, d, first_rows=30), _random(dtype, b, hk, sk, d)
        lengths = cupy.asarray(np.arange(b) * 37 % (sk + 1), np.int32)
        found: tuple[dict[str, Any], ...] = (
            *({}, {"causal": True}, {"window": (40, 9), "dropout_p": 0.3, "seed": 5}),
            {"lengths_k": lengths, "causal": True, "softcap": 5.0},
            {"lengths_k": lengths, "sinks": _random("float32", 1, hq)[0]},
        )
        for options in found:
            yield cufa.attention(q, k, v, precision="fp8", return_lse=True, **options)
        for block, hadamard in ((16, True), (1024, False)):
            for transposed in (False, True):
                how: dict[str, Any] = {"hadamard": hadamard, "transposed": transposed}
                yield cufa.quantize(q, block=block, **how).values
    wild = np.array([2**31 - 1, -5, 300, 7], np.int32)
    some = np.array([0, 130, 130, 131, 195, 410], np.int32)
    for d, causal in itertools.product((64, 100, 128, 192, 256), (False, True)):
        q, k, v = (_random("bfloat16", 412, heads, d) for heads in (4, 2, 2))
        for offsets in map(cupy.asarray, (wild, some)):
            yield cufa.attention_varlen(q, k, v, offsets, offsets, precision="fp8", causal=causal)


def own() -> Iterator[cupy.ndarray]:
    """Call each kernel with functions of a caller's own, which ask for what arrays do not have."""
    for kernel in ATTENTION_KERNELS.values():
        if "MaskMod" not in kernel.scores:
            continue
        grid = itertools.product(kernel.dtypes, ((64, 64), (192, 128)), _SHAPES, (False, True))
        for dtype, (d, dv), (b, hq, hk, sq, sk), causal in grid:
            q, k = _random(dtype, b, hq, sq, d), _random(dtype, b, hk, sk, d)
            v, table = _random(dtype, b, hk, sk, dv), _random("float16", 7, 5)[::2]

            def score_mod(score, b, h, q_idx, kv_idx, table=table):  # type: ignore[no-untyped-def]
                return score + table[q_idx - kv_idx, h * kv_idx]

            def mask_mod(b, h, q_idx, kv_idx, table=table):  # type: ignore[no-untyped-def]
                return (q_idx // 70 + kv_idx // 40 + h) % 3 + table[b - 9, h] > 1

            options: dict[str, Any] = {"score_mod": score_mod, "mask_mod": mask_mod}
            tiles = cufa.BlockMask.of(mask_mod, b, hq, sq, sk, block=(64, 32), xp=cupy)
            for block_mask in (None, tiles):
                options |= {"causal": causal, "block_mask": block_mask}
                yield cufa.attention(q, k, v, kernel=kernel.name, **options)


def varlen() -> Iterator[cupy.ndarray]:
    """Sequences of unequal lengths, empty ones too, by each kernel; offsets that are no offsets."""
    lengths = (130, 0, 1, 64, 215), (70, 33, 0, 64, 301)
    sums = [np.cumsum([0, *each]).astype(np.int32) for each in lengths]
    wild = np.array([2**31 - 1, -5, 300, 7], np.int32)
    for kernel in ATTENTION_KERNELS.values():
        if "Varlen" not in kernel.kvs:
            continue
        for dtype, d, causal in itertools.product(kernel.dtypes, (24, 64, 128, 192), (False, True)):
            q = _random(dtype, sums[0][-1] + 2, 8, d)
            k, v = (_random(dtype, sums[1][-1] + 2, 2, d) for _ in range(2))
            options: dict[str, Any] = {"causal": causal, "return_lse": True, "kernel": kernel.name}
            for offsets in (sums, (wild, wild)):
                of_q, of_k = (cupy.asarray(each) for each in offsets)
                yield cufa.attention_varlen(q, k, v, of_q, of_k, **options)
            dense = [_random(dtype, 3, 2, n, d) for n in (150, 200, 200)]
            keys = cupy.asarray(np.array([200, 0, 77], np.int32))
            queries = cupy.asarray(np.array([40, 150, 0], np.int32))
            for its in (None, queries):
                yield cufa.attention(*dense, lengths_k=keys, lengths_q=its, **options)


def gradients() -> Iterator[cupy.ndarray]:
    """Gradients of equal and of unequal lengths, sums in any order and in one."""
    found: tuple[dict[str, Any], ...] = (
        {},
        {"causal": True, "deterministic": True},
        {"window": (40, 9), "dropout_p": 0.3, "seed": 5},
        {"softcap": 5.0, "deterministic": True},
    )
    for dtype, (d, dv), (b, hq, hk, sq, sk) in itertools.product(_DTYPES, _HEAD_DIMS, _SHAPES):
        q, k, v, dout = (
            _random(dtype, b, *sizes)
            for sizes in ((hq, sq, d), (hk, sk, d), (hk, sk, dv), (hq, sq, dv))
        )
        for options in found:
            forward = {name: x for name, x in options.items() if name != "deterministic"}
            out, lse = cufa.attention(q, k, v, return_lse=True, **forward)
            yield cufa.attention_backward(dout, q, k, v, out, lse, **options)[0]
    lengths = (130, 0, 1, 64, 215), (70, 33, 0, 64, 301)
    sums = [cupy.asarray(np.cumsum([0, *each]).astype(np.int32)) for each in lengths]
    wild = cupy.asarray(np.array([2**31 - 1, -5, 300, 7], np.int32))
    for dtype, d, deterministic in itertools.product(_DTYPES, (24, 64, 128, 192), (False, True)):
        q, dout = (_random(dtype, sum(lengths[0]) + 2, 8, d) for _ in range(2))
        k, v = (_random(dtype, sum(lengths[1]) + 2, 2, d) for _ in range(2))
        for offsets in (sums, (wild, wild)):
            out, lse = cufa.attention_varlen(q, k, v, *offsets, causal=True, return_lse=True)
            yield cufa.attention_varlen_backward(
                *(dout, q, k, v, out, lse, *offsets), causal=True, deterministic=deterministic
            )[0]


def decode() -> Iterator[cupy.ndarray]:
    """Decode over caches of both kinds, with and without a number of splits."""
    batch, capacity = len(_LENGTHS), max(_LENGTHS) + 2
    lengths = cupy.asarray(np.array(_LENGTHS, np.int32))
    grid = itertools.product(_DTYPES, _HEAD_DIMS, _ROWS, _PAGE_SIZES, (None, 3))
    for dtype, (d, dv), (hq, hk, sq), page_size, splits in grid:
        q = _random(dtype, batch, sq, hq, d).swapaxes(1, 2)
        pages, keys, table = batch, capacity, None
        if page_size:
            table = _table(page_size, capacity)
            pages, keys = table.size, page_size
        k, v = (_random(dtype, pages, hk, keys, n) for n in (d, dv))
        options = {"lengths": lengths, "block_table": table, "num_splits": splits}
        for causal in (False, True)[: 1 + (sq > 1)]:
            yield cufa.decode(q, k, v, causal=causal, return_lse=True, **options)
    yield from _scores()
    yield from _out_of_range()
    yield from _long()


def decode8() -> Iterator[cupy.ndarray]:
    """Decode over caches of 8 bits, of both kinds, also with windows."""
    batch, capacity = len(_LENGTHS), max(_LENGTHS) + 2
    lengths = cupy.asarray(np.array(_LENGTHS, np.int32))
    dtypes, kinds = ("float16", "bfloat16"), (np.uint8, np.int8)
    for dtype, kind, (d, dv), (hq, hk, sq), page_size in itertools.product(
        dtypes, kinds, _HEAD_DIMS, _ROWS, _PAGE_SIZES
    ):
        pages, keys, table = batch, capacity, None
        if page_size:
            table = _table(page_size, capacity)
            pages, keys = table.size, page_size
        q = _random(dtype, batch, hq, sq, d)
        # Made on the host: initcheck does not see what kernels write that it does not check.
        k, v = (cupy.asarray((_normal(pages, hk, keys, n) * 20).astype(np.int8)) for n in (d, dv))
        of_k, of_v = (cupy.asarray(abs(_normal(pages, hk, keys))) for _ in range(2))
        options = {"lengths": lengths, "block_table": table, "k_scale": of_k, "v_scale": of_v}
        for window in ((None, None), (40, None)):
            yield cufa.decode(q, k.view(kind), v.view(kind), window=window, **options)


def _scores() -> Iterator[cupy.ndarray]:
    """Decode with windows, softcap, slopes and sinks, for each kernel and each way of paging."""
    batch, capacity = len(_LENGTHS), max(_LENGTHS) + 2
    lengths = cupy.asarray(np.array(_LENGTHS, np.int32))
    grid = itertools.product(_DTYPES, ((8, 2, 1), (8, 2, 6), (14, 1, 3)), _PAGE_SIZES, (None, 3))
    for dtype, (hq, hk, sq), page_size, splits in grid:
        pages, keys, table = batch, capacity, None
        if page_size:
            table = _table(page_size, capacity)
            pages, keys = table.size, page_size
        q = _random(dtype, batch, hq, sq, 64)
        k, v = (_random(dtype, pages, hk, keys, 64) for _ in range(2))
        options = {"lengths": lengths, "block_table": table, "num_splits": splits}
        slopes, sinks = _random("float32", batch, hq), _random("float32", 1, hq)[0]
        for score in (
            {"window": (40, None)},
            {"window": (3, 20), "causal": False},
            {"alibi_slopes": slopes, "sinks": sinks, "softcap": 5.0, "window": (70, 0)},
        ):
            yield cufa.decode(q, k, v, return_lse=True, **options, **score)


def _table(page_size: int, capacity: int) -> cupy.ndarray:
    """Return pages in any order, and numbers of none where a sequence has no key."""
    width = -(-capacity // page_size)
    table = _rng.permutation(len(_LENGTHS) * width).reshape(-1, width).astype(np.int32)
    for row, length in zip(table, _LENGTHS, strict=True):
        row[-(-length // page_size) :] = 2**31 - 1
    return cupy.asarray(table)


def _out_of_range() -> Iterator[cupy.ndarray]:
    """Lengths and pages that only the device knows: results mean nothing, no read is outside."""
    lengths = cupy.asarray(np.array([2**31 - 1, -5], np.int32))
    table = cupy.asarray(np.array([[-1, 5, 2**31 - 1], [0, 1, -(2**31)]], np.int32))
    for dtype in _DTYPES:
        q, pages = _random(dtype, 2, 4, 1, 64), _random(dtype, 5, 2, 16, 64)
        yield cufa.decode(q, pages, pages, lengths=lengths, block_table=table)
        yield cufa.decode(q, pages[:2], pages[:2], lengths=lengths)


def _long() -> Iterator[cupy.ndarray]:
    """Long sequences, and a short one among them: equal shares, in which a unit's end counts."""
    lengths = cupy.asarray(np.array((8001, 4100, 6000, 1, 8192), np.int32))
    for dtype, d, heads in (("bfloat16", 128, 32), ("float16", 256, 16)):
        q, k = (_random(dtype, 5, heads, n, d) for n in (1, 8192))  # made on the host, as above
        yield cufa.decode(q, k, k, lengths=lengths, return_lse=True)


def caches() -> Iterator[cupy.ndarray]:
    """Fill caches of both kinds by unequal steps, and decode from them."""
    rotary = (None, (8, False), (24, True))  # elements that are turned, and in which pairs
    grid = itertools.product(_DTYPES, ((24, 24), (59, 59), (64, 128)), rotary, (0, 7))
    for dtype, (d, dv), turned, page_size in grid:
        made = None
        if turned is not None:
            dim, interleaved = turned
            made = cufa.Rotary.of_theta(1e4, dim, 140, interleaved=interleaved, xp=cupy)
        options = {"head_dim_v": dv, "dtype": dtype, "rotary": made, "xp": cupy}
        if page_size:
            paged = cufa.PagedKVCache(70, page_size, 3, 2, d, pages_per_sequence=20, **options)
            paged.allocate()
            paged.fork(0)
            paged.allocate()
            cache: cufa.KVCache | cufa.PagedKVCache = paged
        else:
            cache = cufa.KVCache(3, 2, 140, d, **options)
        for counts in ((33, 0, 5), (1, 1, 1), (3, 2, 0), (0, 0, 0)):
            n = max(1, *counts)
            k, v, q = (_random(dtype, 3, h, n, dim) for h, dim in ((2, d), (2, dv), (6, d)))
            yield cache.decode(cache.append(k, v, q=q, counts=counts), return_lse=True)
        cache.truncate([20, 2, 0])
        cache.reorder([1, 0, 0])
        if page_size:  # the fork's page is copied when it grows
            paged.free(1)
            paged.fork(0)
        k, v, q = (_random(dtype, 3, h, 1, dim) for h, dim in ((2, d), (2, dv), (6, d)))
        yield cache.decode(cache.append(k, v, q=q))
        if made is not None:
            yield made.apply(_random(dtype, 3, 6, 5, d), cupy.arange(130, 145).reshape(3, 5))


def merge() -> Iterator[cupy.ndarray]:
    """Merge few and many parts, rows that have seen no key among them."""
    grid = itertools.product(_DTYPES, _DTYPES, (1, 24, 59, 256), (1, 3, 130), (False, True))
    for dtype, of_out, d, parts, strided in grid:
        shape = (2, 5, 3) if strided else (2, 3, 5)
        outs = _random(dtype, parts, *shape, d)
        lses = _random("float32", parts, *shape)
        lses[:, :, 1] = -np.inf
        if strided:
            outs, lses = outs.swapaxes(2, 3), lses.swapaxes(2, 3)
        yield cufa.merge(outs, lses, out=cupy.empty((2, 3, 5, d), _DTYPES[of_out]))


if __name__ == "__main__":
    main()
