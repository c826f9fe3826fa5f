"""One descriptor a kernel: what it takes, what it needs, and how its blocks work.

Nothing else asks for a kernel by name; a new one is an entry of `KERNELS`, a file of
``cufa/kernels``, its tiles in ``cufa/planner/tiles.py`` and its space in
``cufa/explorer/space.py``; if it decodes, its tiles in ``cufa/planner/decode_variants.py``, and no
space.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from cufa.device import Device
from cufa.dtypes import DTYPES
from cufa.score import BLOCKS, OWN, PARTS, Parameter, edges, part_named

if TYPE_CHECKING:
    from cufa.variant import Variant

LENGTHS = {
    "Padded": (Parameter("lengths_k", "u8"),),
    "Varlen": (
        *(Parameter(name, "u8") for name in ("cu_seqlens_q", "cu_seqlens_k", "seqused_k")),
        *(Parameter(name, "i4") for name in ("sequences", "max_seqlen_q", "max_seqlen_k")),
    ),
}
"""What a launch appends where sequences differ in length, see ``kernels/kv.cuh``; what has 64 bits
is the address of an array of that name."""

WGMMA_WIDTHS = (32, 48, 64, 80, 96, 112, 128, 144, 160, 176, 192, 256)
"""The N of wgmma that ``kernels/ptx_sm90.cuh`` has."""

NUMBERS = ("head_dim", "head_dim_v", "bm", "bn", "stages", "warps", "blocks_per_sm")
"""The template arguments of every kernel that are numbers, in order."""


class Kernel(NamedTuple):
    """What the rest of the package knows of one kernel.

    Attributes
    ----------
    name : str
        Of the ``__global__`` function, and of its file.
    dtypes : tuple of str
        The element types that it takes.
    smem_bytes : callable
        Variant -> dynamic shared memory of a block.
    complaint : callable
        Variant and Device -> why it cannot run, as far as the kernel's own rules say, or None.
    arguments : tuple of str
        The fields of a `Variant` that are template arguments between the element type and the
        score, in order.
    archs : tuple of str, optional
        The architectures that it is for; None for all.
    head_dim_step : int
        Head dims are compiled in multiples of it.
    tma : bool
        Whether it reads and writes through tensor maps: its parameter is ``TmaArguments``, and else
        ``Params``.
    persistent : bool
        Whether a block takes one tile after the other; the grid is then no larger than what runs at
        once. If tiles differ in length, blocks draw them as they become free.
    packs_heads : bool
        Whether the rows of a group's query heads can share a tile.
    needs_keys : bool
        Whether it cannot run without any.
    takes_heads : bool
        Whether a block takes a whole head, and loops over its rows.
    workspace : int
        float32 scratch in global memory for each row.
    flops_per_byte : int
        Floating-point operations of a busy multiprocessor in the time in which it could read a byte
        of global memory, as measured on an H200; of those that are for `attention`.
    scores, kvs : tuple of str
        The parts of a score, and the ways of finding K and V, that it takes.
    decodes : bool
        Whether it is for `decode`: lengths may be on the device, and its parameter is
        ``DecodeArguments``.
    is_dependent : bool
        Whether it is launched as `cufa.compiler.dependent` says.
    launch_registers : callable, optional
        Variant -> registers of a thread at launch, where the kernel counts on having exactly so
        many because it moves them between its warps.
    spare_registers : callable, optional
        Variant -> how many a thread of those that compute has beside its S, P and O, where it has
        not as many as it may ask for.
    """

    name: str
    dtypes: tuple[str, ...]
    smem_bytes: Callable[[Variant], int]
    complaint: Callable[[Variant, Device], str | None]
    arguments: tuple[str, ...] = NUMBERS
    archs: tuple[str, ...] | None = None
    head_dim_step: int = 16
    tma: bool = False
    persistent: bool = False
    packs_heads: bool = False
    needs_keys: bool = False
    takes_heads: bool = False
    workspace: int = 0
    flops_per_byte: int = 1
    scores: tuple[str, ...] = (*PARTS, *OWN.values())
    kvs: tuple[str, ...] = ("Dense",)
    decodes: bool = False
    is_dependent: bool = False
    launch_registers: Callable[[Variant], int] | None = None
    spare_registers: Callable[[Variant], int] | None = None

    def runs_on(self, device: Device) -> bool:
        """Whether a device has the instructions that this kernel needs."""
        return self.archs is None or device.arch in self.archs


def panel_columns(columns: int) -> int:
    """Columns of a panel of a 16-bit tile in shared memory, see ``kernels/tile.cuh``."""
    return next((n for n in (64, 32) if columns % n == 0), 16)


# --- fa3_wgmma: a producer's warpgroup, and a consumer for each 64 rows ---


def _pair_bytes(v: Variant) -> int:
    """Each warp's 16 rows of biases and masks, as kernels/pair_tiles_sm90.cuh lays them out."""
    of_warp = 0
    for part in map(part_named, v.score):
        if "k" in part.axes:
            bits = part.dtype == "uint8"
            row = (
                -(-v.bn // 32) * 4
                if bits
                else v.bn * (DTYPES[part.dtype].bytes if part.dtype in DTYPES else 1)
            )
            of_warp += 16 * 8 + -(-16 * row // 128) * 128  # where the rows are, and the rows
    return v.bm // 16 * of_warp


def _fa3_slot_and_rings(v: Variant) -> tuple[int, int]:
    """Return the bytes of a slot of Q and O, and of what is beside all slots, but for barriers."""
    slot = 2 * v.bm * max(v.head_dim, v.head_dim_v)
    return slot, 2 * v.stages * v.bn * (v.head_dim + v.head_dim_v) + _pair_bytes(v)


def q_slots(v: Variant) -> int:
    """Return how many slots of Q and O a variant of fa3_wgmma has."""
    slot, rings = _fa3_slot_and_rings(v)
    return max(1, min(3, (227 * 1024 // v.blocks_per_sm - 1024 - rings) // slot))


def _fa3_smem_bytes(v: Variant) -> int:
    """As fa3_wgmma.cu lays it out: up to three slots of Q and O, rings of K and V, barriers."""
    slot, rings = _fa3_slot_and_rings(v)
    slots = q_slots(v)
    parts = v.bm // 64 if edges(v.score) and BLOCKS not in v.score else 1
    # A tile, which keys its parts' rows visit, and its sequence's lengths.
    work = 4 * (3 + 4 * parts) + 16 * (v.kv in LENGTHS)
    if BLOCKS in v.score:  # and where the map has which keys it visits, an address
        work = -(-(work + 8) // 8) * 8
    from_registers = slots == 1 or (slots == 2 and v.bm < 192)  # O, which is written later then
    works = 2 * slots if from_registers else slots
    return rings + slots * (slot + 16) + 32 * v.stages + work * works


def _fa3_registers(v: Variant) -> int:
    # An equal part, but no more than the 240 that setmaxnreg gives the consumers at most.
    return min(65536 // (v.threads * v.blocks_per_sm) // 8 * 8, 240)


def _fa3_spare_registers(v: Variant) -> int:
    consumers = v.bm // 64
    at_launch = 65536 // (v.threads * v.blocks_per_sm) // 8 * 8
    share = (at_launch * (consumers + 1) - 32) // consumers // 8 * 8
    return min(share, 240) - (v.bn // 2 + v.bn // 4 + v.head_dim_v // 2)


def _fa3_complaint(v: Variant, device: Device) -> str | None:
    if v.bm % 64 or v.warps != v.bm // 16 + 4:
        return "bm must be a multiple of 64, and warps bm / 16 + 4: a producer's 4 beside"
    for name in ("bn", "head_dim_v"):
        if getattr(v, name) not in WGMMA_WIDTHS:
            return f"{name} must be one of {', '.join(map(str, WGMMA_WIDTHS))} in fa3_wgmma"
    if panel_columns(v.head_dim) != panel_columns(v.head_dim_v):
        return "head_dim and head_dim_v must be swizzled alike, as multiples of 64, 32 or 16"
    skipped = edges(v.score) * -(-(v.bm - 64) // v.bn)
    if skipped > v.stages and BLOCKS not in v.score:  # it may hold a V meanwhile
        return f"a warpgroup skips {skipped} masked tiles of keys: as many stages are needed"
    if v.ping_pong and v.bm == 64:
        return "ping_pong needs two warpgroups, bm of 128 or more"
    # What the system takes of each block comes on top.
    at_once = v.blocks_per_sm * (v.smem_bytes + 1024)
    if v.blocks_per_sm > 1 and _pair_bytes(v) and at_once > device.smem_per_sm:
        return f"{v.blocks_per_sm} blocks and their biases or masks do not fit a multiprocessor"
    return None


# --- fa2_mma and fa2_fp32: 16 rows a warp, or several times 16 ---


_WIDE = 160  # columns of a float32 output beyond which two warps share them


def row_warps(v: Variant) -> int:
    """Warps that share the rows; in fa2_fp32 two share the columns of a wide output."""
    return v.warps // 2 if v.dtype == "float32" and v.head_dim_v > _WIDE else v.warps


def _ring_bytes(v: Variant) -> int:
    """Q, the rings of K and V, and what each warp's 16-row pieces are to the keys."""
    elements = v.bm * v.head_dim + v.stages * v.bn * (v.head_dim + v.head_dim_v)
    pieces = v.bm // 16 * (v.warps // row_warps(v))
    of_tile = 16 * (v.kv == "Varlen")  # which one it is
    return DTYPES[v.dtype].bytes * elements + 16 * pieces + of_tile


def _fa2_mma_smem_bytes(v: Variant) -> int:
    return max(_ring_bytes(v), DTYPES[v.dtype].bytes * v.bm * v.head_dim_v)  # O in their place


def _fa2_complaint(v: Variant, row_warps: int) -> str | None:
    if v.warps % 2:
        return "warps must be even: a thread copies rows in steps of 8"
    if v.bm % (16 * row_warps) or v.bn % 16:
        return f"bm must be a multiple of {16 * row_warps}, and bn of 16"
    return None


def _fa2_mma_complaint(v: Variant, device: Device) -> str | None:
    return _fa2_complaint(v, v.warps)


def _fa2_fp32_complaint(v: Variant, device: Device) -> str | None:
    if v.head_dim_v > _WIDE and v.head_dim_v % 64:
        return f"fa2_fp32 splits a head_dim_v of more than {_WIDE}: it must be multiples of 64"
    return _fa2_complaint(v, row_warps(v))


# --- fa1_fp32: the scores pass through shared memory ---


def _fa1_smem_bytes(v: Variant) -> int:
    """Q, K, V and P; the rows of all but V are 4 longer."""
    q_and_p = v.bm * (v.head_dim + 4 + v.bn + 4)
    return DTYPES[v.dtype].bytes * (q_and_p + v.bn * (v.head_dim + 4 + v.head_dim_v))


def _fa1_complaint(v: Variant, device: Device) -> str | None:
    if v.stages != 1:
        return "fa1_fp32 has a single stage"
    if v.bm % (2 * v.warps) or v.bn % 16:
        return "bm must be a multiple of 2 * warps, and bn of 16"
    return None


# --- decode and decode_wgmma: each team of warps has a ring of its own ---


def _decode_team(v: Variant) -> int:
    """Return how many warps share a ring: of more than 16 rows two, or a warpgroup."""
    return 4 if v.kernel == "decode_wgmma" else 2 if v.bm > 16 else 1


def _decode_smem_bytes(v: Variant) -> int:
    """Q, the teams' rings of K and V, some rows of their O, and m and l of all."""
    team = _decode_team(v)
    teams = v.warps // team
    rings = teams * v.stages * v.bn * (v.head_dim + v.head_dim_v)
    operands = DTYPES[v.dtype].bytes * (v.bm * v.head_dim + rings)
    few = max(v.bm * team // 8, 4, v.warps // -(-v.head_dim_v // 64))
    return operands + 4 * (teams * few * (v.head_dim_v + 8) + 2 * teams * v.bm)


def _decode_complaint(v: Variant, device: Device) -> str | None:
    if v.kernel == "decode_wgmma":
        if v.bm != 64 or v.bn not in (32, 64, 128):
            return "bm must be 64, and bn 32, 64 or 128"
    elif v.bm not in (16, 32, 64) or v.bn % 16:
        return "bm must be 16, 32 or 64, and bn a multiple of 16"
    team = _decode_team(v)
    if v.warps % team:
        return f"warps must be a multiple of {team}: so many share a ring"
    if team > 1 and v.warps // team > 14:  # beside __syncthreads() and that of one stage
        return "each two warps of a bm of 32 or 64 need a barrier: there are 14, for 28 warps"
    if v.kv == "Paged" and v.bn > 32:
        return "a warp looks up the pages of at most 32 keys: bn must not be more with Paged"
    if v.stages < 1 or v.warps < 2:
        return "decode needs at least 1 stage and 2 warps"
    if v.dtype == "float32" and v.bm != 16:
        return "in float32, decode needs bm of 16"
    if v.unified and (v.dtype == "float32" or v.bm > 16):
        return "unified is for 16 bits, and bm of 16"
    return None


DECODE_SCORE = (
    *("Softcap", "FineSoftcap", "ExactSoftcap", "Alibi"),
    *("Causal", "WindowLeft", "WindowRight", "Sinks"),
)
"""The parts of a score that `decode` takes."""

_decode_kernel = functools.partial(
    Kernel,
    smem_bytes=_decode_smem_bytes,
    complaint=_decode_complaint,
    packs_heads=True,
    scores=DECODE_SCORE,
    kvs=("Contiguous", "Paged", "PagedSixteens", "PagedTiles"),
    head_dim_step=32,
    decodes=True,
    is_dependent=True,
)


# A call of `attention` that names no kernel takes the first that can run it.
KERNELS: dict[str, Kernel] = {
    kernel.name: kernel
    for kernel in (
        Kernel(
            "fa3_wgmma",
            dtypes=("float16", "bfloat16"),
            smem_bytes=_fa3_smem_bytes,
            complaint=_fa3_complaint,
            arguments=(*NUMBERS, "ping_pong"),
            archs=("sm_90a",),
            tma=True,
            persistent=True,
            packs_heads=True,
            kvs=("Dense", *LENGTHS),
            needs_keys=True,  # TMA cannot describe an array of none
            is_dependent=True,
            flops_per_byte=116,
            launch_registers=_fa3_registers,
            spare_registers=_fa3_spare_registers,
        ),
        Kernel(
            "fa2_mma",
            dtypes=("float16", "bfloat16"),
            smem_bytes=_fa2_mma_smem_bytes,
            complaint=_fa2_mma_complaint,
            kvs=("Dense", *LENGTHS),
            flops_per_byte=75,
        ),
        Kernel(
            "fa2_fp32",
            dtypes=("float32",),
            smem_bytes=_ring_bytes,
            complaint=_fa2_fp32_complaint,
            kvs=("Dense", *LENGTHS),
            head_dim_step=32,
            flops_per_byte=13,
        ),
        Kernel(
            "fa1_fp32",
            dtypes=("float32",),
            smem_bytes=_fa1_smem_bytes,
            complaint=_fa1_complaint,
            takes_heads=True,
            scores=("Causal",),
            workspace=2,  # row maxima and sums, which pass from tile of keys to tile of keys
            flops_per_byte=2,
        ),
        _decode_kernel(
            "decode",
            dtypes=("float16", "bfloat16", "float32"),
            arguments=(*NUMBERS, "unified", "whole"),
        ),
        _decode_kernel(
            "decode_wgmma",
            dtypes=("float16", "bfloat16"),
            arguments=(*NUMBERS, "whole"),
            archs=("sm_90a",),
        ),
    )
}
"""The kernels, by name."""

ATTENTION_KERNELS = {name: kernel for name, kernel in KERNELS.items() if not kernel.decodes}
"""Those that are for `attention`; the others are for `decode`."""


@functools.cache
def default_kernel(dtype: str, device: Device, keys: bool = True) -> Kernel:
    """Return the kernel that a call of `attention` uses unless it names another.

    Parameters
    ----------
    dtype : str
    device : Device
    keys : bool
        Whether the call has any.
    """
    return next(
        kernel
        for kernel in ATTENTION_KERNELS.values()
        if dtype in kernel.dtypes and kernel.runs_on(device) and (keys or not kernel.needs_keys)
    )
