"""The arguments of a call by name, as the public functions share them on the way to a `Problem`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from cufa.api.block_mask import mask_mod_of
from cufa.api.fp8 import Fp8, as_8_bits
from cufa.arrays import Array, Ints, Operands, as_bhsd, module_of_all
from cufa.checks import check_flag, check_integer
from cufa.cpu.functions import Functions, checked, differentiable
from cufa.features.dropout import check_dropout_seed
from cufa.features.expression.tracing import NOTHING, TracedFunctions, trace
from cufa.features.parts import ARRAYS
from cufa.features.user_functions import OWN
from cufa.launch.calls import on_device
from cufa.problem.extras import Extras
from cufa.problem.parse import axes_of, layout_of, parse, restore_shape, scales_of, tensors_of
from cufa.problem.problem import Problem


class Call(NamedTuple):
    """A call of `attention`, `attention_varlen` or `decode`, or of gradients, that is legal.

    Attributes
    ----------
    problem : Problem
    operands : Operands
        With the seed of a dropout.
    arguments : mapping
        The arguments, by name; for q, k and v in 8 bits, arrays of their shapes.
    xp : module
        The module that the arrays belong to.
    mods : TracedFunctions
        The caller's functions, on a GPU.
    fp8 : Fp8 or None
        q, k and v in 8 bits.
    """

    problem: Problem
    operands: Operands
    arguments: Mapping[str, Any]
    xp: ModuleType
    mods: TracedFunctions
    fp8: Fp8 | None

    @property
    def ndim(self) -> int:
        """Axes of q, as parts of the score count them."""
        return axes_of(self.arguments)

    @property
    def shapes(self) -> tuple[Ints, Ints]:
        """The shapes of the result and of its log-sum-exp."""
        return restore_shape(self.problem, self.ndim, layout_of(self.arguments))

    def view(self, array: Array) -> Array:
        """Return a (batch, heads, seq, head_dim) view of an array of the caller's."""
        return as_bhsd(array, layout_of(self.arguments))

    def extras(self) -> Extras:
        """Return the arrays besides q, k and v, with lengths on the device."""
        return Extras(
            tuple(self.arguments.get(name) for name in ARRAYS),
            tuple(on_device(name, array) for name, array in self.operands.lengths.items()),
            self.mods.arrays,
            self.operands.seed if "Dropout" in self.problem.score else None,
        )


def call_of(
    arguments: Mapping[str, Any],
    mods: TracedFunctions | None = None,
    wrt: tuple[str, ...] = (),
) -> Call:
    """Check the arguments of a call, by name.

    Parameters
    ----------
    arguments : mapping
    mods : TracedFunctions, optional
        The caller's functions, if they have been traced.
    wrt : tuple of str
        Names of arrays by which they are differentiated if they are traced here.
    """
    check_flag("return_lse", arguments["return_lse"])
    check_flag("batch_invariant", arguments.get("batch_invariant", False))
    if arguments.get("num_splits") is not None:
        arguments = {**arguments, "num_splits": _checked_splits(arguments["num_splits"])}
    if arguments.get("block_mask") is not None:
        mask_mod = mask_mod_of(arguments["block_mask"], arguments.get("mask_mod"))
        arguments = {**arguments, "mask_mod": mask_mod}
    fp8 = None
    if "k_cache" not in arguments:
        fp8, arguments = as_8_bits(arguments, layout_of(arguments))
    xp = module_of_all({**tensors_of(arguments), **scales_of(arguments)})
    if mods is None:
        own: dict[str, Any] = {name: arguments.get(name) for name in OWN}
        mods = NOTHING if xp is np else trace(**own, wrt=wrt)
    problem, operands = parse(arguments, xp, mods)
    seed = check_dropout_seed(arguments.get("seed"), arguments.get("dropout_p", 0.0))
    if seed:
        operands = operands._replace(seed=seed)
    return Call(problem, operands, arguments, xp, mods, fp8)


def _checked_splits(num_splits: object) -> int:
    parts = check_integer("num_splits", num_splits, "an integer or None")
    if parts < 1:
        raise ValueError(
            f"num_splits must be at least 1, or None to choose (flash-attn's 0), not {parts}"
        )
    return parts


def functions_on_cpu(arguments: Mapping[str, Any], read: Iterable[str] | None = None) -> Functions:
    """Return the functions of a call that runs on the CPU; refuse what is for the GPU.

    For gradients, `read` names the arrays in functions by which the call is differentiated.
    """
    kernel, block_mask = arguments["kernel"], arguments.get("block_mask")
    if kernel is not None:
        raise ValueError(
            f"kernel must be None for NumPy arrays, which run on the CPU, not {kernel!r}"
        )
    tiles = None if block_mask is None else (block_mask.kinds, block_mask.block)
    mods = {name: arguments.get(name) for name in OWN}
    if read is not None:
        return differentiable(**mods, wrt=read, tiles=tiles)
    return Functions(**{name: checked(name, mods[name]) for name in mods}, tiles=tiles)
