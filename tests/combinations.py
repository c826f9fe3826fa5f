"""Drawn calls on arrays of any module, and what they are held to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from drawn import Drawn
from laid_out import laid_out
from reference import DTYPES, Expected, lse_slack, same_without_lse, to_host
from test_decode import in_pages

import cufa
from cufa.features import VALUES

#: Axes of q, k, v and the result in the order of memory.
ORDERS = {
    4: ((0, 1, 2, 3), (0, 2, 1, 3), (1, 0, 2, 3), (2, 1, 0, 3)),
    3: ((0, 1, 2), (1, 0, 2)),
}
#: Numbers of a result that are few.
FEW = 20_000


class Call:
    """The arguments of a drawn call, on arrays of a module.

    Parameters
    ----------
    drawn : Drawn
    xp : module
        Or what a played GPU has in its place.

    Attributes
    ----------
    arguments : dict
        By name. There may be an `out`, all NaN.
    """

    def __init__(self, drawn: Drawn, xp: Any) -> None:
        self._drawn, self._xp = drawn, xp
        self._rng = rng = np.random.default_rng(drawn.seq_q)
        self.arguments = call = {n: self._lying(x) for n, x in drawn.arrays.items()}
        call |= drawn.options
        own = {n: xp.asarray(x) for n, x in drawn.own_arrays.items()}
        call |= {n: make(own)[n] for n, make in drawn.own.items()}
        if drawn.block is not None:
            b, _, _, sq, sk = drawn.sizes  # no function depends on the head
            call["block_mask"] = cufa.BlockMask.of(
                call["mask_mod"], b, None, sq, sk, block=drawn.block, xp=xp
            )
        if drawn.kernel is not None and xp is not np:
            call["kernel"] = drawn.kernel
        names, arrays = ("q", "k", "v"), [drawn.q, drawn.k, drawn.v]
        if drawn.decodes:
            names = "q", "k_cache", "v_cache"
        if drawn.page_size is not None:
            seed, lengths = int(rng.integers(1 << 30)), drawn.lengths
            for i in (1, 2):
                # The same pages of both.
                pages = np.random.default_rng(seed)
                arrays[i], table = in_pages(pages, arrays[i], lengths, drawn.page_size)
            call["block_table"] = self._anywhere(table)
        self._draw_lengths()
        if drawn.rows is not None and isinstance(call["cu_seqlens_q"], np.ndarray):
            arrays[0] = arrays[0][:, :, : drawn.rows.sum()]  # on the host, offsets cover all rows
        arrays = [self._in_order(x) for x in arrays]
        call |= {name: self._placed(x)[0] for name, x in zip(names, arrays, strict=True)}
        self._assert_nothing_around = lambda: None
        if rng.random() < 0.5:
            shape = *arrays[0].shape[:-1], drawn.v.shape[-1]
            empty = np.full(shape, np.nan, DTYPES[drawn.dtype])
            call["out"], self._assert_nothing_around = self._placed(empty)

    def _draw_lengths(self) -> None:
        """Add the lengths, on the device or on the host."""
        drawn, call = self._drawn, self.arguments
        if drawn.rows is not None and drawn.keys is not None:
            for name, each in (("cu_seqlens_q", drawn.rows), ("cu_seqlens_k", drawn.keys)):
                call[name] = self._anywhere(np.append(0, np.cumsum(each)))
            call |= {"max_seqlen_q": drawn.seq_q, "max_seqlen_k": drawn.seq_kv}
        if drawn.lengths is not None:
            names = {"attention": "lengths_k", "decode": "lengths", "attention_varlen": "seqused_k"}
            lengths = drawn.lengths
            if drawn.keys is not None and isinstance(call["cu_seqlens_k"], np.ndarray):
                lengths = np.minimum(lengths, drawn.keys)  # more are refused on the host
            call[names[drawn.function]] = self._anywhere(lengths)

    def _anywhere(self, integers: np.ndarray) -> Any:
        if self._rng.random() < 0.7:
            return self._xp.asarray(integers.astype(np.int32))
        return integers.astype(np.int64)

    def _lying(self, array: np.ndarray) -> Any:
        """Return an array with its axes in any order, and any steps along the innermost."""
        rng = self._rng
        order = rng.permutation(array.ndim).tolist()
        laid = laid_out(array, order, int(rng.choice((1, 1, 2, -1))), int(rng.integers(3)))
        return laid.there(self._xp.asarray(laid.base))

    def _placed(self, array: np.ndarray) -> tuple[Any, Callable[[], None]]:
        """Return one such as q, and what asserts that nothing was written around it."""
        orders, rng = ORDERS[array.ndim], self._rng
        order = orders[rng.integers(len(orders))]
        gap, step = int(rng.choice((0, 0, 8, 3))), int(rng.choice((1, 1, 1, 1, 2)))
        laid = laid_out(array, order, step, gap)
        base = self._xp.asarray(laid.base)
        return laid.there(base), lambda: laid.assert_gaps_are_untouched(base)

    def _in_order(self, array: np.ndarray) -> np.ndarray:
        """Return an array of (batch, heads, seq, head_dim) with the axes that the call has."""
        if self._drawn.is_varlen:
            return array[0].swapaxes(0, 1)
        return array if self._drawn.options["layout"] == "bhsd" else array.swapaxes(1, 2)

    def __call__(self, return_lse: bool = True) -> tuple[np.ndarray, np.ndarray | None]:
        """Make it; return the result and the log-sum-exp, (batch, heads, seq, ...) of the host."""
        drawn = self._drawn
        found = getattr(cufa, drawn.function)(return_lse=return_lse, **self.arguments)
        out, lse = found if return_lse else (found, None)
        if "out" in self.arguments:
            assert out is self.arguments["out"]
        self._assert_nothing_around()
        out, lse = to_host(out), None if lse is None else to_host(lse)
        if drawn.rows is not None:  # rows behind the last sequence are not written
            n = int(drawn.rows.sum())
            return out[:n].swapaxes(0, 1)[None], None if lse is None else lse[None, :, :n]
        return (out if drawn.options["layout"] == "bhsd" else out.swapaxes(1, 2)), lse


def options_of(drawn: Drawn, i: int, rows: int, keys: int) -> dict[str, Any]:
    """Return what the oracle is told of a sequence."""
    found = {name: x for name, x in drawn.options.items() if name in (*VALUES, "scale")}
    for name, array in drawn.arrays.items():
        if name in ("bias", "mask"):
            array = array.reshape((1,) * (4 - array.ndim) + array.shape)
            array = array[:, :, :rows] if array.shape[2] > 1 else array
            is_bits = array.dtype == np.uint8
            array = array[..., :keys] if array.shape[3] > 1 and not is_bits else array
        if array.ndim > 1 and array.shape[0] > 1:
            array = array[i : i + 1]
        found[name] = array
    own = {name: make(drawn.own_arrays)[name] for name, make in drawn.own.items()}
    if "score_mod" in own:
        found["score_mod"] = lambda score, b, *at: own["score_mod"](score, b + i, *at)
    if "mask_mod" in own:
        found["mask_mod"] = lambda b, *at: own["mask_mod"](b + i, *at)
    if "dropout_p" in drawn.options:
        p, seed = drawn.options["dropout_p"], drawn.options["seed"]
        b, hq, _, sq, sk = drawn.sizes
        keep = cufa.dropout_mask((b, hq, sq, sk), p, seed)[i : i + 1, :, :rows, :keys]
        found["keep"] = keep / (1 - p)
    return found


def assert_accepted(drawn: Drawn, out: np.ndarray, lse: np.ndarray | None) -> None:
    """Assert that a result is right, by the bound of all sequences, and so is the log-sum-exp."""
    rng = np.random.default_rng(2)
    cases, bound = [], 0.0
    for i, ((batch, rows), (batch_k, keys)) in enumerate(drawn.sequences()):
        if rows.start == rows.stop:
            continue
        q, k, v = drawn.q[batch, :, rows], drawn.k[batch_k, :, keys], drawn.v[batch_k, :, keys]
        its = options_of(drawn, i, rows.stop - rows.start, keys.stop - keys.start)
        case = Expected(q, k, v, **its)
        cases.append((batch, rows, case))
        bound = max(bound, case.bound)
        # Few numbers err by chance: here those of the same scores, added up in another order, too.
        for _ in range(0 if out.size > FEW else 4):
            order = rng.permutation(q.shape[3])
            others = q[..., order], k[..., order], rng.standard_normal(v.shape).astype(v.dtype)
            bound = max(bound, Expected(*others, **its).bound)
    if out.size <= FEW:
        bound *= 4 if drawn.dtype == "float32" else 1.5
    slack = lse_slack(drawn.q, drawn.k, **drawn.options)
    for batch, rows, case in cases:
        its_lse = None if lse is None else lse[batch, :, rows]
        case.assert_accepts(out[batch, :, rows], its_lse, str(drawn), bound, slack)


def checked(number: int, longest: int, xp: Any, times: int = 1) -> None:
    """Make a drawn call and assert that it is right, and that each time gives the same bits.

    Parameters
    ----------
    number, longest : int
        As in `Drawn`.
    xp : module
    times : int
    """
    drawn = Drawn(number, longest)
    found = [Call(drawn, xp)() for _ in range(times)]
    assert_accepted(drawn, *found[0])
    for again in found[1:]:
        for array, first in zip(again, found[0], strict=True):
            assert to_host(array).tobytes() == to_host(first).tobytes(), f"other bits: {drawn}"
    if xp is not np and not same_without_lse(drawn.dtype, drawn.options):
        assert_accepted(drawn, *Call(drawn, xp)(return_lse=False))
