"""Gradients of a problem, as `Run` explores them: tiles, arrays on the GPU, and what is right."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from cufa.api.attention import attention
from cufa.arrays import Array, Operands
from cufa.device import Device
from cufa.explorer import work
from cufa.explorer.clock import Call
from cufa.explorer.formula import rounding_noise, scores_of, softmax
from cufa.explorer.oracle import CHUNK_BYTES, Verdict, is_finite, product, sampled_heads
from cufa.explorer.score_inputs import ScoreInputs
from cufa.explorer.space import Space, checked_space
from cufa.explorer.stage import Stage
from cufa.explorer.subject import Judge, Subject
from cufa.features.dropout import Dropout, kept
from cufa.features.feature import Places
from cufa.features.parts import ARRAYS
from cufa.features.random_arrays import normal
from cufa.launch import backward
from cufa.planner.backward import BackwardPlan
from cufa.planner.backward_model import explained, flops
from cufa.planner.problem_class import ProblemClass, gradient_class
from cufa.planner.tuned_table import Entry, Table
from cufa.problem.extras import Extras, all_axes
from cufa.problem.parse_backward import TENSORS, Gradients, Results
from cufa.problem.problem import Problem
from cufa.specs import BACKWARD_KERNELS
from cufa.specs.backward_variant import BackwardVariant
from cufa.specs.variant import Variant
from cufa.tuned import user_table

_AXES = ("bm", "bn", "stages", "warps", "blocks_per_sm")
_STEP = 2.0**-16
"""Step of differences in float64."""


def variants(problem: Problem, device: Device, space: Mapping[str, Sequence[int]]) -> list[Variant]:
    """Return the tiles of the kernel's spec, of all head dims, that are legal for a problem.

    Parameters
    ----------
    problem : Problem
    device : Device
    space : mapping of str to sequence of int
        Values of template arguments, which take the place of those of each tile.

    Raises
    ------
    ValueError
        A template argument is unknown, or nothing legal is left.
    """
    unknown = [name for name in space if name not in _AXES]
    if unknown:
        raise ValueError(f"space: {unknown[0]!r} is none of {', '.join(_AXES)}, of gradients")
    first = GradientsOf(problem, device).planned(())
    tables = BACKWARD_KERNELS[first.kernel].tile_tables.values()
    shapes = [shape._asdict() for table in tables for tiles in table.values() for shape in tiles]
    tiles = [first, *(first._replace(**shape) for shape in shapes)]
    values: list[dict[str, Any]] = [
        dict(zip(space, each, strict=True)) for each in itertools.product(*space.values())
    ]
    found = dict.fromkeys(tile._replace(**each) for tile in tiles for each in values)
    legal = [variant for variant in found if variant.illegal(device) is None]
    if not legal:
        raise ValueError(f"space: nothing legal is left on {device.name}")
    return legal


class GradientsOf(Subject):
    """The gradients of q, k and v of a problem on a device."""

    def refusal(self, variant: Variant) -> str | None:
        """Return why a variant cannot run, or None if it can."""
        return variant.illegal(self.device)

    def variants(self, kernels: Iterable[str] | None, space: Space | None) -> list[Variant]:
        """Return the variants to explore: those of `variants`."""
        if kernels is not None:
            raise ValueError("kernels: a dtype has one kernel of gradients: leave them out")
        values = {} if space is None else space
        if not isinstance(values, Mapping):
            raise TypeError("space: with backward it must map template arguments to values")
        return variants(self.problem, self.device, checked_space(values))

    def expected(self, variants: Collection[Variant]) -> dict[Variant, float]:
        """Return the microseconds that are expected of the planner's choice, where known."""
        found, first = self._plan(user_table(self.device)), self.planned(())
        return {first: sum(found.expected_us)} if found.expected_us and first in variants else {}

    def planned(self, kernels: Collection[str]) -> Variant:
        """Return the planner's choice."""
        return BackwardVariant(*self._plan(user_table(self.device)).variant)

    def usual(self) -> Variant:
        """Return the planner's choice without the user's table."""
        return BackwardVariant(*self._plan(None).variant)

    def key(self) -> ProblemClass:
        """Return the class that a tuned table has the gradients in."""
        found = self._plan(None)
        head_dims = found.variant.head_dim, found.variant.head_dim_v
        return gradient_class(found.problem, self.device, head_dims)

    def variant_of(self, entry: Entry) -> Variant:
        """Return the instantiation of an entry of a tuned table; it may be illegal."""
        return self.usual()._replace(kernel=entry.kernel, **entry.shape._asdict())

    def _plan(self, table: Table | None) -> BackwardPlan:
        return explained(self.problem, self.device, TENSORS, deterministic=False, table=table)

    def stage(self, operands: Operands | None, inputs: ScoreInputs | None) -> Stage:
        """Return the problem on the current GPU."""
        return GradientStage(self.problem, operands, self.device, inputs)

    def judge(self, stage: Stage) -> Judge:
        """Return the judge of results of a stage."""
        assert isinstance(stage, GradientStage)
        return GradientOracle(stage.xp, self.problem, stage.arrays, stage.inputs)

    def flops(self) -> float:
        """Return the operations of the five products."""
        return flops(self.problem)

    def nbytes(self) -> int:
        """Return the bytes of Q, K, V, O and their gradients, each moved once."""
        return 2 * work.nbytes(self.problem)


