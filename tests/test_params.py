"""params.py: a kernel's parameter is laid out as in the CUDA headers, and holds what it shall."""

from __future__ import annotations

from importlib import resources
from typing import Any

import numpy as np
import pytest

from cufa import device
from cufa.compiler import source
from cufa.features.feature import Feature
from cufa.features.part import Parameter, Part
from cufa.features.parts import PARTS
from cufa.launch.params import AttentionLayout
from cufa.planner.plan import plan_tiles
from cufa.problem.problem import Problem
from cufa.specs import decode_block
from cufa.specs.params import MAPS, PARAMS
from cufa.specs.structs import numbers_of
from cufa.specs.variant import Variant

FA2 = Variant("fa2_mma", "float16", 64, 64, 64, 64, 2, 4, 1)
FA3 = Variant("fa3_wgmma", "float16", 64, 64, 64, 64, 2, 8, 1)


def assert_holds(cupy: Any, text: str, checks: list[str], arch: str) -> None:
    """Compile what is asserted of a text."""
    nvrtc = cupy.cuda.nvrtc
    if nvrtc.getVersion() < (13, 1):
        pytest.skip("this NVRTC has no __builtin_offsetof")
    asserted = "".join(f'static_assert({check}, "{check}");\n' for check in checks)
    program = nvrtc.createProgram(text + asserted, "layout.cu", (), ())
    try:
        nvrtc.compileProgram(program, ("-std=c++17", f"-arch={arch}"))
    except nvrtc.NVRTCError:
        pytest.fail(nvrtc.getProgramLog(program))
    finally:
        nvrtc.destroyProgram(program)


def test_params_have_the_layout_of_the_header(cupy: Any) -> None:
    checks = [f"sizeof(Params) == {PARAMS.itemsize}"]
    for name, offset, dtype in numbers_of(PARAMS):
        checks.append(f"__builtin_offsetof(Params, {name}) == {offset}")
        checks.append(f"sizeof(Params{{}}.{name}) == {dtype.itemsize}")
        if dtype.kind == "f":
            checks.append(f"static_cast<decltype(Params{{}}.{name})>(0.5) != 0")
        elif dtype.kind == "i":
            checks.append(f"static_cast<decltype(Params{{}}.{name})>(-1) < 0")
    header = (resources.files("cufa.kernels") / "params.cuh").read_text()
    assert_holds(cupy, header.replace("#pragma once", ""), checks, "sm_80")
    assert FA2.parameter["params"] == PARAMS
    assert FA2.parameter.itemsize == PARAMS.itemsize


def test_tma_arguments_have_the_layout_of_the_header(cupy: Any) -> None:
    """The hardware reads maps at multiples of 64 bytes."""
    parameter = FA3.parameter
    arguments = "TmaArguments<Simple>"
    checks = [
        f"sizeof({arguments}) == {parameter.itemsize}",
        f"alignof({arguments}) == 64",
        f"__builtin_offsetof({arguments}, params) == {parameter.fields['params'][1]}",  # type: ignore[index]
        "sizeof(Simple) == sizeof(Params)",  # a score without parameters takes no place
    ]
    for name, offset, dtype in numbers_of(MAPS):
        checks.append(f"__builtin_offsetof({arguments}, maps.{name}) == {offset}")
        checks.append(f"sizeof({arguments}{{}}.maps.{name}) == {dtype.itemsize}")
    simple = "using Simple = Arguments<Score<>, Dense>;"
    assert_holds(cupy, f"{source.text('fa3_wgmma')}\n{simple}\n", checks, "sm_90a")
    assert parameter["params"] == PARAMS


