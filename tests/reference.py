"""The oracle of every numerical test: attention in float64, a naive twin, and the rule to accept.

A result is accepted when its error against float64 is at most twice that of the twin, which
computes the same formula naively in the input dtype, in float32 in two or three ways, plus the
rounding noise of the output dtype. So the tolerance follows from the inputs, and no test picks one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np

from cufa.explorer import formula
from cufa.features.feature import Places

DTYPES: dict[str, np.dtype] = {
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float32": np.dtype(np.float32),
}

_FEW = 1 << 12  # numbers of a result


def to_host(array: Any) -> np.ndarray:
    """Return a NumPy or CuPy array as a NumPy array."""
    return array if isinstance(array, np.ndarray) else array.get()


def random_inputs(
    rng: np.random.Generator,
    dtype: str,
    *,
    b: int = 1,
    hq: int = 1,
    hk: int | None = None,
    sq: int,
    sk: int | None = None,
    d: int,
    dv: int | None = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Draw standard normal q (b, hq, sq, d), k (b, hk, sk, d) and v (b, hk, sk, dv)."""
    hk = hq if hk is None else hk
    sk = sq if sk is None else sk
    dv = d if dv is None else dv
    shapes = ((b, hq, sq, d), (b, hk, sk, d), (b, hk, sk, dv))
    q, k, v = (rng.standard_normal(s, np.float32).astype(DTYPES[dtype]) for s in shapes)
    return q, k, v


def hidden_keys(sq: int, sk: int, causal: bool | str = True, **options: Any) -> np.ndarray:
    """Bool (sq, sk): True where a mask by place hides key j from query i."""
    places = _places((1, 1, sq, sk))
    hidden = formula.hidden(np, places, causal=causal, **options)
    return np.broadcast_to(hidden, (1, 1, sq, sk))[0, 0]


def _places(shape: tuple[int, ...]) -> Places:
    b, h, i, j = np.ix_(*map(np.arange, shape))
    return Places(b, h, i, j, *shape[2:])


