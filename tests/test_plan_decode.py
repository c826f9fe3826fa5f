"""Problem of a cache -> DecodePlan: what is too large for a kernel, and numbers of few bits."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest

from cufa import device
from cufa.features.causal import Causal
from cufa.features.softcap import Softcap
from cufa.features.window import Window
from cufa.planner.decode import plan_splits
from cufa.planner.decode_model import Items
from cufa.planner.rules import KEY_STEP
from cufa.problem.problem import Problem

H200 = device.named("h200")


def problem(
    *,
    causal: Any = True,
    left: Any = None,
    right: Any = None,
    softcap: Any = None,
    reads: Any = (),
    **sizes: Any,
) -> Problem:
    fields: dict[str, Any] = {
        **{"dtype": "float16", "batch": 1, "heads_q": 8, "heads_kv": 2, "seq_q": 1},
        **{"capacity": 1000, "pages": 0, "page_size": 0, "head_dim": 64, "head_dim_v": 64},
        **{"scale": 0.125},
    }
    fields |= sizes
    kv = "Paged" if fields["page_size"] else "Contiguous"
    found = Problem(seq_kv=fields.pop("capacity"), kv=kv, **fields).reading(*reads)
    if causal:
        found = found.having(Causal())
    if (left, right) != (None, None):
        found = found.having(Window(left, right))
    return found if softcap is None else found.having(Softcap(softcap))


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"heads_q": 2**16, "heads_kv": 1, "seq_q": 2**15}, "q: 2147483648 rows"),
        ({"heads_q": 2**16, "batch": 2**15}, "or 2147483648 heads of all"),
        ({"capacity": 2**30, "heads_kv": 8, "batch": 2**6}, "k_cache: .* tiles of keys"),
    ],
)
def test_too_large(sizes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan_splits(problem(**sizes), H200)


def test_splits_are_no_more_than_tiles() -> None:
    assert plan_splits(problem(), H200, 10**6).splits == -(
        -1000 // plan_splits(problem(), H200).variant.bn
    )


def tile(gpu: device.Device = H200, splits: int | None = None, **sizes: Any) -> tuple[int, int]:
    """Rows of a tile, and blocks of a multiprocessor."""
    variant = plan_splits(problem(**sizes), gpu, splits).variant
    return variant.bm, variant.blocks_per_sm


def test_many_rows_share_a_tile() -> None:
    assert tile(heads_q=8, seq_q=4) == (16, 1)
    assert tile(heads_q=8, seq_q=5) == tile(heads_q=8, seq_q=8, batch=40) == (32, 1)
    assert tile(heads_q=8, seq_q=9) == tile(heads_q=8, seq_q=9, batch=30) == (64, 1)
    wide: Any = {"head_dim": 256, "head_dim_v": 256}
    assert tile(heads_q=8, seq_q=8, **wide) == (16, 1)
    assert tile(heads_q=8, seq_q=9, batch=30, dtype="float32") == (16, 1)


def test_the_kernel_of_many_rows_has_no_preset_maximum() -> None:
    with pytest.raises(ValueError, match=r"^kernel: decode_wgmma has no unified_max"):
        plan_splits(problem(unified_max=0.0), H200, kernel="decode_wgmma")


def test_a_named_variant_runs_as_it_is_planned() -> None:
    """Also that of the call without a log-sum-exp, whose softcap is another."""
    for batch in (1, 16, 210, 264, 500, 2000):
        sizes: dict[str, Any] = {"dtype": "bfloat16", "batch": batch, "softcap": 9.0}
        with_lse, without = (problem(returns_lse=each, **sizes) for each in (True, False))
        planned = plan_splits(with_lse, H200)
        assert plan_splits(with_lse, H200, kernel=planned.variant) == planned
        named = plan_splits(with_lse, H200, kernel=plan_splits(without, H200).variant)
        assert named.variant != planned.variant
        assert named._replace(variant=planned.variant) == planned


def test_the_kernel_of_many_rows() -> None:
    """Where there are warpgroups' products, and these save reading keys twice."""

    def kernel(gpu: device.Device = H200, **sizes: Any) -> str:
        return plan_splits(problem(heads_q=8, **sizes), gpu).variant.kernel

    assert kernel(seq_q=8) == kernel(seq_q=9, dtype="float32") == "decode"
    assert kernel(seq_q=9) == kernel(seq_q=9, head_dim=256, head_dim_v=256) == "decode_wgmma"
    assert kernel(device.named("a100"), seq_q=9) == kernel(seq_q=9, unified_max=0.0) == "decode"


