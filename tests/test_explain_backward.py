"""`explain_backward`, `explain --backward` and `compile --backward`: plans of gradients."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from played_gpu import on_gpu
from test_cli import fields
from test_cli_compile import Builder, Captured, builder

import cufa
from cufa import cli, device
from cufa.planner.backward import backward_plan
from cufa.planner.backward_model import explained, flops
from cufa.problem.problem import Problem
from cufa.specs import BACKWARD_KERNELS

H200 = device.named("h200")
__all__ = ["builder"]  # a fixture


def problem(b: int, h: int, s: int, d: int, **options: Any) -> Problem:
    return Problem.of_shapes(*[(b, h, s, d)] * 3, dtype="bfloat16", **options)


# the model


def test_operations() -> None:
    """Five products of the pairs that are seen, and half a tile along each edge."""
    assert flops(problem(2, 3, 100, 64)) == 10 * 2 * 3 * 100 * 100 * 64
    causal = problem(2, 3, 100, 64, causal=True)
    assert flops(causal) == 10 * 2 * 3 * 5050 * 64
    assert flops(causal, 16, 32) == 10 * 2 * 3 * (5050 + 100 * 24) * 64
    window = problem(1, 1, 100, 64, causal=True, window=(9, None))
    assert flops(window) == 10 * (100 * 10 - 45) * 64
    packed = problem(1, 3, 200, 64, causal=True)._replace(kv="Varlen", sequences=2)
    assert flops(packed) == flops(causal)


def test_expected_times() -> None:
    """Large problems take their operations at the kernel's rate, and sums their bytes."""
    large = problem(1, 16, 16384, 128)
    plan = explained(large, H200, "qkv", deterministic=False)
    before, products, after = plan.expected_us
    rate = BACKWARD_KERNELS[plan.variant.kernel].rate(128) or 0.0
    assert products == pytest.approx(flops(large) / rate / 1e6, rel=0.06)
    assert before + after == pytest.approx(133, rel=0.05)
    half = explained(large.having(*problem(1, 1, 8, 128, causal=True).features), H200, "qkv", False)
    assert half.expected_us[1] == pytest.approx(products / 2, rel=0.06)
    # A block alone leaves the other multiprocessors idle.
    one, many = (explained(problem(1, h, 64, 128), H200, "qkv", False) for h in (1, 132))
    assert sum(many.expected_us) < 3 * sum(one.expected_us)


def test_time_of_what_adds_up_parts() -> None:
    """The parts of two blocks, for 64 query heads on 8 K/V heads, and both gradients."""
    shapes = (1, 64, 2048, 128), (1, 8, 2048, 128), (1, 8, 2048, 128)
    given = Problem.of_shapes(*shapes, dtype="bfloat16", causal=True)
    plan = explained(given, H200, "qkv", deterministic=False)
    join = [step.instance.kernel for step in plan.steps].index("bwd_join")
    moved = (2 * 4 + 2) * 2 * 8 * 2048 * 128
    assert plan.expected_us[join] == pytest.approx(2 + moved / 3.5e6)


def test_all_but_the_times_is_the_plan() -> None:
    grouped = Problem.of_shapes(
        *((1, 8, 500, 64), (1, 2, 500, 64), (1, 2, 500, 64)), dtype="float16"
    )
    for given in (problem(2, 4, 300, 72, causal=True), problem(1, 2, 64, 256), grouped):
        plan = explained(given, H200, "qkv", deterministic=True)
        expected = backward_plan(given._replace(returns_lse=True), H200, "qkv", True)
        assert plan._replace(expected_us=()) == expected
        assert len(plan.expected_us) == len(plan.steps)


@pytest.mark.parametrize("kernel", BACKWARD_KERNELS)
def test_all_head_dims_have_a_rate(kernel: str) -> None:
    spec = BACKWARD_KERNELS[kernel]
    assert all(spec.rate(d) for table in spec.tile_tables.values() for d, _ in table)


# the function


def test_numpy_arrays() -> None:
    q = np.ones((2, 4, 30, 8), np.float32)
    assert "numpy" in str(cufa.explain_backward(q, q, q, causal=True))
    with pytest.raises(ValueError, match="wrt"):
        cufa.explain_backward(q, q, q, wrt=("z",))
    with pytest.raises(TypeError, match="deterministic"):
        cufa.explain_backward(q, q, q, deterministic=1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="seed is needed with dropout_p"):
        cufa.explain_backward(q, q, q, dropout_p=0.1)
    assert "numpy" in str(cufa.explain_backward(q, q, q, dropout_p=0.1, seed=3))
    with pytest.raises(ValueError, match="score_mod must be a function for NumPy arrays"):
        cufa.explain_backward(q, q, q, score_mod="score * 2")
    with pytest.raises(TypeError, match="score_mod cannot be traced"):
        cufa.explain_backward(q, q, q, score_mod=lambda s, b, h, i, j: s if i > j else -s)


