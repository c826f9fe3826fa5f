"""Errors of attention in 8 bits on hard data, against float64; FlashAttention-3's next to them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import cupy
import numpy as np

import cufa
from benchmarks.contestants import reason, rounded, say
from benchmarks.inputs import DTYPES, to_cupy, to_torch
from benchmarks.peers import flash_attn_3_interface
from benchmarks.results import figures
from cufa.explorer import formula
from cufa.features.feature import Places

HEAD_DIMS = (64, 128, 256)
LENGTHS = (1 << 10, 1 << 13, 1 << 15, 1 << 17)
NEEDLES = 200
OURS, FA3 = "fp8_wgmma", "fa3_fp8"
_ROWS, _HEADS = 1024, 8

Arrays = tuple[Any, Any, Any]


class Method(NamedTuple):
    """How arrays are quantized, and by what they are attended."""

    kernel: str
    granularity: str
    hadamard: bool


BEST = Method(OURS, "block", True)
METHODS = (
    BEST,
    Method(OURS, "block", False),
    Method(OURS, "head", True),
    Method(OURS, "tensor", True),
    Method(OURS, "tensor", False),
    Method(FA3, "tensor", False),
)


def rows(seed: int) -> Iterator[dict[str, Any]]:
    """Yield the result rows, and print a line for each."""
    rng = cupy.random.default_rng(seed)
    for row in _rows(rng):
        words = (row[name] for name in ("data", "d", "s", *Method._fields))
        print(f"{' '.join(map(str, words))}: {figures(row)}", flush=True)
        yield row


def _rows(rng: Any) -> Iterator[dict[str, Any]]:
    for d in HEAD_DIMS:
        shape = 2, _HEADS, _ROWS, d
        for data, make in (("outliers", outliers), ("magnitudes", magnitudes)):
            arrays = make(rng, shape)
            for method in METHODS:
                yield from (row for row, _ in _measured(data, arrays, method))
        for n in LENGTHS:
            q = rng.standard_normal((1, 1, 128, d), dtype=np.float32)
            k, v = (rng.standard_normal((1, 1, n, d), dtype=np.float32) for _ in range(2))
            for method in (BEST, METHODS[-1]):
                yield from (row for row, _ in _measured("lengths", (q, k, v), method))
        q, k, v, at = needles(rng, LENGTHS[-1], d)
        for method in (BEST, METHODS[-1]):
            for row, out in _measured("needles", (q, k, v), method):
                found = int(((out[0, 0] @ v[0, 0].T).argmax(axis=-1) == at).sum())
                yield {**row, "found": found, "draws": NEEDLES}


def outliers(rng: Any, shape: tuple[int, ...]) -> Arrays:
    """Draw N(0, 1) + N(0, 100) * Bernoulli(0.001) (Shah et al. 2024, section 4.3)."""

    def drawn() -> Any:
        rare = rng.random(shape, dtype=np.float32) < 0.001
        normal = (rng.standard_normal(shape, dtype=np.float32) for _ in range(2))
        return next(normal) + np.float32(10) * next(normal) * rare

    return drawn(), drawn(), drawn()


def magnitudes(rng: Any, shape: tuple[int, ...]) -> Arrays:
    """Draw normal numbers; those of V are smaller by 10 from each 128 tokens to the next."""
    q, k, v = (rng.standard_normal(shape, dtype=np.float32) for _ in range(3))
    factors = np.float32(10) ** -np.repeat(np.arange(8, dtype=np.float32), shape[2] // 8)
    return q, k, v * cupy.asarray(factors)[:, None]


def needles(rng: Any, n: int, d: int) -> tuple[Any, Any, Any, Any]:
    """Draw queries with a key each whose score stands out by 5, and return where these are."""
    q = rng.standard_normal((1, 1, NEEDLES, d), dtype=np.float32)
    k, v = (rng.standard_normal((1, 1, n, d), dtype=np.float32) for _ in range(2))
    at = cupy.arange(NEEDLES) * (n // NEEDLES) + 7
    k[0, 0, at] = 0
    root = np.float32(d**0.5)
    others = (q[0, 0] @ k[0, 0].T).max(axis=-1, keepdims=True) / root
    k[0, 0, at] = q[0, 0] * (others + 5) * root / (q[0, 0] ** 2).sum(axis=-1, keepdims=True)
    return q, k, v, at


def _measured(data: str, arrays: Arrays, method: Method) -> Iterator[tuple[dict[str, Any], Any]]:
    """Yield the row of a method and its result, if it is here."""
    options = {"attention_chunk": 128, "causal": True} if data == "magnitudes" else {}
    if options and method.kernel == FA3:
        return  # it has no such chunks in 8 bits
    try:
        out = _attended(arrays, method, options).astype(np.float32)
    except Exception as error:  # whatever a library raises, the others can run
        say(f"{data}: no {method.kernel}: {reason(error)}")
        return
    rmse, relative = errors(out, expected(arrays, options), data == "magnitudes")
    q, k, _ = arrays
    row = {
        **{"data": data, "d": q.shape[3], "s": k.shape[2], **method._asdict()},
        **{"rmse": rounded(rmse, 4), "relative": rounded(relative, 4)},
    }
    yield row, out


def expected(arrays: Arrays, options: dict[str, Any]) -> Any:
    """Return the result in float64."""
    q, k, v = arrays
    found = cupy.empty((*q.shape[:3], v.shape[3]), np.float64)
    sq, sk, scale = q.shape[2], k.shape[2], q.shape[3] ** -0.5
    at = Places(0, 0, cupy.arange(sq)[:, None], cupy.arange(sk), sq, sk)
    how = {"product": cupy.matmul, "scale": scale, **options}
    for b, h in np.ndindex(q.shape[:2]):
        one, keys, values = (x[b, h].astype(np.float64) for x in (q, k, v))
        found[b, h], _ = formula.attend(cupy, one, keys, values, at, **how)
    return found


def errors(out: Any, exact: Any, by_chunks: bool) -> tuple[float, float]:
    """Return the root mean square error, and by that of the result: of the worst chunk, if so."""
    squares, sizes = (out - exact) ** 2, exact**2
    rmse = float(squares.mean() ** 0.5)
    if not by_chunks:
        return rmse, rmse / float(sizes.mean() ** 0.5)
    chunks = [x.reshape(-1, 8, x.shape[2] // 8 * x.shape[3]).mean(axis=2) for x in (squares, sizes)]
    return rmse, float((chunks[0] / chunks[1]).max() ** 0.5)


def _attended(arrays: Arrays, method: Method, options: dict[str, Any]) -> Any:
    if method.kernel == FA3:
        return _flash_attn_3(arrays)
    q, k, v = arrays
    both: dict[str, Any] = {"granularity": method.granularity, "hadamard": method.hadamard}
    q8, k8 = (cufa.quantize(x, **both) for x in (q, k))
    v8 = cufa.quantize(v, granularity=both["granularity"], transposed=True)
    # The least of the results are below float16's least number.
    dtype = DTYPES["bfloat16" if options else "float16"]
    return cufa.attention(q8, k8, v8, out_dtype=dtype, **options)


def _flash_attn_3(arrays: Arrays) -> Any:
    """Return its result with a scale for each tensor."""
    import torch

    function = flash_attn_3_interface().flash_attn_func
    given, scales = [], {}
    for name, x in zip("qkv", arrays, strict=True):
        tensor = to_torch(x).transpose(1, 2).contiguous()
        scale = tensor.abs().max() / 448
        given.append((tensor / scale).to(torch.float8_e4m3fn))
        scales[f"{name}_descale"] = scale.expand(x.shape[0], arrays[1].shape[1]).contiguous()
    out = function(*given, **scales)
    return to_cupy((out[0] if isinstance(out, tuple) else out).transpose(1, 2))