@pytest.mark.parametrize(
    ("page_size", "rows", "kv"),
    [(64, 9, "PagedTiles"), (48, 9, "PagedSixteens"), (8, 9, "Paged"), (16, 1, "PagedTiles")],
)
def test_how_pages_are_found(page_size: int, rows: int, kv: str) -> None:
    found = plan_splits(problem(heads_q=8, seq_q=rows, pages=9, page_size=page_size), H200).variant
    assert found.kv == kv


@pytest.mark.parametrize(
    ("page_size", "dim", "keys"), [(16, 128, 16), (48, 128, 16), (64, 128, 32), (16, 64, 32)]
)
def test_tiles_of_32_rows_are_of_one_page_if_these_are_sixteens(
    page_size: int, dim: int, keys: int
) -> None:
    sizes: dict[str, Any] = {"head_dim": dim, "head_dim_v": dim, "page_size": page_size}
    found = plan_splits(problem(heads_q=8, seq_q=8, pages=9, **sizes), H200).variant
    assert (found.bm, found.bn) == (32, keys)


def test_more_warpgroups_where_no_item_is_cut() -> None:
    def warps(batch: int, splits: int | None = None, **sizes: Any) -> int:
        sizes = {"capacity": 4000, **sizes}
        return plan_splits(problem(seq_q=16, batch=batch, **sizes), H200, splits).variant.warps

    assert warps(64) == warps(66) == warps(256, capacity=9000) == 16
    assert warps(40) == warps(90) == 8
    assert {warps(n, splits=3) for n in (1, 64, 66, 256)} == {8}
    assert {warps(64, pages=9000, page_size=n) for n in (16, 32, 48, 64, 128, 256)} == {16}
    assert {warps(64, head_dim=n, head_dim_v=n) for n in (96, 128, 256)} == {8}


def small(gpu: device.Device = H200, **sizes: Any) -> tuple[int, int]:
    """Warps of a block, and for how many blocks registers suffice, if each has a whole unit."""
    found = plan_splits(problem(**sizes), gpu)
    units = found.row_tiles * sizes.get("batch", 1) * sizes.get("heads_kv", 2)
    whole = (found.grid, found.parts) == (units, 1)
    return (found.variant.warps, found.variant.blocks_per_sm) if whole else (0, 0)


WIDE: dict[str, Any] = {"head_dim": 128, "head_dim_v": 128}
PAGES: dict[str, Any] = {"pages": 9000, "page_size": 16}


@pytest.mark.parametrize(
    ("batch", "keys", "blocks"),
    [
        (64, 4096, 0),  # 0.97 items a multiprocessor: equal parts, if lengths differ little
        (132, 4096, 2),
        (126, 4096, 2),
        (128, 20_000, 1),  # a second end takes less than what two places leave idle
        (99, 20_000, 0),  # a wave and a half
        (150, 20_000, 0),
        (192, 4096, 1),
        (260, 20_000, 2),
    ],
)
def test_each_item_has_a_block_where_few_multiprocessors_idle(
    batch: int, keys: int, blocks: int
) -> None:
    """As many at a time as cost least; else blocks share all keys out, one a multiprocessor."""
    found = plan_splits(problem(batch=batch, capacity=keys), H200)
    assert not found.variant.whole
    apart = (found.grid, found.parts, found.splits) == (2 * batch, 1, 0)
    assert (apart and found.variant.blocks_per_sm) == blocks
    assert apart or found.grid == 132
    assert tile(splits=1, batch=batch, capacity=keys) == (16, 1)


