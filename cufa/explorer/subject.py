"""The subject of an exploration: attention of a problem on a device, and its arrays there."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from typing import Any

import numpy as np

from cufa.arrays import Operands, as_readable, padded
from cufa.compiler import jit
from cufa.device import Device
from cufa.explorer import ceilings
from cufa.explorer.clock import REST_S, Call, CudaClock
from cufa.explorer.inputs import Inputs, drawn
from cufa.explorer.oracle import Oracle, Verdict
from cufa.explorer.race import Duel, duel
from cufa.explorer.space import Space, variants
from cufa.explorer.work import flops, memory_bound, nbytes
from cufa.launch.loaded import LoadedKernel
from cufa.planner.plan import plan_tiles
from cufa.planner.problem_class import ProblemClass, problem_class
from cufa.planner.rules import times
from cufa.planner.tuned_table import Entry, Table
from cufa.problem.extras import placed
from cufa.problem.problem import Problem
from cufa.specs.variant import Variant
from cufa.tuned import user_table

_LEAST_FLUSH_BYTES = 64 << 20  # its time hides that of the host, too


class Subject:
    """Attention of a problem on a device, as `Run` explores it.

    Parameters
    ----------
    problem : Problem
    device : Device
    inputs : Inputs, optional
        CuPy arrays, used as they are where the kernels take them; random ones by default.
    """

    def __init__(self, problem: Problem, device: Device, inputs: Inputs | None = None) -> None:
        self.problem, self.device, self.inputs = problem, device, inputs

    def refusal(self, variant: Variant) -> str | None:
        """Return why a variant cannot run, or None if it can."""
        try:
            plan_tiles(self.problem, self.device, variant)
        except ValueError as error:
            return str(error).removeprefix(f"kernel: {variant!r}: ")
        return None

    def variants(self, kernels: Iterable[str] | None, space: Space | None) -> list[Variant]:
        """Return the variants to explore, as `cufa.explorer.space.variants`."""
        return variants(self.problem, self.device, kernels, space)

    def expected(self, variants: Collection[Variant]) -> dict[Variant, float]:
        """Return the microseconds that are expected of variants, as far as they are known."""
        found: dict[Variant, float] = {}
        for kernel in {variant.kernel for variant in variants}:
            found |= times(self.problem, self.device, kernel)
        return found

    def planned(self, explored: Collection[Variant]) -> Variant:
        """Return the planner's choice; with a kernel forced if only others are explored."""
        kernels = dict.fromkeys(variant.kernel for variant in explored)
        table = user_table(self.device)
        usual = self.usual(table)
        if usual.kernel in kernels:
            return usual
        for kernel in kernels:
            with suppress(ValueError):  # one that cannot run the problem
                return plan_tiles(self.problem, self.device, kernel, table).variant
        return usual

    def usual(self, table: Table | None = None) -> Variant:
        """Return the planner's choice by a tuned table, or without one."""
        return plan_tiles(self.problem, self.device, table=table).variant

    def key(self) -> ProblemClass:
        """Return the class that a tuned table has the problem in."""
        return problem_class(self.problem, self.device)

    def variant_of(self, entry: Entry) -> Variant:
        """Return the instantiation of an entry of a tuned table; it may be illegal."""
        return entry.variant(self.problem, self.device)

    def stage(self) -> Stage:
        """Return the problem on the current GPU."""
        return Stage(self)

    def work(self) -> tuple[float, int]:
        """Return the operations of a call, and the bytes that it moves at least."""
        return flops(self.problem), nbytes(self.problem)