def test_params_have_no_gaps() -> None:
    """Else the header could hold a field that is not set."""
    end = 0
    for name, offset, dtype in numbers_of(PARAMS):
        assert offset == end, name
        end += dtype.itemsize
    assert PARAMS.itemsize == -(-end // 8) * 8


class MadeUp(Feature):
    """A feature whose parts have parameters."""

    ARGUMENT = "made_up"
    PARTS = (
        Part("One", "made_up", (Parameter("heads_kv", "i4"),)),
        Part("Two", "made_up", (Parameter("batch", "i8"), Parameter("scale", "f4"))),
    )

    def numbers(self, call: Any) -> dict[str, float]:
        """Return numbers of the call."""
        return {"heads_kv": call.heads_kv, "batch": call.batch, "scale": call.scale}


HEADER = """
struct One : Part<One> { int heads_kv; };
struct Two : Part<Two> { long long batch; float scale; };
"""
SCORES = [(), ("One",), ("Two",), ("One", "Two"), ("Two", "Causal", "One"), ("Causal", "One")]


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> None:
    for part in MadeUp.PARTS:
        monkeypatch.setitem(PARTS, part.name, part)


@pytest.mark.usefixtures("parts")
@pytest.mark.parametrize("score", SCORES, ids=str)
def test_parts_of_a_score_follow_as_in_the_headers(cupy: Any, score: tuple[str, ...]) -> None:
    """In their order; one takes the padding at the end of another."""
    checks = []
    for variant, arguments in ((FA2, "Own"), (FA3, "TmaArguments<Own>")):
        dtype = variant._replace(score=score).parameter
        checks.append(f"sizeof({arguments}) == {dtype.itemsize}")
        start = dict((name, at) for name, at, _ in numbers_of(dtype))["params.q.data"]
        for name, offset, _ in numbers_of(dtype):
            part, _, member = name.partition(".")
            if part in score:
                checks.append(f"__builtin_offsetof(Own, {member}) == {offset - start}")
    own = f"using Own = Arguments<Score<{', '.join(score)}>, Dense>;"
    text = f"{source.text('fa3_wgmma')}\n{HEADER}{own}\n"
    assert_holds(cupy, text, checks, "sm_90a")


@pytest.mark.usefixtures("cupy", "parts")
@pytest.mark.parametrize("variant", [FA2, FA3], ids=["fa2_mma", "fa3_wgmma"])
@pytest.mark.parametrize("score", SCORES, ids=str)
def test_what_is_filled_in(variant: Variant, score: tuple[str, ...]) -> None:
    """All numbers behind tensor maps, and nothing behind them."""
    problem = Problem("float16", 3, 8, 2, 5, 777, 64, 56, 0.3)
    chosen = plan_tiles(problem, device.named("h200"), variant)
    strides = ((64, 32, 16, 2), (640, 0, 160, 2), (48, -96, 16, 2), (80, 800, 8000, 2))
    variant = variant._replace(score=score)
    layout, dtype = AttentionLayout(variant), variant.parameter
    problem = problem._replace(features=(MadeUp(),))
    content = layout.of_call(layout.of_plan(chosen, problem), problem, strides)
    assert layout.start == ("maps" in (dtype.names or ())) * MAPS.itemsize
    assert layout.start + len(content) == dtype.itemsize

    def found() -> np.void:
        return np.frombuffer(bytes(layout.start) + content, dtype)[0]

    for name, own in zip("qkvo", strides, strict=True):
        assert found()["params"][name].tolist() == (0, *(step // 2 for step in own[:3]))
    assert [found()["params"][name] for name in ("lse", "workspace", "tiles_drawn")] == [0, 0, 0]
    assert found()["params"]["scale_log2"] == pytest.approx(0.3 * 1.442695)
    expected = {"seq_q": 5, "seq_kv": 777, "head_dim": 64, "head_dim_v": 56}
    expected |= {"heads": 3 * 8 // chosen.pack, "heads_q": 8 // chosen.pack}
    expected |= {"group": 4 // chosen.pack, "pack_log2": chosen.pack.bit_length() - 1}
    expected |= {name: getattr(chosen, name) for name in ("q_tiles", "section_heads", "late_rows")}
    of_parts = {"One": (2,), "Two": (3, pytest.approx(0.3))}
    assert {name: found()["params"][name] for name in expected} == expected
    for part in set(score) & set(of_parts):
        assert found()[part].tolist() == of_parts[part]


FIRSTS = {
    "Softcap": "softcap_log2",
    "Alibi": "alibi_slopes",
    "WindowLeft": "window_left",
    "WindowRight": "window_right",
    "Sinks": "sinks",
}
"""The first member of each part, in C++."""


@pytest.mark.parametrize("kv", ["Contiguous", "Paged"])
@pytest.mark.parametrize(
    "score",
    [
        (),
        ("WindowLeft",),
        ("Softcap", "Causal"),
        ("Sinks",),
        ("Causal", "WindowLeft", "Sinks"),
        ("Softcap", "Alibi", "WindowLeft", "WindowRight", "Sinks"),
    ],
    ids=str,
)
def test_decode_arguments_have_the_layout_of_the_headers(
    cupy: Any, score: tuple[str, ...], kv: str
) -> None:
    variant = Variant("decode", "float16", 64, 64, 16, 16, 2, 8, 1, score=score, kv=kv)
    dtype = variant.parameter
    checks = [f"sizeof(Own) == {dtype.itemsize}"]
    for name, offset, number in numbers_of(decode_block.PARAMS):
        checks.append(f"__builtin_offsetof(Own, {name}) == {offset}")
        checks.append(f"sizeof(Own{{}}.{name}) == {number.itemsize}")
    firsts = {part: FIRSTS[part] for part in score if part in FIRSTS}
    firsts |= {"kv": "block_table"} if kv == "Paged" else {}
    assert dtype.names == ("params", *firsts)
    for field, member in firsts.items():
        offset = dtype.fields[field][1]  # type: ignore[index]
        checks.append(f"__builtin_offsetof(Own, {member}) == {offset}")
    own = f"using Own = DecodeArguments<Score<{', '.join(score)}>, {kv}>;"
    assert_holds(cupy, f"{source.text('decode')}\n{own}\n", checks, "sm_80")