def test_prices_of_a_block_each() -> None:
    """Idle time is lost, the less the more waves there are; shares cost ends and waits."""

    def items(batch: int) -> Items:
        return Items.of(problem(batch=batch, capacity=8192), H200, 16)

    for blocks in (1, 2):
        full, more = items(132 * blocks // 2), items(132 * blocks // 2 + 1)
        assert full.apart(blocks) == pytest.approx(blocks * full.size + full.end)
        assert more.apart(blocks) > full.apart(blocks) * 1.2
    assert items(66 * 4).apart(1) < items(66 * 4 + 1).apart(1) < items(66 * 4).apart(1) * 1.1
    assert [items(n).is_apart(1) for n in (66, 660, 99)] == [True, True, False]
    assert not items(660)._replace(has_memory=False).is_apart(1)


@pytest.mark.parametrize(
    ("batch", "keys", "pages", "shape"),
    [
        (264, 500, PAGES, (4, 4)),
        (132, 100, {}, (4, 2)),  # two each
        (264, 500, {}, (4, 2)),
        (264, 2000, PAGES, (4, 2)),
    ],
)
def test_blocks_of_four_warps(
    batch: int, keys: int, pages: dict[str, Any], shape: tuple[int, int]
) -> None:
    assert small(batch=batch, capacity=keys, **WIDE, **pages) == shape


def ring(**sizes: Any) -> tuple[int, ...]:
    """Keys of a tile, stages, warps and blocks of a multiprocessor, of units that are not cut."""
    found = plan_splits(problem(**sizes), H200).variant
    assert found.whole
    return found.bn, found.stages, found.warps, found.blocks_per_sm


@pytest.mark.parametrize(
    ("dim", "keys", "pages", "expected"),
    [
        (64, 64, {}, (16, 2, 2, 8)),
        (64, 128, {}, (16, 2, 4, 4)),
        (64, 256, {}, (32, 1, 4, 4)),
        (64, 512, {}, (64, 1, 4, 2)),
        (64, 2048, {}, (64, 1, 8, 1)),
        (64, 512, PAGES, (32, 1, 4, 4)),
        (128, 128, {}, (16, 1, 4, 4)),
        (128, 512, {}, (32, 1, 4, 2)),
        (128, 2048, {}, (32, 1, 8, 1)),
        (128, 512, PAGES, (16, 1, 4, 4)),
        (256, 16, {}, (16, 1, 2, 4)),  # of 32 KB each: eight do not fit
        (256, 1024, {}, (16, 1, 8, 1)),
    ],
)
def test_blocks_of_many_short_units(
    dim: int, keys: int, pages: dict[str, Any], expected: tuple[int, ...]
) -> None:
    """All of a multiprocessor ask for 128 KB at a time: of short units several, of long ones 1."""
    found = ring(batch=1024, capacity=keys, head_dim=dim, head_dim_v=dim, **pages)
    assert found == expected
    bn, stages, warps, blocks = found
    assert bn * stages * warps * blocks * dim * 4 == 128 << 10


def test_blocks_of_many_short_units_of_many_rows() -> None:
    sizes: dict[str, Any] = {"batch": 1024, "capacity": 512, "heads_q": 16, **WIDE}
    assert ring(seq_q=4, **sizes) == (32, 1, 8, 2)
    assert ring(seq_q=8, **sizes) == (64, 2, 8, 1)
    assert ring(seq_q=4, page_size=20, pages=9, **sizes) == (16, 2, 8, 2)


def test_short_items_are_never_cut_however_few() -> None:
    def splits(capacity: int, **sizes: Any) -> int:
        return plan_splits(problem(capacity=capacity, **sizes), H200).splits

    assert (splits(512), splits(528)) == (1, 0)
    assert (splits(256, **WIDE), splits(272, **WIDE)) == (1, 0)
    assert splits(300, seq_q=16) == 1
    assert (splits(2048, batch=67), splits(2048, batch=66)) == (1, 0)  # one a multiprocessor
    assert (splits(128, dtype="float32"), splits(144, dtype="float32")) == (1, 0)


@pytest.mark.parametrize("name", ["h200", "a100", "rtx4090"])
def test_an_item_that_is_never_cut_is_no_longer_than_what_cutting_costs(name: str) -> None:
    """Where all others are short, it takes up to 4 us, and 3.5 for each item a multiprocessor."""
    gpu = device.named(name)
    for batch, keys, dim, rows in itertools.product(
        (1, 30, 66, 67, 150, 500, 3000), (64, 300, 1000, 3000, 10_000, 40_000), (64, 128), (1, 4)
    ):
        sizes: dict[str, Any] = {"batch": batch, "capacity": keys, "seq_q": rows}
        found = plan_splits(problem(head_dim=dim, head_dim_v=dim, **sizes), gpu)
        size, of_each = keys * 4 * dim, 2 * batch / gpu.sm_count
        several = math.ceil(of_each) if of_each > 1 else 0
        if found.splits == 1:
            assert size / 85_000 < 4 + 3.5 * several
        else:
            assert size / 85_000 > 1 + 2 * several


@pytest.mark.parametrize(
    ("batch", "heads", "keys", "apart"),
    [(8, 32, 8192, True), (4, 64, 8192, True), (16, 16, 8192, True), (6, 32, 8192, False)],
)
@pytest.mark.parametrize("pages", [{}, PAGES])
def test_long_items_have_a_block_each_and_may_be_cut(
    batch: int, heads: int, keys: int, apart: bool, pages: dict[str, Any]
) -> None:
    sizes: dict[str, Any] = {"batch": batch, "heads_q": heads, "heads_kv": heads}
    found = plan_splits(problem(capacity=keys, **sizes, **WIDE, **pages), H200)
    assert (found.variant.whole, found.splits, found.parts) == (False, 0, 1)
    assert found.grid == (batch * heads if apart else 132)
    assert found.variant[5:9] == (32, 1, 8, 1)


def test_what_is_never_cut_is_whole_when_compiled() -> None:
    assert plan_splits(problem(), H200, 1).variant.whole
    assert not plan_splits(problem(), H200, 2).variant.whole
    assert not plan_splits(problem(batch=66, capacity=8192), H200).variant.whole


def test_a_named_variant_that_is_whole() -> None:
    """Cuts nothing, however few units there are."""
    named = plan_splits(problem(capacity=9000), H200, 1).variant
    for splits in (None, 1):
        found = plan_splits(problem(batch=3, capacity=9000), H200, splits, named)
        assert (found.variant, found.grid, found.parts, found.splits) == (named, 6, 1, 1)
    with pytest.raises(ValueError, match=r"^num_splits: .* cuts nothing, 2 parts are asked for"):
        plan_splits(problem(capacity=9000), H200, 2, named)
    short = plan_splits(problem(capacity=16), H200, 2).variant
    assert plan_splits(problem(capacity=16), H200, 2, short).splits == 1  # there is one tile
    for sizes in ({"batch": 1024}, {"batch": 3}):
        general = plan_splits(problem(**sizes), H200, kernel=named._replace(whole=False))
        assert not general.variant.whole


def test_a_block_each_only_where_there_is_memory_for_pieces() -> None:
    """Which blocks leave, where lengths differ much."""
    sizes: dict[str, Any] = {"heads_q": 24, "capacity": 70_000, **WIDE}
    for batch, grid in ((660, 2 * 660), (2310, 132)):
        found = plan_splits(problem(batch=batch, **sizes), H200)
        assert (found.splits, found.grid) == (0, grid)


@pytest.mark.parametrize("batch", [4096, 1024])  # without and with memory for pieces
def test_many_short_units_are_never_cut(batch: int) -> None:
    """However lengths differ."""
    found = plan_splits(problem(batch=batch, heads_q=24, capacity=512, **WIDE), H200)
    assert (found.grid, found.parts, found.splits) == (2 * batch, 1, 1)
    assert found.partial_floats == 0


def test_many_rows_of_short_units_are_never_cut() -> None:
    """Their ends take long."""
    sizes: dict[str, Any] = {"heads_q": 4, "heads_kv": 1, "seq_q": 16, **WIDE}
    for batch, keys, splits in ((120, 1500, 0), (400, 1500, 1), (400, 9000, 0), (600, 1500, 1)):
        found = plan_splits(problem(batch=batch, capacity=keys, **sizes), H200)
        assert (found.splits, found.variant.whole) == (splits, splits == 1)


def test_sixteen_warps_only_of_items_that_are_not_cut() -> None:
    sizes: dict[str, Any] = {"heads_q": 64, "heads_kv": 8, "seq_q": 8}
    assert plan_splits(problem(batch=16, capacity=1024, **sizes), H200).variant.warps == 16
    found = plan_splits(problem(batch=124, capacity=40_000, **sizes), H200)  # no memory for pieces
    assert (found.variant.warps, found.grid) == (8, 132)


def test_others_may_be_cut_where_lengths_differ() -> None:
    """Few short ones, and long ones."""
    sizes: dict[str, Any] = {"heads_q": 24, **WIDE}
    assert plan_splits(problem(batch=264, capacity=4096, **sizes), H200).splits == 0
    assert plan_splits(problem(batch=60, capacity=300, **sizes), H200).splits == 0
    assert plan_splits(problem(batch=1024, capacity=40_000, **sizes), H200).splits == 0


@pytest.mark.parametrize("name", ["h200", "a100", "rtx4090"])
@pytest.mark.parametrize("dim", [32, 64, 96, 128, 256])
def test_no_multiprocessor_has_more_blocks_than_its_share(name: str, dim: int) -> None:
    """Where all run at once. Where others follow, as many as fit."""
    gpu = device.named(name)
    for batch in (1, 30, gpu.sm_count // 2, gpu.sm_count, 2 * gpu.sm_count - 1, 9 * gpu.sm_count):
        found = plan_splits(problem(batch=batch, capacity=1000, head_dim=dim, head_dim_v=dim), gpu)
        each = -(-found.grid // gpu.sm_count)
        fit = gpu.smem_per_sm // (found.smem_bytes + 1024)
        most = min(fit, found.variant.blocks_per_sm)
        assert found.smem_bytes <= gpu.smem_per_block
        assert fit == each if each <= most else found.smem_bytes == found.variant.smem_bytes
    split = plan_splits(problem(batch=30, head_dim=dim, head_dim_v=dim), gpu, 4)
    assert split.smem_bytes == split.variant.smem_bytes


def test_deeper_rings_where_little_is_read() -> None:
    def ring(batch: int, dim: int = 64) -> tuple[int, int]:
        sizes: dict[str, Any] = {"head_dim": dim, "head_dim_v": dim, "capacity": 8192}
        variant = plan_splits(problem(batch=batch, **sizes), H200).variant
        return variant.stages, variant.warps

    assert (ring(1), ring(16), ring(17)) == ((3, 8), (3, 8), (1, 8))
    assert ring(1, 32) == ring(60, 32) == (3, 12)
    assert ring(1, 128) == ring(8, 128) == (2, 8)


@pytest.mark.parametrize("name", ["h200", "a100", "rtx4090"])
def test_rings_ask_for_what_is_read_at_full_speed(name: str) -> None:
    """30 KB a multiprocessor at least, and no more than a power of two that shared memory holds."""
    gpu = device.named(name)
    for dim, batch, keys in itertools.product((64, 96, 128, 192, 256), (1, 60, 900), (300, 9000)):
        sizes: dict[str, Any] = {"head_dim": dim, "head_dim_v": dim, "capacity": keys}
        found = plan_splits(problem(batch=batch, **sizes), gpu).variant
        asked = found.blocks_per_sm * found.warps * found.stages * found.bn * dim * 4
        assert 30 << 10 <= asked <= (128 << 10 if gpu.smem_per_sm >= 128 << 10 else 64 << 10)


@pytest.mark.parametrize(("dim", "keys"), [(64, 64), (128, 32), (256, 16)])
def test_one_stage_where_much_is_read(dim: int, keys: int) -> None:
    """In tiles of one page, or of several that have sixteens."""

    def ring(page_size: int = 0, **sizes: Any) -> tuple[int, int]:
        sizes |= {"head_dim": dim, "head_dim_v": dim, "capacity": 40_000}
        sizes |= {"pages": 9000 * (page_size > 0), "page_size": page_size}
        variant = plan_splits(problem(**sizes), H200).variant
        return variant.bn, variant.stages

    assert ring(batch=20) == ring(keys, batch=20) == ring(2 * keys, batch=20) == (keys, 1)
    assert ring(16, batch=20) == ring(48, batch=20) == (keys, 1)
    small = 16, 3 if dim == 64 else 2
    assert ring(keys + 8, batch=20) == small
    sizes: dict[str, Any] = {"head_dim": dim, "head_dim_v": dim, "capacity": 40_000}
    split = plan_splits(problem(batch=20, **sizes), H200, 7).variant
    assert (split.bn, split.stages) == small


@pytest.mark.parametrize(("d", "dv"), [(40, 40), (96, 96), (192, 128)])
def test_steps_of_keys(d: int, dv: int) -> None:
    """Within one, a call that is known is not planned again: its bits would depend on what was."""
    for first in range(1, 14_000, KEY_STEP):
        sizes: Any = {"batch": 132, "heads_q": 8, "heads_kv": 2, "head_dim": d, "head_dim_v": dv}
        ends = (problem(**sizes, capacity=n) for n in (first, first + KEY_STEP - 1))
        assert len({plan_splits(each, H200) for each in ends}) == 1


@pytest.mark.parametrize("rows", [1, 8, 16])
def test_with_a_number_of_splits_nothing_depends_on_the_batch(rows: int) -> None:
    sizes: dict[str, Any] = {"heads_q": 8, "seq_q": rows}
    plans = [plan_splits(problem(batch=n, **sizes), H200, 3) for n in (1, 20, 66, 132, 500)]
    assert len({found.variant for found in plans}) == 1


@pytest.mark.parametrize("name", ["h200", "a100", "rtx4090"])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_what_is_planned_fits(name: str, dtype: str) -> None:
    gpu = device.named(name)
    for dim in (32, 64, 96, 128, 192, 256):
        for batch, rows in ((1, 1), (1, 10), (60, 10), (gpu.sm_count, 1)):
            sizes = {"head_dim": dim, "head_dim_v": dim, "batch": batch, "seq_q": rows}
            found = plan_splits(problem(dtype=dtype, **sizes), gpu)
            assert found.variant.illegal(gpu) is None
            blocks = found.variant.blocks_per_sm
            assert blocks * (found.smem_bytes + 1024) <= gpu.smem_per_sm


@pytest.mark.parametrize("bn", [0, "x"])
def test_a_variant_that_cannot_be(bn: Any) -> None:
    """A problem in pages, which must be multiples of its tiles."""
    gpu, paged = device.named("h200"), problem(pages=100, page_size=16)
    variant = plan_splits(paged, gpu).variant._replace(bn=bn)
    with pytest.raises(ValueError, match=r"^kernel: "):
        plan_splits(paged, gpu, kernel=variant)


@pytest.mark.parametrize("name", ["rtx3090", "rtx4090", "rtx5090"])
def test_float32_of_all_head_dims_has_room(name: str) -> None:
    gpu, dims = device.named(name), (32, 64, 96, 128, 192, 256)
    for dim, dim_v, splits in itertools.product(dims, dims, (None, 3)):
        sizes = {"head_dim": dim, "head_dim_v": dim_v}
        found = plan_splits(problem(dtype="float32", **sizes), gpu, splits)
        assert found.variant.illegal(gpu) is None


@pytest.mark.parametrize(("batch", "sq"), [(1, 1), (16, 3), (132, 1), (300, 16)])
def test_a_window_is_planned_as_the_keys_that_it_leaves(batch: int, sq: int) -> None:
    """But for one more tile, as it may begin anywhere."""
    sizes: Any = {"batch": batch, "seq_q": sq, "head_dim": 128, "head_dim_v": 128}
    left = 4096 - sq
    whole = plan_splits(problem(capacity=4096, **sizes), H200)
    window = plan_splits(problem(capacity=131_072, left=left, **sizes), H200)
    assert "WindowLeft" in window.variant.score
    assert window.variant == whole.variant._replace(score=window.variant.score)
    assert (window.grid, window.parts) == (whole.grid, whole.parts)
    split = plan_splits(problem(capacity=131_072, left=left, **sizes), H200, 10**6)
    assert split.splits == 4096 // split.variant.bn + 1


def test_masks_that_hide_nothing_are_left_out() -> None:
    cases: list[tuple[dict[str, Any], tuple[str, ...]]] = [
        ({"left": 999}, ()),
        ({"left": 998}, ("WindowLeft",)),
        ({"left": 998, "seq_q": 2}, ("Causal", "WindowLeft")),
        ({"causal": False, "right": 0}, ()),
        ({"causal": False, "right": 1, "seq_q": 2}, ()),
        ({"causal": False, "right": 1, "seq_q": 3}, ("WindowRight",)),
        ({"softcap": 3.0, "reads": ("Alibi", "Sinks")}, ("FineSoftcap", "Alibi", "Sinks")),
    ]
    for changes, score in cases:
        assert problem(**changes).score == score


def test_sixteen_warps_are_for_plain_scores() -> None:
    def warps(**score: Any) -> int:
        return plan_splits(problem(seq_q=16, batch=64, **score), H200).variant.warps

    assert warps() == warps(left=900) == warps(reads=("Sinks",)) == 16
    assert warps(softcap=9.0) == warps(reads=("Alibi",)) == 8


def test_lengths_beyond_which_a_window_is_not_for() -> None:
    windows: list[dict[str, Any]] = [{"left": 5}, {"right": -3}]
    for window in windows:
        with pytest.raises(ValueError, match=r"^window: 1073741825 keys a sequence, or queries"):
            plan_splits(problem(capacity=2**30 + 1, heads_kv=1, **window), H200)


def test_equal_parts_may_take_as_much_longer_as_more_pieces_do() -> None:
    """A further item costs 112 KB and 27 bytes a number of O; to find pages, or to merge, more."""

    def slack(heads_q: int, seq_q: int = 1, **sizes: Any) -> int:
        sizes |= {"heads_q": heads_q, "heads_kv": 8, "head_dim": 256, "head_dim_v": 256}
        found = plan_splits(problem(seq_q=seq_q, **{"batch": 8, "capacity": 8192, **sizes}), H200)
        assert (found.variant.bn, found.grid) == (16, 132)  # tiles of 16 KB
        return found.slack

    row = 27 / 4  # KB
    assert slack(8) == int(112 + row) // 16
    assert slack(16) == int(112 + 2 * row) // 16
    assert slack(16, 8) == int(112 + 16 * row) // 16
    assert slack(16, **PAGES) == int(112 + 104 + 2 * row) // 16
    assert slack(16, batch=16) == int(112 + 52 + 2 * row) // 16  # in one part, two pieces
    assert slack(16, batch=3) == slack(16, batch=5) == slack(16)
    assert slack(16, batch=35) == int(112 + 104 + 2 * row) // 16  # of which not all are in a warp


@pytest.mark.parametrize(
    ("heads_q", "seq_q", "dim", "more"),
    [
        *((8, 1, 256, {}), (16, 1, 256, {}), (16, 8, 256, {}), (16, 1, 256, PAGES)),
        *((32, 8, 128, {}), (32, 16, 128, {}), (32, 16, 128, PAGES), (64, 8, 64, {})),
    ],
)
def test_as_how_many_tiles_the_end_of_a_unit_counts(
    heads_q: int, seq_q: int, dim: int, more: dict[str, Any]
) -> None:
    sizes: dict[str, Any] = {"heads_q": heads_q, "heads_kv": 8, "head_dim": dim, "head_dim_v": dim}
    found = plan_splits(problem(batch=8, capacity=8192, seq_q=seq_q, **sizes, **more), H200)
    price = ((112 + (104 if more else 0)) << 10) + 27 * found.rows * dim
    assert found.ends == price // (found.variant.bn * dim * 2 * 2)


def test_as_many_blocks_as_run_at_once() -> None:
    """Where equal parts are best, the device finds it."""

    def grid(batch: int, heads: int) -> tuple[int, int]:
        sizes = {"heads_q": 4 * heads, "heads_kv": heads, "head_dim": 128, "head_dim_v": 128}
        found = plan_splits(problem(batch=batch, capacity=100_000, **sizes, **PAGES), H200)
        return found.grid, found.parts

    assert [grid(16, 8), grid(8, 8), grid(4, 8), grid(13, 10)] == [(132, n) for n in (1, 2, 4, 1)]
    assert grid(1, 8) == (132, 16)


def test_how_unequal_sequences_may_be_that_no_blocks_share() -> None:
    """The longest may be as long as all items of a multiprocessor but one: others fill the time."""

    def spread(batch: int, splits: int | None = None) -> int:
        sizes = {"heads_q": 32, "heads_kv": 8, "head_dim": 128, "head_dim_v": 128}
        return plan_splits(problem(batch=batch, capacity=20_000, **sizes), H200, splits).spread

    assert spread(64) == spread(64, splits=1) == 8 * (64 * 8 - 132) // 132
    assert spread(48) == 8 * (48 * 8 - 132) // 132
    assert spread(32) == spread(1) == spread(64, splits=2) == 8


def test_ends_count_where_units_may_be_cut_anywhere() -> None:
    """Elsewhere there may be as many tiles as numbers."""
    sizes: dict[str, Any] = {"batch": 2**22, "heads_q": 32, "heads_kv": 32, "capacity": 1}
    assert (
        plan_splits(problem(**sizes), H200).ends == plan_splits(problem(**sizes), H200, 1).ends == 0
    )
    sizes |= {"batch": 2**10}
    keys = plan_splits(problem(**{**sizes, "capacity": 2**21}), H200).variant.bn
    assert plan_splits(problem(**{**sizes, "capacity": 65_000 * keys}), H200).ends > 0
    with pytest.raises(ValueError, match=r"k_cache: 32768 x 65534 tiles .* for the end of each"):
        plan_splits(problem(**{**sizes, "capacity": 65_534 * keys}), H200)
