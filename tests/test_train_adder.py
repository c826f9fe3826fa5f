"""Training without a framework: gradients of each layer, AdamW, and small runs of the script."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import adder
import ml_dtypes
import numpy as np
import pytest
import train_adder
from llama import Llama, Tokenizer
from llama.train import (
    IGNORED,
    AdamW,
    Parameter,
    Parameters,
    Sizes,
    TrainedLlama,
    clip,
    cross_entropy,
    learning_rate,
)
from llama.train.attention import Attention
from llama.train.embedding import Embedding
from llama.train.linear import Linear
from llama.train.norm import RMSNorm
from llama.train.perceptron import Perceptron
from llama.train.rotary import Rotary
from models import FileError, choose_array_module
from safetensors.numpy import load_file

import cufa

FOLDER = Path(__file__).resolve().parent.parent / "scripts" / "data" / "adder"

DOUBLE = np.dtype(np.float64)

SMALL = Sizes(
    vocabulary=len(adder.VOCABULARY),
    hidden=20,
    inner=24,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=6,
    positions=adder.LENGTH,
)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(11)


@pytest.fixture
def in_double(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let attention be its formula, in the dtype of its arguments: cufa's is at most float32."""
    monkeypatch.setattr(cufa, "attention", formula)
    monkeypatch.setattr(cufa, "attention_backward", formula_backward)


