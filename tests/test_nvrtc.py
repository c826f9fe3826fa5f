"""nvrtc.py: every variant compiled for every architecture without a GPU, and what it returns."""

from __future__ import annotations

import pickle
import re
import struct
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from compiled import ARCHS, ENTRIES, is_known, variants_of
from exhaustive import exhaustive

import cufa
from cufa import device
from cufa.compiler import elf, nvrtc, source
from cufa.device import Device
from cufa.features.causal import Causal
from cufa.planner.decode import plan_splits
from cufa.planner.rules import all_variants
from cufa.problem.problem import Problem
from cufa.specs import ATTENTION_KERNELS, BACKWARD_KERNELS, FP8_KERNELS
from cufa.specs.fp8_wgmma import HEAD_DIMS
from cufa.specs.variant import BackwardVariant, Fp8Variant, Variant

SOURCES = Path(cufa.__file__).parent / "kernels"
H200 = device.named("h200")

SMALL = Variant("fa2_mma", "float16", 32, 32, 64, 16, 1, 4, 1)
#: Passes for a variant, but its source asserts that tiles are not prefetched.
BROKEN = Variant("fa1_fp32", "float32", 32, 32, 64, 64, 2, 8, 1)

# --- every variant that a plan can choose, on every architecture ---

#: Bytes a thread may spill, in fa3_wgmma: registers that are not looked at in each tile of keys.
#: Tiles of 192 x 48 at head dims of 192 do, and are faster than all that do not. On an H200, 88
#: bytes took the time of 68 (0.999 to 1.001, both 16-bit types, 1024 and 8192 keys).
MOST_SPILLED = 88

#: Remarks of ptxas when it puts wgmma instructions one after the other, or waits between them.
SERIALIZED = re.compile(r"\bC75\d\d\b|serializ", re.IGNORECASE)

#: The number of an instruction that copies to shared memory at an address whose one part is the
#: same in all lanes: with a policy for L2, ptxas of CUDA 13.0 makes it of registers that hold
#: nothing, and the GPU refuses it. It did for D = 256 in pages, and 13.5 did, too.
COPY_BY_UNIFORM_ADDRESS = 0xDAE


def instruction_numbers(cubin: bytes) -> set[int]:
    code = elf.code(cubin)
    return {code[at] | code[at + 1] % 16 << 8 for at in range(0, len(code), 16)}


#: The same by kernel: a tile of 32 rows and keys over pages of 16, two blocks a multiprocessor.
MOST_SPILLED_BY = {"fa3_wgmma": MOST_SPILLED, "decode_fp8": 8, "decode_int8": 8}


def assert_lean(variant: Variant, gpu: Device) -> None:
    """Compile a variant, which must fit the GPU without anything that costs speed."""
    compiled = nvrtc.compile_variant(variant, gpu.arch)
    assert compiled.spill_bytes <= MOST_SPILLED_BY.get(variant.kernel, 0), variant
    assert compiled.stack_bytes <= compiled.spill_bytes, variant
    assert compiled.dynamic_smem_bytes == variant.smem_bytes
    smem_bytes = compiled.static_smem_bytes + compiled.dynamic_smem_bytes
    assert smem_bytes <= gpu.smem_per_block, variant
    assert 0 < compiled.registers * variant.threads * variant.blocks_per_sm <= 65536, variant
    # Whatever the compiler warns of costs speed or worse.
    assert "warning" not in compiled.log.lower(), compiled.log
    assert not SERIALIZED.search(compiled.log), compiled.log
    if variant.kernel.startswith("decode") and gpu.arch == "sm_90a":
        assert COPY_BY_UNIFORM_ADDRESS not in instruction_numbers(compiled.cubin), variant


#: Bytes a thread of fp8_wgmma may spill: next to wide scores, and in its producer; and where
#: a causal mask and lengths are read next to tiles of 256 keys.
MOST_SPILLED_FP8 = 192
MOST_SPILLED_WITH_LENGTHS = 288