class GradientStage(Stage):
    """Runs the gradients of a problem on the current GPU; see `Stage`.

    Attributes
    ----------
    arrays : tuple of array
        dout, q, k and v.
    """

    def __init__(
        self,
        problem: Problem,
        operands: Operands | None,
        device: Device,
        inputs: ScoreInputs | None,
    ) -> None:
        super().__init__(problem, operands, device, inputs)
        q, k, v, out = self.operands[:4]
        dout = normal(self.xp, out.shape, out.dtype, seed=3)
        self.arrays = dout, q, k, v
        dropout = problem.of(Dropout)
        self._extras = Extras(
            tuple(self.inputs.arrays.get(name) for name in ARRAYS),
            seed=None if dropout is None else self.inputs.seed,
        )
        options = {**problem.asked, **self.inputs.arrays, "scale": problem.scale}
        options["seed"] = self._extras.seed
        given, lse = attention(q, k, v, return_lse=True, **options)
        self._asked = problem
        self._its = Results(dout, given, lse)
        self.results = tuple(self.xp.empty(x.shape, x.dtype) for x in (q, k, v))
        self.repeated = self.results[1:]  # blocks add to dq in any order

    def ready(self, variant: Variant, cubin: bytes) -> Call:
        """Return a call of the gradients by a variant, compiled in this process."""
        problem = self._asked._replace(returns_lse=True)
        tensors = backward.Tensors(*self.arrays[1:])
        into = Gradients(*self.results)
        return lambda: backward.attention_backward(
            problem, tensors, self._its, into, self._extras, deterministic=False, forced=variant
        )

    def run(self, call: Call) -> None:
        """Make one call over gradients full of NaN, wait for it, and raise what went wrong."""
        for each in self.results:
            each.fill(np.nan)
        call()
        self.wait()


