"""The kernels of scripts/models compiled for the host, as `emulated` does those of cufa."""

from __future__ import annotations

import ctypes
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from emulated import FOLDERS, load_shared, needs_compiler
from models import cuda
from models.flat import CPP, MOST_ROWS, tile_of
from shared_libraries import Sources

#: Stand-ins for PTX that ``tests/emulator`` does not have.
HEADERS = {
    "ptx_convert.cuh": """
#pragma once
#include "ptx.cuh"
inline float to_float(float16 x) { return wide(x); }
inline float to_float(bfloat16 x) { return wide(x); }
inline float to_float(float x) { return x; }
""",
    "streams.cuh": """
#pragma once
#include "ptx.cuh"
inline uint4 load_once(const void* p) { return *static_cast<const uint4*>(p); }
inline void let_next_begin() {}
inline void wait_for_previous() {}
""",
}
SOURCE = """
#include <tuple>
#include "{file}.cu"
SHARED_MEMORY(SHARED_PAGES)
template <class... A>
bool run(void (*kernel)(A...), void** p, int grid, int threads, unsigned smem_bytes) {{
    int i = 0;
    const auto all = std::make_pair(kernel, std::tuple<A...>{{*static_cast<A*>(p[i++])...}});
    const emulator::Launch launch{{emulator_pages, emulator_smem, grid, threads, smem_bytes}};
    return emulator::run(launch, [](const void* given) {{
        const auto& [function, arguments] = *static_cast<decltype(&all)>(given);
        std::apply(function, arguments);
    }}, &all);
}}
"""
RUN = """
extern "C" bool run_{i}(void** p, int grid, int threads, unsigned smem_bytes) {{
    return run({expression}, p, grid, threads, smem_bytes);
}}
"""
GATES = "SILU", "GELU", "CLAMPED"
_TILES = (
    ("float", {tile_of(1, 4)}),
    ("float16", {tile_of(1, 2)}),
    ("bfloat16", sorted({tile_of(rows, 2) for rows in range(1, MOST_ROWS + 1)})),
)
#: The instantiations that tests use, by file: compiled together.
EXPRESSIONS = {
    "flat_product": [
        f"flat_product<{', '.join(map(str, (x, y, groups, finish, *sizes)))}>"
        for x, tiling in _TILES
        for groups, *sizes in tiling
        for y, finish in sorted(
            {
                *((x, "STORE"), ("float", "STORE"), ("float", "ADD")),
                *((x, f"GATE_{gate}") for gate in GATES),
            }
        )
    ],
    "experts": [
        *("route<1024>", "add_shares<256>"),
        *(
            f"expert_product<{', '.join(map(str, (x, y, groups, finish, *sizes)))}>"
            for x, tiling in _TILES
            for groups, *sizes in tiling
            for y, finish in sorted({("float", "STORE"), (x, "GATE_SILU"), (x, "GATE_CLAMPED")})
        ),
    ],
    "rows": [
        *(f"rms_norm<float, {y}, {threads}>" for y in CPP.values() for threads in (128, 512)),
        *(f"rms_norm<{x}, {x}, 128>" for x in ("float16", "bfloat16")),
        *(
            f"gated<{sizes}, 256, {gate}>"
            for sizes in ("float16, 1", "bfloat16, 8", "float, 4")
            for gate in GATES
        ),
        *("largest<1024>", "top<1024>"),
    ],
}


class ScriptKernels:
    """Stands for `models.cuda`; arrays are of NumPy."""

    def __init__(self) -> None:
        self._sources = Sources(*FOLDERS, cuda.FOLDER, own=HEADERS)
        self._libraries: dict[str, Any] = {}

    def kernel(self, file: str, expression: str) -> Any:
        """Stand for `cuda.kernel`."""
        if file not in self._libraries:
            self._libraries[file] = self._compiled(file)
        run = self._libraries[file][f"run_{EXPRESSIONS[file].index(expression)}"]
        run.restype = ctypes.c_bool
        return run

    def _compiled(self, file: str) -> Any:
        runs = (RUN.format(i=i, expression=each) for i, each in enumerate(EXPRESSIONS[file]))
        top = SOURCE.format(file=file) + "".join(runs)
        load_shared()
        return ctypes.CDLL(str(self._sources.library(top)))

    empty = staticmethod(np.empty)

    @staticmethod
    def launch(run: Any, blocks: int, threads: int, smem_bytes: int, *arguments: Any) -> None:
        """Stand for `cuda.launch`."""
        values = [
            ctypes.c_void_p(x.ctypes.data) if isinstance(x, np.ndarray) else cuda._value(x)
            for x in arguments
        ]
        pointers = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
        assert run(pointers, blocks, threads, smem_bytes), "threads wait for each other"


@pytest.fixture(scope="session")
def script_kernels() -> ScriptKernels:
    """Return compiled kernels."""
    return ScriptKernels()


@pytest.fixture(
    params=[
        pytest.param("numpy", marks=needs_compiler),
        pytest.param("cupy", marks=pytest.mark.gpu),
    ]
)
def on(
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> ModuleType:
    """Return the module of arrays: with NumPy's, the kernels run on the host."""
    xp = pytest.importorskip(request.param)
    if xp is np:
        emulator: ScriptKernels = request.getfixturevalue("script_kernels")
        for name in ("kernel", "launch", "empty"):
            monkeypatch.setattr(cuda, name, getattr(emulator, name))
    return xp