@pytest.mark.usefixtures("gpu")
def test_arrays_of_a_gpu() -> None:
    q, k = (on_gpu(np.zeros((2, h, 300, 128), np.float16)) for h in (4, 2))
    plan: Any = cufa.explain_backward(q, k, k, causal=True, scale=-0.1, deterministic=True)
    names = [step.instance.kernel for step in plan.steps]
    assert (names[0], names[-1]) == ("bwd_prepare", "bwd_finish")
    assert plan.turns >= 0
    assert all(us > 0 for us in plan.expected_us)
    assert "\n" not in str(plan)
    assert str(plan).endswith(f"workspace={4 * plan.workspace_words}")
    of_keys: Any = cufa.explain_backward(q, k, k, wrt=("k",))
    assert "bwd_finish" not in str(of_keys)
    nothing: Any = cufa.explain_backward(q[:0], k[:0], k[:0])
    assert (nothing.steps, nothing.expected_us, nothing.workspace_words) == ((), (), 0)
    bias = on_gpu(np.zeros((300, 300), np.float16))
    of_bias: Any = cufa.explain_backward(q, k, k, bias=bias, wrt=("bias",))
    assert [sums.lengths for sums in of_bias.arrays.sums] == [(1, 1, 300, 300)]
    assert [step.instance.kernel for step in of_bias.steps] == ["bwd_prepare", "bwd_mma"]
    table = on_gpu(np.zeros(300, np.float32))
    of_table: Any = cufa.explain_backward(
        *(q, k, k), score_mod=lambda s, b, h, i, j: s + table[j] * table.shape[0], wrt=("table",)
    )
    assert [sums.lengths for sums in of_table.arrays.sums] == [(1, 1, 1, 300)]


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("factor", [None, 2])
def test_an_array_that_a_function_refers_to_alone(factor: int | None) -> None:
    """Its gradient is 0: nothing is added up."""
    x, table = on_gpu(np.zeros((1, 2, 30, 32), np.float16)), on_gpu(np.zeros(30, np.float32))

    def scaled(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score if factor is None else score * factor if table is not None else 0

    plan: Any = cufa.explain_backward(x, x, x, score_mod=scaled, wrt=("table",))
    assert plan.arrays.sums == ()


# the commands


def test_explain(capsys: Captured) -> None:
    words = ["explain", "--q", "4,32,4096,128", "--k", "4,8,4096,128", "--dtype", "bfloat16"]
    assert cli.main([*words, "--causal", "--backward", "--deterministic", "--gpu", "a100"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    given = Problem.of_shapes(
        *((4, 32, 4096, 128), (4, 8, 4096, 128), (4, 8, 4096, 128)), dtype="bfloat16", causal=True
    )
    plan = explained(given, device.named("a100"), "qkv", deterministic=True)
    for number, step in enumerate(plan.steps, 1):
        assert f"launch {number}         {step.instance}\n" in out
        assert f"{step.grid} blocks of {step.threads} threads\n" in out
    assert "gradients of q, k, v; bfloat16, batch 4, heads 32/8, seq 4096" in out
    found = fields(out)
    assert found["bm"] == str(plan.variant.bm)
    assert found["workspace"] == str(4 * plan.workspace_words)
    assert found["registers"] == "at"
    assert "in a fixed order" in out
    assert out.rstrip().endswith(f"{sum(plan.expected_us):.1f} us on an H200")


def test_explain_gradients_of_sinks(capsys: Captured) -> None:
    words = ["explain", "--q", "1,8,100,64", "--array", "sinks", "--backward", "--gpu", "h200"]
    assert cli.main(words) == 0
    out, _ = capsys.readouterr()
    assert "gradients of q, k, v, sinks; " in out
    assert "bwd_sinks<" in out


@pytest.mark.parametrize("lengths", ["", "varlen"])
def test_compile(builder: Builder, lengths: str) -> None:
    words = ["compile", "--gpu", "a100", "--for", "2,8,300,64", "--dtype", "float16", "--backward"]
    words += ["--lengths", lengths] if lengths else []
    assert cli.main([*words, "--array", "sinks"]) == 0
    kernels = [each.kernel for each in builder.asked]
    # The products once for each mask; what comes before and after is the same.
    assert sorted(kernels) == [
        *("bwd_finish", "bwd_mma", "bwd_mma", "bwd_prepare", "bwd_sinks", "fa2_mma", "fa2_mma")
    ]
    assert {each.kv for each in builder.asked} == {"Varlen" if lengths else "Dense"}
    assert cli.main([*words, "--array", "sinks"]) == 0
    assert builder.asked == []


def test_compile_for_both_passes(builder: Builder) -> None:
    """The forward pass of a gradient has the log-sum-exp."""
    words = ["compile", "--gpu", "a100", "--for", "1,8,64,32", "--dtype", "bfloat16", "--causal"]
    words += ["--softcap", "30"]
    assert cli.main([*words, "--return-lse"]) == 0
    (with_lse,) = builder.asked
    assert cli.main([*words, "--backward"]) == 0
    assert with_lse not in builder.asked
    assert {each.kernel for each in builder.asked} == {"bwd_prepare", "bwd_mma", "bwd_finish"}


@pytest.mark.usefixtures("gpu")
def test_a_call_takes_what_was_compiled(builder: Builder) -> None:
    words = ["compile", "--gpu", "h200", "--for", "2,4,100,64", "--dtype", "float16", "--backward"]
    assert cli.main([*words, "--causal"]) == 0
    q = on_gpu(np.zeros((2, 4, 100, 64), np.float16))
    plan: Any = cufa.explain_backward(q, q, q, causal=True)
    assert {step.instance for step in plan.steps} <= set(builder.asked)
