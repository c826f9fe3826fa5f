"""Gradients of drawn calls on arrays of any module, and what they are held to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from combinations import Call, options_of
from drawn import Drawn
from reference import DTYPES, to_host
from reference_backward import FEW, ExpectedGradients

import cufa


class BackwardCall(Call):
    """The arguments of both passes of a drawn call.

    Parameters
    ----------
    drawn : Drawn
    xp : module
        Or what a played GPU has in its place.

    Attributes
    ----------
    dout : ndarray
        (batch, heads_q, seq_q, head_dim_v).
    wrt : tuple of str
    """

    def __init__(self, drawn: Drawn, xp: Any) -> None:
        super().__init__(drawn, xp)
        rng, call = self._rng, self.arguments
        call.pop("batch_invariant", None)
        shape = *drawn.q.shape[:3], drawn.v.shape[3]
        self.dout = rng.standard_normal(shape, np.float32).astype(DTYPES[drawn.dtype])
        rows = call["q"].shape[0] if drawn.is_varlen else drawn.q.shape[2]
        self._dout = self._placed(self._in_order(self.dout[:, :, :rows]))[0]
        names = ("q", "k", "v", *(name for name in ("bias", "sinks") if name in drawn.arrays))
        self.wrt = tuple(
            rng.permutation([x for x in names if rng.random() < 0.8] or names).tolist()
        )

    def gradients(self) -> dict[str, np.ndarray]:
        """Make both calls; return the gradients on the host, by name, in the caller's axes."""
        drawn, call = self._drawn, self.arguments
        its = getattr(cufa, drawn.function)
        out, lse = its(return_lse=True, **call)
        rest = {name: x for name, x in call.items() if name not in ("out", "kernel")}
        places, around = {}, []
        for name in self.wrt:
            if name in "qkv" and self._rng.random() < 0.5:
                empty = np.full(call[name].shape, np.nan, DTYPES[drawn.dtype])
                places[f"d{name}"], untouched = self._placed(empty)
                around.append(untouched)
        backward = getattr(cufa, f"{drawn.function}_backward")
        results = {"dout": self._dout, "out": out, "lse": lse}
        found = backward(**results, **rest, wrt=self.wrt, **places)
        for name, gradient in zip(self.wrt, found, strict=True):
            assert gradient is places.get(f"d{name}", gradient)
        for untouched in around:
            untouched()
        return {name: to_host(x) for name, x in zip(self.wrt, found, strict=True)}

    def by_head(self, x: np.ndarray) -> np.ndarray:
        """Return a gradient of q, k or v as (batch, heads, seq, head_dim)."""
        if self._drawn.is_varlen:
            return x.swapaxes(0, 1)[None]
        return x if self._drawn.options["layout"] == "bhsd" else x.swapaxes(1, 2)


def assert_accepted(call: BackwardCall, drawn: Drawn, found: Mapping[str, np.ndarray]) -> None:
    """Assert that gradients are right, by the bounds of all sequences together."""
    tensors = {name: call.by_head(found[name]) for name in "qkv" if name in found}
    exact = {name: np.zeros(x.shape) for name, x in found.items() if name not in "qkv"}
    allowed = {name: np.zeros(()) for name in exact}
    cases, bounds = [], dict.fromkeys(tensors, 0.0)
    written = {name: np.zeros(x.shape[::2], bool) for name, x in tensors.items()}
    for i, ((batch, rows), (batch_k, keys)) in enumerate(drawn.sequences()):
        if rows.start == rows.stop or keys.start == keys.stop:
            continue
        n_q, n_k = rows.stop - rows.start, keys.stop - keys.start
        arrays = [x[batch, :, rows] for x in (call.dout, drawn.q)]
        arrays += [x[batch_k, :, keys] for x in (drawn.k, drawn.v)]
        case = ExpectedGradients(*arrays, **options_of(drawn, i, n_q, n_k))
        places = {"q": (batch, rows), "k": (batch_k, keys), "v": (batch_k, keys)}
        cases.append((places, case))
        for name in tensors:
            bounds[name] = max(bounds[name], float(case.bounds(name).max()))
            written[name][places[name]] = True
        for name in exact:
            _add(exact[name], case.exact[name], name, i, n_q, n_k)
            allowed[name] = allowed[name] + case.bounds(name).max()
    for name, gradient in tensors.items():
        if drawn.dtype == "float32" and min(gradient.size, call.dout.size) <= FEW:
            bounds[name] *= 2  # of one row, one log-sum-exp is rounded
    for places, case in cases:
        for name, gradient in tensors.items():
            its = gradient[places[name][0], :, places[name][1]]
            heads = its.shape[1]
            case.assert_accepts({name: its}, str(drawn), {name: np.full(heads, bounds[name])})
    for name, gradient in tensors.items():
        rest = np.broadcast_to(~written[name][:, None], gradient.shape[:3])
        assert not gradient[rest].any(), f"{drawn}: d{name} where there is nothing"
    for name, sum_of_all in exact.items():
        error = np.abs(found[name].astype(np.float64) - sum_of_all).max(initial=0)
        assert error <= allowed[name] or not cases, f"{drawn}: d{name} is wrong by {error:.3g}"


def _add(whole: np.ndarray, part: np.ndarray, name: str, i: int, rows: int, keys: int) -> None:
    """Add a sequence's gradient of a bias or of sinks to that of all."""
    if name == "bias":
        whole = whole.reshape((1,) * (4 - whole.ndim) + whole.shape)
        whole = whole[i : i + 1] if whole.shape[0] > 1 else whole
        whole = whole[:, :, :rows] if whole.shape[2] > 1 else whole
        whole = whole[..., :keys] if whole.shape[3] > 1 else whole
    whole += part.reshape(whole.shape)


def checked(number: int, longest: int, xp: Any) -> None:
    """Make both passes of a drawn call, unless it decodes, and assert that gradients are right.

    Parameters
    ----------
    number, longest : int
        As in `Drawn`.
    xp : module
    """
    drawn = Drawn(number, longest)
    if drawn.decodes:
        return
    call = BackwardCall(drawn, xp)
    assert_accepted(call, drawn, call.gradients())