#: Head dim, parts of the score and layout of those that always compile.
FP8_SAMPLE = (64, 1, "Padded"), (128, 0, "Dense")


def fp8_variant(d: int, score: tuple[str, ...] = (), kv: str = "Dense") -> Fp8Variant:
    """Return the instantiation for a head dim."""
    spec = FP8_KERNELS["fp8_wgmma"]
    (shape,) = spec.tiles(H200, (d, d))
    return Fp8Variant(*(spec.name, "bfloat16", d, d, *shape), score=score, kv=kv)


@pytest.mark.parametrize("score", [(), ("Causal",), ("Causal", "WindowLeft", "FineSoftcap")])
@pytest.mark.parametrize("d", HEAD_DIMS)
@pytest.mark.parametrize("kv", ["Dense", "Padded", "Varlen"])
@exhaustive("fp8", but=lambda d, score, kv: (d, len(score), kv) in FP8_SAMPLE)
def test_attention_of_8_bits_compiles_without_spills(
    d: int, score: tuple[str, ...], kv: str
) -> None:
    variant = fp8_variant(d, score, kv)
    compiled = nvrtc.compile_variant(variant, "sm_90a")
    # The registers that its warps hand on to each other are reckoned from this number.
    assert compiled.registers == 65536 // variant.threads // 8 * 8
    lengths = kv != "Dense" and (d, score) == (128, ("Causal",))
    most = MOST_SPILLED_WITH_LENGTHS if lengths else MOST_SPILLED_FP8
    assert compiled.spill_bytes <= most
    assert variant.smem_bytes <= H200.smem_per_block
    assert "warning" not in compiled.log.lower(), compiled.log
    assert not SERIALIZED.search(compiled.log), compiled.log


entries = pytest.mark.parametrize(
    ("arch", "kernel", "head_dims"), ENTRIES, ids=lambda x: str(x).replace(", ", "-")
)
#: Architectures whose tables are the same but for few tiles.
ALIKE = ("sm_86", "sm_89", "sm_120")