def weights_of(q: np.ndarray, k: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return causal softmax weights, (b, hq, s, s), and the logarithms of their sums."""
    scores = q @ k.repeat(q.shape[1] // k.shape[1], axis=1).swapaxes(-1, -2) * q.shape[-1] ** -0.5
    scores[..., ~np.tri(q.shape[2], dtype=bool)] = -np.inf
    lse = np.log(np.exp(scores).sum(axis=-1))
    return np.exp(scores - lse[..., None]), lse


def formula(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, *, causal: bool, out: np.ndarray, return_lse: bool
) -> tuple[np.ndarray, np.ndarray]:
    assert causal
    assert return_lse
    weights, lse = weights_of(q, k)
    out[...] = weights @ v.repeat(q.shape[1] // k.shape[1], axis=1)
    return out, lse


def formula_backward(
    dout: np.ndarray,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    out: np.ndarray,
    lse: np.ndarray,
    *,
    causal: bool,
    dq: np.ndarray,
    dk: np.ndarray,
    dv: np.ndarray,
    deterministic: bool,
) -> None:
    assert causal
    assert deterministic
    weights, sums = weights_of(q, k)
    assert np.array_equal(sums, lse)
    group = q.shape[1] // k.shape[1]
    keys, values = (x.repeat(group, axis=1) for x in (k, v))
    slopes = weights * (dout @ values.swapaxes(-1, -2) - (dout * out).sum(-1, keepdims=True))
    slopes *= q.shape[-1] ** -0.5
    of_keys, of_values = slopes.swapaxes(-1, -2) @ q, weights.swapaxes(-1, -2) @ dout
    dq[...] = slopes @ keys
    for shared, each in ((dk, of_keys), (dv, of_values)):
        shared[...] = each.reshape(len(q), -1, group, *each.shape[2:]).sum(2)


def parameter(rng: np.random.Generator, *shape: int) -> Parameter:
    return Parameter(rng.standard_normal(shape), np.full(shape, np.nan))


def check_gradient(loss: Callable[[], float], values: np.ndarray, gradient: np.ndarray) -> None:
    """Compare the gradient of a loss by `values` with central differences."""
    found = np.empty(values.shape)
    for place in np.ndindex(values.shape):
        held, step = values[place], 1e-5
        values[place] = held + step
        above = loss()
        values[place] = held - step
        found[place] = (above - loss()) / (2 * step)
        values[place] = held
    assert np.abs(gradient).max() > 1e-3
    np.testing.assert_allclose(gradient, found, rtol=1e-6, atol=1e-8 * np.abs(found).max())


def check_layer(
    rng: np.random.Generator,
    forward: Callable[[], np.ndarray],
    backward: Callable[[np.ndarray], Any],
    x: np.ndarray | None,
    parameters: Sequence[Parameter],
) -> None:
    """Compare all gradients of a layer, of a weighted sum of its output, with differences."""
    shares = rng.standard_normal(forward().shape)

    def loss() -> float:
        return float((forward() * shares).sum())

    dx = backward(shares)
    for each in parameters:
        check_gradient(loss, each.value, each.gradient)
    if x is not None:
        check_gradient(loss, x, dx)


def test_gradients_of_a_matrix(rng: np.random.Generator) -> None:
    weight, x = parameter(rng, 5, 4), rng.standard_normal((7, 4))
    layer = Linear(weight)
    check_layer(rng, lambda: layer.forward(x), layer.backward, x, [weight])


def test_gradients_of_a_norm(rng: np.random.Generator) -> None:
    weight, x = parameter(rng, 6), rng.standard_normal((5, 6))
    layer = RMSNorm(weight, 1e-2)
    check_layer(rng, lambda: layer.forward(x), layer.backward, x, [weight])


def test_gradients_of_a_perceptron(rng: np.random.Generator) -> None:
    gate_up, down, x = parameter(rng, 10, 4), parameter(rng, 4, 5), rng.standard_normal((6, 4))
    layer = Perceptron(Linear(gate_up), Linear(down))
    check_layer(rng, lambda: layer.forward(x), layer.backward, x, [gate_up, down])


def test_gradients_of_an_embedding(rng: np.random.Generator) -> None:
    weight, ids = parameter(rng, 7, 3), np.array([4, 0, 4, 6, 1], np.int32)
    weight.gradient[...] = 0.0
    layer = Embedding(weight)
    check_layer(rng, lambda: layer.forward(ids), layer.backward, None, [weight])
    weight.gradient[...] = 10.0
    layer.backward(np.ones((5, 3)))  # adds to what is there
    assert np.array_equal(weight.gradient[:, 0], [11, 11, 10, 10, 12, 10, 11])


def test_gradients_of_a_rotation(rng: np.random.Generator) -> None:
    rotary, x = Rotary(SMALL, np, DOUBLE), rng.standard_normal((2, 3, 5, 6))
    turned = np.empty_like(x)
    rotary.turn(x, out=turned)
    assert np.array_equal(turned[:, :, 0], x[:, :, 0])
    frequencies = 10000.0 ** -(np.arange(3) / 3)
    complex_numbers = x[..., :3] + 1j * x[..., 3:]
    complex_numbers *= np.exp(1j * np.arange(5)[:, None] * frequencies)
    expected = np.concatenate([complex_numbers.real, complex_numbers.imag], axis=-1)
    np.testing.assert_allclose(turned, expected, rtol=1e-12, atol=1e-14)

    def forward() -> np.ndarray:
        out = np.empty_like(x)
        rotary.turn(x, out=out)
        return out

    def backward(dy: np.ndarray) -> np.ndarray:
        dx = dy.copy()
        rotary.turn(dx, out=dx, back=True)
        return dx

    check_layer(rng, forward, backward, x, [])


@pytest.mark.usefixtures("in_double")
def test_gradients_of_attention(rng: np.random.Generator) -> None:
    qkv, output = parameter(rng, 8 * 6, 5), parameter(rng, 5, 4 * 6)
    x = rng.standard_normal((2 * 4, 5))
    layer = Attention(Linear(qkv), Linear(output), Rotary(SMALL, np, DOUBLE), SMALL)
    check_layer(rng, lambda: layer.forward(x, batch=2), layer.backward, x, [qkv, output])


def test_gradients_of_the_loss(rng: np.random.Generator) -> None:
    logits, targets = rng.standard_normal((6, 4)), np.array([3, IGNORED, 0, 1, IGNORED, 3])
    loss, gradient = cross_entropy(logits, targets)
    counted = [i for i, target in enumerate(targets) if target != IGNORED]
    shares = [np.exp(logits[i, targets[i]]) / np.exp(logits[i]).sum() for i in counted]
    assert loss == pytest.approx(-np.log(shares).mean(), rel=1e-12)
    check_gradient(lambda: float(cross_entropy(logits, targets)[0]), logits, gradient)
    assert not gradient[[1, 4]].any()


def test_loss_of_logits_that_no_exponential_takes() -> None:
    loss, gradient = cross_entropy(np.array([[1e4, 0.0]], np.float32), np.array([1], np.int32))
    assert loss == 1e4
    assert np.array_equal(gradient, [[1, -1]])


def step_of(model: TrainedLlama, pairs: np.ndarray) -> float:
    """Write the gradients of a model for sums; return the loss."""
    ids, targets = map(model.xp.asarray, adder.lines(pairs, IGNORED))
    loss, gradient = cross_entropy(model.forward(ids), targets.reshape(-1))
    model.backward(gradient)
    return float(loss)


@pytest.mark.usefixtures("in_double")
def test_gradients_of_the_model(rng: np.random.Generator) -> None:
    model = TrainedLlama(SMALL, np, rng, DOUBLE)
    pairs = adder.draw(rng, 3, held_out=False)
    step_of(model, pairs)
    gradients, values = model.parameters.gradients.copy(), model.parameters.values
    held, step = values.copy(), 1e-4
    for name, tensor in model.parameters.tensors().items():
        # Along a random direction in each tensor.
        direction = np.zeros_like(values)
        start = (tensor.ctypes.data - values.ctypes.data) // values.itemsize
        direction[start : start + tensor.size] = rng.standard_normal(tensor.size)
        ends = []
        for sign in (1, -1):
            values[...] = held + sign * step * direction
            ends.append(step_of(model, pairs))
        values[...] = held
        slope = (ends[0] - ends[1]) / (2 * step)
        assert gradients @ direction == pytest.approx(slope, rel=1e-5, abs=1e-8), name


def test_gradients_with_the_attention_of_cufa(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    pairs = adder.draw(rng, 7, held_out=False)
    single = TrainedLlama(SMALL, np, np.random.default_rng(5))
    loss = step_of(single, pairs)
    monkeypatch.setattr(cufa, "attention", formula)
    monkeypatch.setattr(cufa, "attention_backward", formula_backward)
    double = TrainedLlama(SMALL, np, np.random.default_rng(5), DOUBLE)
    assert loss == pytest.approx(step_of(double, pairs), rel=1e-6)
    expected = double.parameters.gradients
    scale = np.abs(expected).max()
    np.testing.assert_allclose(single.parameters.gradients, expected, atol=1e-6 * scale)


def test_parameters_are_views_of_one_array() -> None:
    shapes = {"a": (2, 3), "b": (4, 3), "c": (3,), "d": (1, 3)}
    parameters = Parameters(shapes, np, DOUBLE, np.random.default_rng(0))
    assert parameters.values.shape == (24,)
    assert {name: x.shape for name, x in parameters.tensors().items()} == shapes
    assert np.array_equal(parameters["c"].value, np.ones(3))
    both = parameters.stacked(["a", "b"])
    assert both.value.shape == (6, 3)
    both.gradient[...] = 1
    assert parameters.gradients.sum() == 18
    with pytest.raises(ValueError, match=r"^parameters do not follow each other: a, d$"):
        parameters.stacked(["a", "d"])


def test_adamw_is_its_formula(rng: np.random.Generator) -> None:
    parameters = Parameters({"x": (3, 2)}, np, DOUBLE, rng)
    optimizer = AdamW(parameters, betas=(0.8, 0.9), decay=0.1, eps=1e-6)
    x, mean, square = parameters.values.copy(), np.zeros(6), np.zeros(6)
    for t in range(1, 5):
        g = rng.standard_normal(6)
        parameters.gradients[...] = g
        optimizer.step(0.05 * t)
        mean, square = 0.8 * mean + 0.2 * g, 0.9 * square + 0.1 * g**2
        change = mean / (1 - 0.8**t) / (np.sqrt(square / (1 - 0.9**t)) + 1e-6)
        x -= 0.05 * t * (change + 0.1 * x)
        np.testing.assert_allclose(parameters.values, x, rtol=1e-12)


def test_gradients_are_clipped_to_a_norm() -> None:
    long, short = np.array([3.0, 4.0]), np.array([0.3, 0.4])
    clip(long, 1.0)
    clip(short, 1.0)
    np.testing.assert_allclose(long, [0.6, 0.8], rtol=1e-6)
    assert np.array_equal(short, [0.3, 0.4])


def test_learning_rates() -> None:
    rates = [learning_rate(step, 400, 2.0) for step in range(1, 401)]
    assert rates[4] == 1.0  # halfway through the warm-up
    assert max(rates) == rates[9]
    assert rates[199] == pytest.approx(1.0)
    assert rates[-1] == pytest.approx(0.02)
    assert rates[9:] == sorted(rates[9:], reverse=True)
    assert learning_rate(1, 1, 2.0) == 0.02


def test_lines() -> None:
    ids, targets = adder.lines(np.array([[47, 285], [9999, 9999]]), IGNORED)
    tokens = {i: token for token, i in adder.VOCABULARY.items()}
    texts = ["".join(tokens[i] for i in row) for row in ids.tolist()]
    assert texts[0] == "<s>47+285=233 332" + "</s>" * 8
    assert texts[1] == "<s>9999+9999=89991 19998</s>"
    answers = [[tokens[i] for i in row if i != IGNORED] for row in targets.tolist()]
    assert answers[0] == [*"233 332", "</s>"]
    assert answers[1] == [*"89991 19998", "</s>"]
    assert np.flatnonzero(targets[0] != IGNORED).tolist() == list(range(7, 15))
    assert ids.shape == targets.shape == (2, adder.LENGTH)
    assert ids.dtype == targets.dtype == np.int32


@pytest.fixture(params=["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def xp(request: pytest.FixtureRequest) -> Any:
    return choose_array_module(request.param)


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let training be of numbers of one digit, and measure little."""
    monkeypatch.setattr(adder, "DIGITS", 1)
    monkeypatch.setattr(train_adder, "EVERY", 40)
    monkeypatch.setattr(train_adder, "CHECKED", 50)


def trained(xp: Any, steps: int = 60) -> tuple[TrainedLlama, train_adder.History]:
    """Train a small model; the same one each time."""
    sizes = replace(SMALL, hidden=32, inner=64, heads=2, kv_heads=1, head_dim=16)
    model = TrainedLlama(sizes, xp, np.random.default_rng(3))
    return model, train_adder.train(model, steps, batch=16, rate=1e-2, seed=4)


@pytest.mark.usefixtures("short")
def test_loss_falls_and_a_run_can_be_repeated(xp: Any, capsys: pytest.CaptureFixture[str]) -> None:
    model, history = trained(xp)
    assert history.losses[0] == pytest.approx(math.log(len(adder.VOCABULARY)), rel=0.1)
    assert history.losses[-5:].mean() < 0.5 * history.losses[0]
    assert [step for step, _ in history.checks] == [40, 60]
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].split()[0] == "60"
    assert f"loss {history.losses[-1]:.4f}" in lines[-1]
    again, repeated = trained(xp)
    assert np.array_equal(history.losses, repeated.losses)
    assert (model.parameters.values == again.parameters.values).all()