def _by_group(x: np.ndarray, heads_kv: int) -> np.ndarray:
    """Return (b, hq, ...) as (b, heads_kv, group, ...)."""
    b, hq = x.shape[:2]
    return x.reshape(b, heads_kv, hq // max(1, heads_kv), *x.shape[2:])


def _of_group(x: np.ndarray, y: np.ndarray, way: str = "apart") -> np.ndarray:
    """Products of (b, hq, ...) with (b, heads_kv, ...).

    Each head of a group `apart`, all `stacked` in one product, or each sum's terms `in turn`.
    """
    grouped = _by_group(x, y.shape[1])
    if way == "stacked":
        rows = grouped.shape[2] * grouped.shape[3]
        product = grouped.reshape(*y.shape[:2], rows, x.shape[3]) @ y
    elif way == "in turn":
        product = np.zeros((*grouped.shape[:-1], y.shape[3]), x.dtype)
        for i in range(x.shape[3]):
            product += grouped[..., i : i + 1] * y[:, :, None, i : i + 1]
    else:
        product = grouped @ y[:, :, None]
    return product.reshape(*x.shape[:3], y.shape[3])


def _attend(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    sinks: np.ndarray | None = None,
    alibi_slopes: np.ndarray | None = None,
    scale: float | None = None,
    way: str = "apart",
    **options: Any,
) -> tuple[np.ndarray, np.ndarray]:
    return formula.attend(
        *(np, q, k, v, _places((*q.shape[:3], k.shape[2]))),
        product=partial(_of_group, way=way),
        sinks=None if sinks is None else sinks[:, None, None],
        alibi_slopes=None if alibi_slopes is None else alibi_slopes[..., None, None],
        scale=q.shape[-1] ** -0.5 if scale is None else scale,
        **options,
    )


def oracle(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    **options: Any,
) -> tuple[np.ndarray, np.ndarray]:
    """Attention in float64.

    Parameters
    ----------
    q, k, v : ndarray
        (b, hq, sq, d), (b, hk, sk, d), (b, hk, sk, dv).
    **options
        As given to `attention`: causal, scale, window, softcap, sinks and other arrays; and `keep`,
        factors of the weights, (b, hq, sq, sk).

    Returns
    -------
    out : ndarray
        (b, hq, sq, dv) float64.
    lse : ndarray
        (b, hq, sq) float64.
    """
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    return _attend(q, k, v, **options)


def twin(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    *,
    way: str = "apart",
    **options: Any,
) -> np.ndarray:
    """Attention as a user would write it in the input dtype: the error that is allowed.

    Q K^T is rounded to the input dtype, the softmax is computed in float32 and rounded, P V is
    rounded. Products accumulate in float32, in a way of `_of_group`.
    """
    rounded, dtype = partial(_rounded, dtype=q.dtype), q.dtype
    q, k, v = map(rounded, (q, k, v))
    return _attend(q, k, v, rounded=rounded, way=way, **options)[0].astype(dtype, copy=False)


def _rounded(x: np.ndarray, dtype: np.dtype) -> np.ndarray:
    return x.astype(dtype, copy=False).astype(np.float32, copy=False)


def _largest_error(x: np.ndarray, expected: np.ndarray) -> float:
    error = np.subtract(x, expected, dtype=np.float64)
    return float(np.max(np.abs(error, out=error), initial=0.0))


class Expected:
    """The reference of a call's results: computed once, however many there are.

    Parameters
    ----------
    q, k, v : ndarray
        The inputs, on the host, in (batch, heads, seq, head_dim) order.
    score
        As given to `attention`: causal, scale, window, softcap, arrays.

    Attributes
    ----------
    bound : float
        The largest error that is accepted.
    """

    def __init__(
        self,
        q: np.ndarray,
        k: np.ndarray,
        v: np.ndarray,
        **score: Any,
    ) -> None:
        self._dtype = q.dtype
        self._out, self._lse = oracle(q, k, v, **score)
        rounded = partial(_rounded, dtype=q.dtype)
        noise = formula.rounding_noise(rounded(self._out), rounded)
        # How float32 sums are rounded depends on their order, and that on the product's size, and
        # on the processor. Of few results, of which the largest error is a matter of chance, those
        # of a plain loop count, too.
        ways = ("apart", "stacked") if q.dtype == np.float32 else ("apart",)
        if q.dtype == np.float32 and self._out.size <= _FEW:
            ways = (*ways, "in turn")
        naive = (twin(q, k, v, way=way, **score) for way in ways)
        self.bound = 2 * max(_largest_error(each, self._out) for each in naive) + 2 * noise

    def assert_accepts(
        self,
        out: Any,
        lse: Any,
        what: str = "",
        bound: float | None = None,
        lse_slack: float = 0.0,
    ) -> None:
        """Assert that a result, and its LSE unless that is None, are as accurate as the rule asks.

        Parameters
        ----------
        out : array
            (b, hq, sq, dv), NumPy or CuPy, in q's dtype.
        lse : array or None
            (b, hq, sq) float32, NumPy or CuPy.
        what : str
            Names the case when it fails.
        bound : float, optional
            In place of its own: the largest of those over the same keys. Of few numbers, the
            largest error is a matter of chance.
        lse_slack : float
            Error that the LSE may have beyond the rule.
        """
        out = to_host(out)
        bound = self.bound if bound is None else bound
        assert out.dtype == self._dtype, what
        assert out.shape == self._out.shape, what
        error = _largest_error(out, self._out)
        # False for NaN.
        assert error <= bound, f"{what}: error {error:.3g} exceeds {bound:.3g}"
        none = self._lse == -np.inf
        assert not out[none].any(), f"{what}: a row without a key is not 0"

        if lse is None:
            return
        lse = to_host(lse)
        assert lse.dtype == np.float32, what
        assert lse.shape == self._lse.shape, what
        np.testing.assert_array_equal(lse == -np.inf, none, err_msg=f"{what}: rows without a key")
        seen = self._lse[~none]
        if self._dtype == np.float32:  # relative; to 1 where the logarithm itself comes near 0
            allowed = 1e-5 * np.maximum(np.abs(seen), 1.0)
        else:
            allowed = np.full(seen.shape, 1e-3)
        excess = np.abs(lse[~none] - seen) - allowed - lse_slack
        assert np.all(excess <= 0), f"{what}: LSE beyond its tolerance by {excess.max():.3g}"


def lse_slack(
    q: np.ndarray,
    k: np.ndarray,
    *,
    softcap: float | None = None,
    scale: float | None = None,
    score: tuple[str, ...] = (),
    **others: Any,
) -> float:
    """Return what a softcap may add to the error of a GPU's LSE in 16 bits, see `attention`.

    More, if the kernel is a variant with the faster softcap in its `score`.
    """
    if softcap is None or q.dtype == np.float32:
        return 0.0
    scale = q.shape[-1] ** -0.5 if scale is None else abs(scale)
    norms = (np.linalg.norm(x.astype(np.float32), axis=-1) for x in (q, k))
    of_q, of_k = (np.nanmax(x, initial=0.0) for x in norms)
    largest = min(softcap, float(of_q * of_k) * scale)
    return largest * (2**-11 if "Softcap" in score else 2**-20)


def same_without_lse(dtype: str, options: Mapping[str, Any]) -> bool:
    """Whether a call on a GPU has the same bits when it returns no LSE."""
    return dtype != "bfloat16" or options.get("softcap") is None


def assert_accepted(
    out: Any,
    lse: Any,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    *,
    what: str = "",
    **score: Any,
) -> None:
    """Assert that one result is accurate, as `Expected` does for many of the same inputs."""
    Expected(q, k, v, **score).assert_accepts(out, lse, what)


def assert_call_accepted(
    call: Callable[..., Any],
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    *,
    what: str = "",
    **score: Any,
) -> None:
    """Assert that a call on a GPU is accurate, and has the same bits without the LSE if it should.

    Parameters
    ----------
    call : callable
        Takes `return_lse`.
    """
    expected = Expected(q, k, v, **score)
    out, lse = call(return_lse=True)
    expected.assert_accepts(out, lse, what)
    alone = call(return_lse=False)
    expected.assert_accepts(alone, None, what)
    if same_without_lse(q.dtype.name, score):
        assert to_host(alone).tobytes() == to_host(out).tobytes(), what