def is_its_turn(arch: str, kernel: str, head_dims: tuple[int, int]) -> bool:
    """Whether no other architecture of those alike compiles these head dims' tiles."""
    other = ALIKE[sum(head_dims) // 8 % len(ALIKE)] if arch in ALIKE else arch
    variants, others = (variants_of(each, kernel, head_dims) for each in (arch, other))
    return arch == other or variants != others


def is_new(arch: str, kernel: str, head_dims: tuple[int, int]) -> bool:
    """Whether tiles have not been compiled as they are."""
    return is_its_turn(arch, kernel, head_dims) and not is_known(arch, kernel, head_dims)


def tiles_of(arch: str, kernel: str, head_dims: tuple[int, int]) -> list[Variant]:
    """Return a variant of each tile; types and masks alternate."""
    tiles: dict[Variant, list[Variant]] = {}
    for variant in variants_of(arch, kernel, head_dims):
        tiles.setdefault(variant._replace(dtype="", score=()), []).append(variant)
    assert tiles
    each = enumerate(tiles.values(), sum(head_dims) // 16)
    return [of_tile[i % len(of_tile)] for i, of_tile in each]


@entries
@exhaustive(but=is_new)
def test_each_tile_compiles_without_spills(
    arch: str, kernel: str, head_dims: tuple[int, int]
) -> None:
    for variant in tiles_of(arch, kernel, head_dims):
        assert_lean(variant, device.of_arch(arch))


@pytest.mark.parametrize(
    ("arch", "kernel", "head_dims"),
    [entry for entry in ENTRIES if entry[2] == (64, 64) and is_its_turn(*entry)],
    ids=lambda x: str(x).replace(", ", "-"),
)
def test_a_tile_compiles_without_spills(arch: str, kernel: str, head_dims: tuple[int, int]) -> None:
    """The sample where no tile is new: another one for each architecture."""
    tiles = tiles_of(arch, kernel, head_dims)
    assert_lean(tiles[ARCHS.index(arch) % len(tiles)], device.of_arch(arch))


@entries
@exhaustive()
def test_compiles_without_spills(arch: str, kernel: str, head_dims: tuple[int, int]) -> None:
    variants = variants_of(arch, kernel, head_dims)
    assert variants
    for variant in variants:
        assert_lean(variant, device.of_arch(arch))


#: Sequences, keys, rows, the size of pages and head dim: of units that are cut, of whole ones, one
#: to four blocks a multiprocessor, of many rows, and of many units that are never cut.
DECODES = [
    *((1, 8192, 4, 0, 128), (3, 8192, 4, 16, 64), (8, 8192, 2, 0, 256), (8, 8192, 24, 16, 128)),
    *((32, 2048, 4, 16, 128), (64, 512, 4, 16, 128), (64, 512, 4, 100, 128)),
    *((256, 256, 4, 0, 128), (48, 512, 4, 0, 64), (64, 512, 4, 16, 64), (1, 8192, 4, 0, 32)),
    *((3, 8192, 64, 64, 128), (8, 8192, 2, 16, 256), (16, 8192, 4, 64, 128), (16, 8192, 4, 0, 64)),
    *((700, 128, 4, 16, 128), (700, 512, 4, 100, 128), (700, 2048, 4, 0, 128), (700, 64, 4, 0, 64)),
    *((700, 512, 4, 0, 64), (700, 512, 4, 16, 256), (700, 512, 4, 0, 96), (700, 512, 4, 0, 32)),
    *((700, 512, 32, 16, 128), (700, 512, 64, 16, 128)),
]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(("b", "keys", "rows", "page_size", "d"), DECODES)
@exhaustive(
    "decode", but=lambda dtype, rows: dtype == ("float16" if rows > 4 else "bfloat16"), one_in=4
)
def test_decode_compiles_without_spills(
    dtype: str, b: int, keys: int, rows: int, page_size: int, d: int
) -> None:
    pages = b * keys if page_size else 0
    sizes = b, 8 * rows, 8, 1, keys, d, d
    kv = "Paged" if page_size else "Contiguous"
    problem = Problem(dtype, *sizes, 1.0, (Causal(),), kv)
    problem = problem._replace(pages=pages, page_size=page_size)
    variant = plan_splits(problem, H200).variant
    assert_lean(variant, H200)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("kv_dtype", ["float8_e4m3fn", "int8"])
@pytest.mark.parametrize(("b", "keys", "rows", "page_size", "d"), DECODES)
@exhaustive("decode8", one_in=11)
def test_decode_of_8_bits_compiles_without_spills(
    dtype: str, kv_dtype: str, b: int, keys: int, rows: int, page_size: int, d: int
) -> None:
    pages = b * keys if page_size else 0
    kv = "Paged" if page_size else "Contiguous"
    problem = Problem(dtype, b, 8 * rows, 8, 1, keys, d, d, 1.0, (Causal(),), kv)
    problem = problem._replace(pages=pages, page_size=page_size, kv_dtype=kv_dtype)
    for gpu in (H200, device.named("a100")):
        assert_lean(plan_splits(problem, gpu).variant, gpu)


def test_entries_hold_every_variant() -> None:
    for arch in ARCHS:
        gpu = device.of_arch(arch)
        held = {(kernel, dims) for a, kernel, dims in ENTRIES if a == arch}
        chosen = {(v.kernel, (v.head_dim, v.head_dim_v)) for v in all_variants(gpu)}
        assert held == chosen


# --- what compile returns ---


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_120"])
def test_cubin_is_whole(arch: str) -> None:
    """An ELF file ends with its table of sections, or of segments; CuPy drops a last byte of 0."""
    cubin = nvrtc.compile_variant(SMALL, arch).cubin
    assert cubin[:5] == b"\x7fELF\x02"
    segments, sections = struct.unpack_from("<QQ", cubin, 32)
    segment_size, segment_count, section_size, section_count = struct.unpack_from("<4H", cubin, 54)
    ends = (segments + segment_size * segment_count, sections + section_size * section_count)
    assert len(cubin) == max(ends)
    assert SMALL.kernel.encode() in cubin


def test_what_the_log_says() -> None:
    compiled = nvrtc.compile_variant(SMALL, "sm_90a")
    assert f"Used {compiled.registers} registers" in compiled.log
    assert "sm_90a" in compiled.log
    assert 16 <= compiled.registers <= 255


@pytest.mark.parametrize(
    ("bm", "blocks_per_sm", "registers"), [(64, 1, 240), (64, 3, 80), (128, 1, 168), (192, 1, 128)]
)
def test_registers_that_warpgroups_share_out(bm: int, blocks_per_sm: int, registers: int) -> None:
    """The compiler gives fa3_wgmma what its source reckons with: each its part of 65536."""
    tile = (bm, 64, 2, bm // 16 + 4, blocks_per_sm)
    variant = Variant("fa3_wgmma", "bfloat16", 32, 32, *tile)
    assert nvrtc.compile_variant(variant, H200.arch).registers == registers


@pytest.mark.parametrize(
    ("head_dims", "bm", "bn"),
    [((80, 80), 64, 80), ((48, 176), 128, 48), ((16, 48), 192, 112)],
    ids=str,
)
@pytest.mark.parametrize("score", [(), ("Causal",)], ids=str)
@exhaustive("fa3_wgmma", one_in=2)
def test_head_dims_of_an_odd_number_of_steps(
    head_dims: tuple[int, int], bm: int, bn: int, score: tuple[str, ...]
) -> None:
    """None is planned, but a caller may name them."""
    tile = (bm, bn, 2, bm // 16 + 4, 1)
    assert_lean(Variant("fa3_wgmma", "bfloat16", *head_dims, *tile, score=score), H200)


def test_other_registers_than_are_shared_out_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a kernel's warpgroups would wait for registers that there are not."""
    variant = Variant("fa3_wgmma", "bfloat16", 32, 32, 128, 64, 2, 12, 1)
    text = source.text(variant.kernel)
    fewer = text.replace("__launch_bounds__(WARPS * 32,", "__launch_bounds__(WARPS * 32, 2 *")
    assert fewer != text
    monkeypatch.setattr(source, "text", lambda kernel: fewer)
    with pytest.raises(cufa.CompileError, match=r"counts on 168 .* gave it 80\n") as info:
        nvrtc.compile_variant(variant, H200.arch)
    assert info.value.variant == variant
    assert "Used 80 registers" in info.value.log


def test_each_kernel_that_shares_out_registers_says_so() -> None:
    """All that ask for others than they are launched with, by the instruction for it."""
    share = {*FP8_KERNELS, *BACKWARD_KERNELS, *ATTENTION_KERNELS}
    asking = {kernel for kernel in share if "registers_increase<" in source.text(kernel)}
    assert asking == {"fa3_wgmma", "fp8_wgmma", "bwd_wgmma", "bwd_dq_wgmma", "bwd_dkv_wgmma"}
    instance = fp8_variant(256)
    assert (instance.launch_registers, nvrtc.wrong_registers(instance, 168)) == (168, None)
    assert "counts on 168" in str(nvrtc.wrong_registers(instance, 160))
    for name in ("bwd_wgmma", "bwd_dq_wgmma", "bwd_dkv_wgmma"):
        spec = BACKWARD_KERNELS[name]
        dims = spec.head_dims(H200)[0]
        variant = BackwardVariant(*(name, "bfloat16", *dims, *spec.tiles(H200, dims)[0]))
        assert variant.launch_registers == 65536 // variant.threads // 8 * 8


def test_spills_are_seen() -> None:
    """32 rows a warp of 256 columns need more registers than there are."""
    crowded = Variant("fa2_mma", "float16", 256, 256, 128, 32, 1, 4, 1)
    assert crowded.illegal(H200) is None
    compiled = nvrtc.compile_variant(crowded, "sm_90a")
    assert compiled.registers == 255
    assert compiled.spill_bytes > 0


def test_code_bytes_are_those_of_the_instructions() -> None:
    """They load 16 bytes each; more of them where loops are unrolled further."""
    small = nvrtc.compile_variant(SMALL, "sm_90a")
    large = nvrtc.compile_variant(SMALL._replace(bn=64), "sm_90a")
    assert small.code_bytes % 16 == 0
    assert 1000 < small.code_bytes < large.code_bytes < len(large.cubin)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_ptx(arch: str) -> None:
    text = nvrtc.ptx(SMALL, arch)
    assert re.search(rf"^\.target {arch}$", text, re.MULTILINE)
    cubin = nvrtc.compile_variant(SMALL, arch).cubin
    assert re.findall(r"\.entry (\w+)", text) == [elf.symbol(cubin)]
    assert "mma.sync" in text
    assert "\0" not in text


def test_waits_can_be_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests on a GPU have a wait that does not end stop the kernel."""
    variant = Variant("fa3_wgmma", "float16", 64, 64, 64, 64, 2, 8, 1, score=("Causal",))
    traps = [nvrtc.ptx(variant, H200.arch).count("trap;")]
    text = source.text("fa3_wgmma")
    monkeypatch.setattr(source, "text", lambda kernel: f"#define BOUNDED_WAITS\n{text}")
    traps.append(nvrtc.ptx(variant, H200.arch).count("trap;"))
    assert traps[1] > traps[0]


def test_ptx_of_what_does_not_compile() -> None:
    with pytest.raises(cufa.CompileError, match="tiles are not prefetched") as info:
        nvrtc.ptx(BROKEN, "sm_90a")
    assert "-arch=compute_90a" in info.value.options


def test_threads_compile_at_once() -> None:
    variants = [SMALL, SMALL._replace(score=("Causal",))]
    alone = [nvrtc.compile_variant(variant, "sm_80") for variant in variants]
    with ThreadPoolExecutor(2) as pool:
        together = list(pool.map(lambda variant: nvrtc.compile_variant(variant, "sm_80"), variants))
    assert [c.registers for c in together] == [c.registers for c in alone]
    assert [c.code_bytes for c in together] == [c.code_bytes for c in alone]


def test_compile_error() -> None:
    with pytest.raises(cufa.CompileError) as info:
        nvrtc.compile_variant(BROKEN, "sm_86")
    error = info.value
    assert error.variant == BROKEN
    assert {"-arch=sm_86", "-ftz=true"} < set(error.options)  # as in what a call compiles
    assert "tiles are not prefetched" in error.log
    # The message points at the line of the real file.
    lines = (SOURCES / "fa1_fp32.cu").read_text().splitlines()
    (number,) = (i for i, line in enumerate(lines, 1) if "tiles are not prefetched" in line)
    assert f"fa1_fp32.cu({number}): error" in error.log
    for part in (str(BROKEN), "-arch=sm_86", error.log):
        assert part in str(error)


def test_compile_error_can_be_pickled() -> None:
    error = cufa.CompileError(BROKEN, ("-std=c++17", "-arch=sm_86"), "a log\nof two lines")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is cufa.CompileError
    assert isinstance(copy, RuntimeError)
    assert (copy.variant, copy.options, copy.log) == (error.variant, error.options, error.log)
    assert str(copy) == str(error)


def test_unknown_architecture() -> None:
    with pytest.raises(cufa.CompileError, match="sm_1"):
        nvrtc.compile_variant(SMALL, "sm_1")