class GradientOracle:
    """Judges gradients of one problem, of the first and the last head of K and V.

    Parameters
    ----------
    xp : module
        ``numpy`` or ``cupy``.
    problem : Problem
    arrays : tuple of array
        dout, q, k and v, (batch, heads, seq, head_dim).
    inputs : ScoreInputs
        Arrays next to these; it has no functions.
    """

    def __init__(
        self, xp: Any, problem: Problem, arrays: tuple[Array, ...], inputs: ScoreInputs
    ) -> None:
        self._xp, self._problem, self._inputs = xp, problem, inputs
        self._heads = sampled_heads(problem.batch, problem.heads_kv, 2)
        dtype = arrays[1].dtype

        def rounded(x: Any) -> Any:
            return x.astype(dtype).astype(np.float32)

        self._right: list[tuple[Array, ...]] = []
        bounds = []
        for b, h in self._heads:
            part = self._of_heads(arrays, b, h)
            exact = self._differentiated(b, h, [x.astype(np.float64) for x in part], lambda x: x)
            naive = self._differentiated(b, h, part, rounded)
            self._right.append(exact)
            bounds.append([self._bound(*pair, rounded) for pair in zip(exact, naive, strict=True)])
        self._bounds = [max(each) for each in zip(*bounds, strict=True)]

    def judge(self, *results: Any) -> Verdict:
        """Compare dq, dk and dv, which are contiguous."""
        xp, errors = self._xp, [0.0, 0.0, 0.0]
        for (b, h), exact in zip(self._heads, self._right, strict=True):
            part = self._of_heads((results[0], *results), b, h)[1:]
            for i, (found, right) in enumerate(zip(part, exact, strict=True)):
                errors[i] = max(errors[i], float(xp.abs(found - right).max()))
        for name, array, error, bound in zip(TENSORS, results, errors, self._bounds, strict=True):
            if not is_finite(xp, array):
                return Verdict(max(errors), f"d{name} holds values that are not finite")
            if not error <= bound:
                return Verdict(max(errors), f"d{name}: error {error:.2g} exceeds {bound:.2g}")
        return Verdict(max(errors), None)

    def _of_heads(self, arrays: tuple[Array, ...], b: int, h: int) -> list[Array]:
        """Return float32 of dout and q for the query heads of a K/V head, and of its k and v."""
        group = self._problem.group
        queries = slice(h * group, (h + 1) * group)
        places = (queries, queries, slice(h, h + 1), slice(h, h + 1))
        pairs = zip(arrays, places, strict=True)
        return [array[b, part].astype(np.float32) for array, part in pairs]

    def _bound(self, exact: Array, naive: Array, rounded: Any) -> float:
        error = float(self._xp.abs(naive - exact).max())
        return 2 * error + 2 * rounding_noise(rounded(exact.astype(np.float32)), rounded)

    def _differentiated(
        self, b: int, h: int, arrays: list[Array], rounded: Any
    ) -> tuple[Array, Array, Array]:
        """Return dq, dk and dv of a K/V head, in the precision of the arrays."""
        xp, p = self._xp, self._problem
        dout, q, k, v = arrays
        k, v = k[0], v[0]
        # A naive float32 product adds term by term.
        step = 1 if p.dtype == "float32" and q.dtype == np.float32 else 128

        def times(x: Array, y: Array) -> Array:
            return product(xp, x[None], y[None], step)[0]

        dq, dk, dv = xp.zeros_like(q), xp.zeros_like(k), xp.zeros_like(v)
        for each, rows in self._parts():
            head = h * p.group + each
            scores = partial(self._scores, b, head, rows)
            some, of_result = q[each, rows], dout[each, rows]
            products = rounded(times(some, k.T))
            keep = self._keep(b, head, rows)
            _, lse = softmax(xp, scores(products), self._sink(b, head, products.dtype))
            lse = xp.where(lse == -np.inf, 0, lse).astype(products.dtype)
            weights = xp.exp(scores(products) - lse[:, None])  # as the backward pass has them
            kept_ones = rounded(weights * keep)
            d_p = rounded(times(of_result, v.T)) * keep
            delta = (of_result * rounded(times(kept_ones, v))).sum(axis=-1, keepdims=True)
            d_s = weights * (d_p - delta)
            wide = products.astype(np.float64)
            with np.errstate(invalid="ignore"):
                slope = (scores(wide + _STEP) - scores(wide - _STEP)) / (2 * _STEP)
            slope = xp.where(xp.isfinite(slope), slope, 0).astype(products.dtype)
            d_x = rounded(d_s * slope)
            dq[each, rows] = times(d_x, k)
            dk += times(d_x.T, some)
            dv += times(kept_ones.T, of_result)
        return rounded(dq), rounded(dk[None]), rounded(dv[None])

    def _parts(self) -> Iterator[tuple[int, slice]]:
        """Yield query heads of the group, and some of their rows."""
        p = self._problem
        step = max(1, CHUNK_BYTES // (8 * p.seq_kv))
        return itertools.product(
            range(p.group), (slice(i, min(p.seq_q, i + step)) for i in range(0, p.seq_q, step))
        )

    def _scores(self, b: int, h: int, rows: slice, products: Array) -> Array:
        xp, p = self._xp, self._problem
        score = p.asked
        for name, array in self._inputs.arrays.items():
            if name == "sinks":
                continue
            x = all_axes(name, array, self._inputs.ndim, p.sizes, xp)
            kind = x.dtype if x.dtype in (np.bool_, np.uint8) else products.dtype
            score[name] = self._of_head(x, b, h) if x.ndim < 3 else x[b, h, rows].astype(kind)
        at = Places(
            b,
            h,
            xp.arange(rows.start, rows.stop)[:, None],
            xp.arange(p.seq_kv),
            *(p.seq_q, p.seq_kv),
        )
        return scores_of(xp, products.copy(), at, scale=p.scale, **score)

    def _of_head(self, array: Array, b: int, h: int) -> Array:
        return array[h] if array.ndim == 1 else array[b, h]

    def _sink(self, b: int, h: int, dtype: Any) -> Array | None:
        sinks = self._inputs.arrays.get("sinks")
        return None if sinks is None else self._of_head(sinks, b, h).astype(dtype)

    def _keep(self, b: int, h: int, rows: slice) -> Any:
        """Return the factors of the weights under dropout; 1 without."""
        xp, dropout = self._xp, self._problem.of(Dropout)
        if dropout is None:
            return 1
        at = xp.asarray([b]), xp.asarray([h]), xp.arange(rows.start, rows.stop)
        keys = slice(0, self._problem.seq_kv)
        return kept(dropout.p, self._inputs.seed, *at, keys, xp)[0, 0] / dropout.keep