class Stage:
    """Runs a problem on the current GPU.

    Parameters
    ----------
    subject : Subject
        One that is for the current GPU.

    Attributes
    ----------
    xp : module
        ``cupy``.
    problem : Problem
    errors : tuple of type
        Exceptions of the GPU and its driver.
    operands : Operands
        Q, K and V as the caller gave them, and the result.
    inputs : Inputs
    results, repeated : tuple of array
        The arrays that a call returns, and those that have the same bits in each call.
    """

    def __init__(self, subject: Subject) -> None:
        import cupy

        self.xp: Any = cupy
        self.problem = problem = subject.problem
        cuda = cupy.cuda
        self.errors = cuda.runtime.CUDARuntimeError, cuda.driver.CUDADriverError, MemoryError
        self._device = subject.device
        self.inputs = drawn(problem, cupy) if subject.inputs is None else subject.inputs
        self._flush_bytes = max(_LEAST_FLUSH_BYTES, 4 * subject.device.l2_bytes)
        q, k, v = self.inputs.tensors
        out = padded((*q.shape[:3], problem.head_dim_v), q.dtype, cupy.empty)
        self.operands = Operands(q, k, v, out)
        self.results: tuple[Any, ...] = (out,)
        self.repeated = self.results
        if problem.scale < 0:  # the kernels fold a positive scale into the exponent
            q, problem = -q, problem._replace(scale=-problem.scale)
        self._problem = problem
        q = as_readable(q, tma=True)
        k, v = (as_readable(x, tma=True, repeats=True) for x in (k, v))
        self._taken = q, k, v, self.operands.out

    def judge(self) -> Callable[..., Verdict]:
        """Return what judges results."""
        return Oracle(self.xp, self.problem, self.inputs).judge

    def ready(self, variant: Variant, cubin: bytes) -> Call:
        """Load a variant; the call queues one launch of it, which writes the result.

        ValueError where the variant cannot run the problem, one of `errors` where the GPU cannot
        load it.
        """
        chosen = plan_tiles(self._problem, self._device, variant)
        function = jit.launchable(jit.load(cubin, chosen.smem_bytes), variant, self._device)
        given = self.inputs.extras(self._problem)
        extras = given.described(given.infos)
        loaded = LoadedKernel(variant, function, self.xp.cuda.runtime.getDevice(), extras)
        shapes = tuple(x.shape for x in self._taken)
        strides = tuple(x.strides for x in self._taken)
        q, k, v, out = (x.data.ptr for x in self._taken)
        numbers = placed(self._problem.reads, self.inputs.ndim, self._problem.sizes, extras)
        run = loaded.prepared(chosen, self._problem, shapes, strides, q, numbers, extras)
        if chosen.workspace_floats:
            workspace = self.xp.empty(chosen.workspace_floats, np.float32)
            return lambda: run(q, k, v, out, 0, workspace.data.ptr)  # which keeps the memory
        addresses = given.addresses(variant)
        return lambda: run(q, k, v, out, 0, *addresses)

    def run(self, call: Call) -> None:
        """Make one call over results full of NaN, wait for it, and raise what went wrong."""
        for result in self.results:
            memory = result if result.base is None else result.base  # rows may be padded
            memory.view(np.uint8).fill(0xFF)
        call()
        self.wait()

    def wait(self) -> None:
        """Wait for the GPU, and raise what went wrong there."""
        self.xp.cuda.get_current_stream().synchronize()

    def clock(self, rest_s: float = REST_S) -> CudaClock:
        """Return a clock whose flush is for this GPU's cache, and for what bounds the problem."""
        every_call = memory_bound(self._problem, self.ceilings())
        return CudaClock(rest_s, self._flush_bytes, every_call)

    def ceilings(self) -> dict[str, float]:
        """Return the ceilings of this GPU, measured once in a process."""
        device_id = self.xp.cuda.runtime.getDevice()
        return dict(_ceilings(device_id, self._problem.dtype, self._flush_bytes))


def duel_of(subject: Subject, first: tuple[Variant, bytes], second: tuple[Variant, bytes]) -> Duel:
    """Time two variants, and their cubins, against each other on a warm card."""
    stage = subject.stage()
    calls = stage.ready(*first), stage.ready(*second)
    for call in calls:
        stage.run(call)
    return duel(*calls, stage.clock(rest_s=0))


@functools.cache
def _ceilings(device_id: int, dtype: str, flush_bytes: int) -> dict[str, float]:
    return ceilings.measure(CudaClock(flush_bytes=flush_bytes), dtype)


def free_memory() -> None:
    """Return cached memory, which is of little use to the next problem's other shapes."""
    import cupy

    cupy.get_default_memory_pool().free_all_blocks()
