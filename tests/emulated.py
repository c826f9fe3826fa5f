"""The kernels' own source on the host: what a launch of the played GPU runs.

A compiler of C++ takes the place of NVRTC, and ``tests/emulator`` that of the GPU's instructions.
"""

from __future__ import annotations

import _ctypes
import ctypes
import functools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import played_gpu
import pytest
from guarded import new_memory
from kernel_in_front import kernel_in_front
from shared_libraries import COMPILER, Sources

import cufa
from cufa.compiler import source
from cufa.specs import BACKWARD_KERNELS, KERNELS
from cufa.specs.instance import Instance
from cufa.specs.variant import BackwardVariant, Fp8Variant, Variant

FOLDERS = Path(cufa.__file__).parent / "kernels", Path(__file__).parent / "emulator"
#: This processor would read or write four bytes anywhere, which a GPU refuses.
CHECKED = "-fsanitize=alignment", "-fsanitize-undefined-trap-on-error"

needs_compiler = pytest.mark.skipif(
    COMPILER is None or not sys.platform.startswith("linux"),
    reason="needs a C++ compiler on Linux",
)

SOURCE = """
#include "ptx_sm90.cuh"
SHARED_MEMORY({smem_bytes})
#include "{kernel}.cu"
{own}
extern "C" int argument_bytes;
int argument_bytes = sizeof({arguments});
static void kernel(const void* arguments) {{
    {variant}(*static_cast<const {arguments}*>(arguments));
}}
extern "C" bool run(const void* arguments, int grid, int threads, unsigned smem_bytes,
                    bool last_first, unsigned seed, emulator::Front front) {{
    return emulator::run({{emulator_pages, emulator_smem, grid, threads, smem_bytes, last_first,
                          seed, front}}, kernel, arguments);
}}
"""
#: The same in all libraries, which are linked to no others: they find what is loaded before.
SHARED = """
#include "scheduler.cpp"
#include "ptx.cpp"
#include "products.cpp"
"""
#: Arguments of kernels other than attention's.
ARGUMENTS = {
    "block_mask": "BlockMaskArguments<{}>",
    "block_lists": "BlockListsParams",
    "clear_rows": "ClearRowsParams",
    "bwd_sums": "BackwardSumsParams",
    "quantize": "QuantizeParams",
    "append8": "AppendParams",
    "expand8": "ExpandParams",
    "means8": "AppendParams",
    "lse_mean": "LseMeanParams",
}

#: Each takes eight of the 65,530 mappings that a process has room for.
MOST_LOADED = 500

#: Seeds from it on let lanes of a warp take turns.
LANES = 1 << 16

_FRONT = ctypes.CFUNCTYPE(ctypes.c_bool)


@functools.cache
def load_shared() -> None:
    """Load what all libraries of kernels find, and the library of mathematics with it."""
    options = "-O3", "-fno-strict-aliasing", "-Wl,--no-as-needed"
    library = Sources(*FOLDERS).library(SHARED, *options)
    ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)


class Emulator:
    """Compiles kernels for the host, and runs them.

    Attributes
    ----------
    last_first : bool
        Whether the last block runs first.
    stale : int
        How lengths and tables are before `wait_for_kernel_in_front`: as after it, else other ones.
    seed : int
        If not 0, blocks and warps take turns at random, and so does what `kernel_in_front` writes
        while those of a dependent launch have begun. From `LANES` on, lanes of a warp do, too.
    variants : set
        All that it has been asked for.
    """

    _paths: ClassVar[dict[Any, Path]] = {}  # of libraries, by variant
    _libraries: ClassVar[dict[Any, Any]] = {}  # those that are loaded, the newest last

    def __init__(self) -> None:
        self.last_first, self.stale, self.seed = False, 0, 0
        self.variants: set[Any] = set()
        # ptx.cuh and ptx_sm90.cuh are the emulator's
        self._sources = Sources(*FOLDERS, precompiled="ptx_sm90.cuh")

    def library(self, variant: Variant | Instance) -> Any:
        """Return a variant's library, which stays loaded until the next call."""
        self.variants.add(variant)
        found = self._libraries.pop(variant, None)
        if found is None:
            if variant not in self._paths:
                self._paths[variant] = self._compiled(variant)
            load_shared()
            found = ctypes.CDLL(str(self._paths[variant]))
            found.run.restype = ctypes.c_bool
        self._libraries[variant] = found
        if len(self._libraries) > MOST_LOADED:
            _ctypes.dlclose(self._libraries.pop(next(iter(self._libraries)))._handle)
        return found

    def _compiled(self, variant: Variant | Instance) -> Path:
        return self._sources.library(self._text(variant), *CHECKED, "-nostdlib")

    def _text(self, variant: Variant | Instance) -> str:
        return SOURCE.format(
            kernel=variant.kernel,
            own=source.user_parts(variant),
            smem_bytes=variant.smem_bytes,
            arguments=_arguments(variant),
            variant=variant,
        )

    def kernel(self, variant: Variant | Instance, _gpu: object, _device_id: int) -> Any:
        """Stand for `jit.kernel`."""

        def launch(grid: Any, block: Any, args: Any, smem_bytes: int) -> None:
            (pointer,) = args
            library = self.library(variant)
            assert smem_bytes >= variant.smem_bytes  # behind which it may use none
            ctypes.c_int.in_dll(library, "emulator_stale").value = self.stale
            front = _FRONT()  # none
            steps: Iterator[bool] = iter(())
            if self.seed and variant.is_dependent:
                nbytes = ctypes.c_int.in_dll(library, "argument_bytes").value
                rng = np.random.default_rng(self.seed)
                steps = kernel_in_front(variant, pointer.ptr, nbytes, rng)
                next(steps)
                front = _FRONT(lambda: next(steps, False))
            ended = library.run(
                ctypes.c_void_p(pointer.ptr),
                *(grid[0], block[0], variant.smem_bytes, self.last_first, self.seed, front),
            )
            for _ in steps:  # if it was not waited for
                pass
            assert ended, f"{variant}: threads wait for each other"

        return launch


def _arguments(variant: Variant | Instance) -> str:
    """Return the type of a kernel's one parameter."""
    if isinstance(variant, Fp8Variant):
        return f"TmaArguments<Arguments<Score<{', '.join(variant.score)}>, {variant.cpp_kv}>>"
    if isinstance(variant, BackwardVariant) or (isinstance(variant, Instance) and variant.kv):
        kernel = BACKWARD_KERNELS.get(variant.kernel)
        tma = "Tma" if kernel and kernel.tma else ""
        return f"{tma}BackwardArguments<Score<{', '.join(variant.score)}>, {variant.kv}>"
    if isinstance(variant, Instance):
        return ARGUMENTS[variant.kernel].format(", ".join(variant.score))
    decodes = "Decode" if KERNELS[variant.kernel].decodes else ""
    decodes = "Scaled" if KERNELS[variant.kernel].kv_dtype else decodes
    arguments = f"{decodes}Arguments<Score<{', '.join(variant.score)}>, {variant.kv}>"
    return f"TmaArguments<{arguments}>" if KERNELS[variant.kernel].tma else arguments


def emulate(monkeypatch: pytest.MonkeyPatch, emulator: Emulator) -> None:
    """Let the played GPU run the kernels' source, on arrays beyond which nothing can be read."""
    monkeypatch.setattr(played_gpu.jit, "kernel", emulator.kernel)
    monkeypatch.setattr(played_gpu, "new_memory", new_memory)