@pytest.mark.gpu
@pytest.mark.usefixtures("short")
def test_a_gpu_trains_as_the_cpu_does() -> None:
    (_, on_cpu), (_, on_gpu) = (
        trained(choose_array_module(device), 20) for device in ("cpu", "gpu")
    )
    np.testing.assert_allclose(on_gpu.losses, on_cpu.losses, rtol=1e-3)


def test_the_script_saves_what_the_shipped_folder_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(train_adder, "CHECKED", 50)
    monkeypatch.setattr(train_adder, "MEASURED", 60)
    folder = tmp_path / "new" / "adder"
    arguments = [str(folder), "--steps", "2", "--batch", "4", "--device", "cpu"]
    assert train_adder.main(arguments) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("333,888 parameters, on numpy arrays\n")
    assert "sums held out, in bfloat16: 0.000%" in printed
    shipped = {path.name for path in FOLDER.iterdir()} - {"README.md"}
    assert {path.name for path in folder.iterdir()} == shipped | {"loss.png"}
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        assert json.loads((folder / name).read_text()) == json.loads((FOLDER / name).read_text())
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    line = adder.prompt(47, 285) + adder.answer(47, 285)
    ids = Tokenizer(folder).encode(line)
    assert np.array_equal(ids, Tokenizer(FOLDER).encode(line))
    # Generation computes with what was saved as training does.
    saved = load_file(folder / "model.safetensors")
    again = TrainedLlama(train_adder.SIZES, np, np.random.default_rng(0))
    tensors = again.parameters.tensors()
    assert tensors.keys() == saved.keys()
    for name, value in tensors.items():
        assert saved[name].dtype == ml_dtypes.bfloat16
        value[...] = saved[name]
    rows, model = np.asarray(ids, np.int32)[None], Llama(folder, "cpu")
    logits = model.logits(model.extend(model.cache([len(ids)]), rows)[0])
    np.testing.assert_allclose(again.forward(rows), logits, atol=1e-5)


@pytest.mark.parametrize("package", train_adder.PACKAGES)
def test_missing_packages_name_the_command(
    package: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    assert train_adder.main([str(tmp_path / "adder")]) == 2
    assert capsys.readouterr().err == (
        f"train_adder.py: the package {package} is not installed: "
        'pip install ".[train]" in a clone of cufa\n'
    )
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("option", ["--steps", "--batch", "--rate"])
def test_options_that_are_not_positive(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        train_adder.main(["folder", option, "0"])
    assert f"argument {option}: 0 is not positive and finite" in capsys.readouterr().err


def test_a_seed_that_is_negative(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        train_adder.main(["folder", "--seed", "-1"])
    assert "argument --seed: -1 is negative" in capsys.readouterr().err


def test_folders_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(FileError, match=r"^cannot make the folder .*file/adder: Not a directory$"):
        train_adder.make_folder(tmp_path / "file" / "adder")
    monkeypatch.setattr("os.access", lambda *_: False)
    with pytest.raises(FileError, match=r"^cannot write to the folder .*: give one that"):
        train_adder.make_folder(tmp_path)
