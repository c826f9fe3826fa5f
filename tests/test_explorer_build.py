"""explorer/build.py: compiled in threads, with the figures that ptxas prints."""

from __future__ import annotations

import re
import struct
import threading
import time
from typing import Any

import pytest

from cufa import device
from cufa.compiler import nvrtc
from cufa.explorer import build
from cufa.explorer.build import Built, compile_all, static_row
from cufa.explorer.subject import Subject
from cufa.problem.problem import Problem
from cufa.specs.variant import Variant

H200 = device.named("h200")
SMALL = Variant("fa2_mma", "bfloat16", 64, 64, 64, 32, 1, 4, 4, score=("Causal",))
WIDE = Variant("fa2_mma", "bfloat16", 64, 64, 64, 64, 2, 4, 2, score=("Causal",))
#: 128 x 128 / 128 accumulators of O and as many of S, in 128 registers.
SPILLING = Variant("fa2_mma", "bfloat16", 128, 128, 128, 64, 1, 4, 4, score=("Causal",))
#: Q, the rings of K and V, and four numbers for each 16 rows.
SMEM_BYTES = {
    SMALL: 2 * (64 * 64 + 1 * 32 * 128) + 4 * 16,
    WIDE: 2 * (64 * 64 + 2 * 64 * 128) + 4 * 16,
    SPILLING: 2 * (128 * 128 + 1 * 64 * 256) + 8 * 16,
}
BROKEN = Variant("fa1_fp32", "float32", 32, 32, 64, 64, 2, 8, 1)


@pytest.fixture(scope="module")
def built() -> dict[Variant, Built]:
    return {b.variant: b for b in compile_all(SMEM_BYTES, "sm_90a")}


def compiled(built: Built) -> nvrtc.Compiled:
    assert isinstance(built.compiled, nvrtc.Compiled)
    return built.compiled


def code_bytes(cubin: bytes) -> int:
    """Size of the instructions, as the ELF file has it."""
    (sections,) = struct.unpack_from("<Q", cubin, 40)
    size, count, names = struct.unpack_from("<HHH", cubin, 58)
    headers = [struct.unpack_from("<IIQQQQ", cubin, sections + i * size) for i in range(count)]
    strings = headers[names][4]
    (length,) = (h[5] for h in headers if cubin[strings + h[0] :].startswith(b".text."))
    return int(length)


@pytest.mark.parametrize("variant", SMEM_BYTES, ids=str)
def test_figures_are_those_of_ptxas(built: dict[Variant, Built], variant: Variant) -> None:
    row = static_row(built[variant], H200)
    result = compiled(built[variant])
    (line,) = (line for line in result.log.splitlines() if "spill stores" in line)
    stores, loads = (int(part.split()[0]) for part in line.split(", ")[1:])
    (used,) = (line for line in result.log.splitlines() if " registers," in line)
    assert row.error is None
    assert row.notes == ()
    assert row.registers == int(used.split(" registers,")[0].split()[-1])
    assert row.spill_bytes == stores + loads
    assert (row.static_smem_bytes, row.dynamic_smem_bytes) == (0, SMEM_BYTES[variant])
    assert row.code_bytes == code_bytes(result.cubin)
    assert row.compile_s is not None
    assert row.compile_s > 0


def test_which_spills(built: dict[Variant, Built]) -> None:
    spills = {v: static_row(b, H200).spill_bytes or 0 for v, b in built.items()}
    assert spills[SMALL] == spills[WIDE] == 0
    assert spills[SPILLING] > 100


def test_occupancy(built: dict[Variant, Built]) -> None:
    """The bound of registers is kept: at least as many blocks fit as were asked for."""
    for variant, one in built.items():
        row = static_row(one, H200)
        assert row.blocks_per_sm is not None
        assert row.occupancy is not None
        smem_lets = H200.smem_per_sm // (variant.smem_bytes + 1024)
        assert min(variant.blocks_per_sm, smem_lets) <= row.blocks_per_sm <= smem_lets
        assert row.occupancy == row.blocks_per_sm * 128 / 2048


def test_kernel_that_fits_no_multiprocessor(built: dict[Variant, Built]) -> None:
    tiny = H200._replace(smem_per_block=10_000)
    row = static_row(built[SMALL], tiny)
    assert row.blocks_per_sm == 0
    assert row.error is not None
    assert "not even one block" in row.error


def test_compile_error_is_a_row_with_the_compilers_line() -> None:
    (failed,) = compile_all([BROKEN], "sm_90a")
    row = static_row(failed, H200)
    assert row.error is not None
    assert "tiles are not prefetched" in row.error
    assert "\n" not in row.error
    assert row.registers is None


def fake(log: str) -> nvrtc.Compiled:
    return nvrtc.Compiled(b"", 100, 0, 0, 0, SMALL.smem_bytes, 4096, log)


def test_remarks_on_wgmma_are_notes() -> None:
    remark = (
        "ptxas info    : (C7512) Potential Performance Loss: wgmma.mma_async instructions are "
        "serialized due to non wgmma instructions defining accumulator registers of a wgmma "
        "between start and end of the pipeline stage in the function '_Z9fa3_wgmmaI6ParamsEv'\n"
    )
    row = static_row(Built(SMALL, fake(f"ptxas info : 0 bytes gmem\n{remark}{remark}"), 0.1), H200)
    (note,) = row.notes
    assert note.startswith("C7512 Potential Performance Loss: wgmma.mma_async instructions are ")
    assert note.endswith("pipeline stage")


def test_compiles_in_as_many_threads_as_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    together = threading.Barrier(3, timeout=10)

    def meet(variant: Variant, arch: str) -> nvrtc.Compiled:
        together.wait()
        return fake("")

    monkeypatch.setattr(nvrtc, "compile_variant", meet)
    variants = [SMALL._replace(bn=bn) for bn in (16, 32, 48)]
    assert {b.variant for b in compile_all(variants, "sm_90a", jobs=3)} == set(variants)


def test_closing_drops_what_has_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    begun = []

    def slow(variant: Variant, arch: str) -> nvrtc.Compiled:
        begun.append(variant)
        time.sleep(0.01)
        return fake("")

    monkeypatch.setattr(nvrtc, "compile_variant", slow)
    results = compile_all([SMALL._replace(bn=16 * i) for i in range(1, 17)], "sm_90a", jobs=1)
    next(results)
    results.close()
    assert len(begun) < 5
    assert not any("ThreadPool" in thread.name for thread in threading.enumerate())


def test_other_errors_of_the_machine_are_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing compiler is no property of a variant."""

    def missing(variant: Variant, arch: str) -> Any:
        raise RuntimeError("no NVRTC")

    monkeypatch.setattr(nvrtc, "compile_variant", missing)
    with pytest.raises(RuntimeError, match="no NVRTC"):
        list(build.compile_all([SMALL], "sm_90a"))


def test_refusals() -> None:
    shape = (1, 1, 100, 64)
    problem = Problem.of_shapes(shape, shape, shape, dtype="bfloat16", causal=True)
    subject = Subject(problem, H200)
    assert subject.refusal(SMALL) is None
    for variant, reason in (
        (SMALL._replace(bm=100), "bm must be a multiple of 64, and bn of 16"),
        (SMALL._replace(dtype="float16"), "it is for float16, q has bfloat16"),
        (SMALL._replace(score=()), "its score is (), the call's ('Causal',)"),
        (SMALL._replace(head_dim=32), "its head dims (32, 64) are less than the problem's"),
    ):
        complaint = subject.refusal(variant)
        assert complaint is not None
        assert re.match(re.escape(reason), complaint), complaint
