"""The decoders of scripts/llama: against recorded logits of transformers, and damaged folders."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llama_folders
import ml_dtypes
import numpy as np
import pytest
from llama import Llama, Prompt, Settings, generate, mxfp4, ops
from llama.config import read_config
from llama.ops import gated, rms_norm
from models import DTYPES, ModelError
from safetensors.numpy import load_file, save_file

import cufa

RECORDED = np.load(Path(__file__).parent / "data" / "llama" / "logits.npz")
TOKENS = llama_folders.TOKENS


@pytest.fixture(params=["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    return request.param


def as_numpy(array: Any) -> np.ndarray:
    return array if isinstance(array, np.ndarray) else array.get()


def logits(model: Llama, tokens: np.ndarray, steps: list[int]) -> np.ndarray:
    """Return the logits of all tokens, which pass the network in `steps`."""
    cache = model.cache([tokens.shape[1]] * len(tokens))
    found, start = [], 0
    for count in steps:
        ids = model.xp.asarray(tokens[:, start : start + count])
        states = model.extend(cache, ids)
        flat = model.logits(states.reshape(-1, states.shape[-1]))
        found.append(as_numpy(flat).reshape(len(tokens), count, -1))
        start += count
    return np.concatenate(found, axis=1)


@pytest.mark.parametrize("name", llama_folders.CONFIGS)
@pytest.mark.parametrize("steps", [[40], [1] * 40, [17, 1, 22]], ids=["whole", "singly", "parts"])
def test_logits_are_those_of_transformers(
    tmp_path: Path, device: str, name: str, steps: list[int]
) -> None:
    llama_folders.write(tmp_path, name)
    found = logits(Llama(tmp_path, device), TOKENS, steps)
    assert found.dtype == np.float32
    assert np.abs(found - RECORDED[name]).max() < 3e-5


@pytest.mark.parametrize(("dtype", "tolerance"), [("float16", 0.03), ("bfloat16", 0.2)])
@pytest.mark.parametrize("name", llama_folders.CONFIGS)
def test_16_bit_dtypes(
    tmp_path: Path, device: str, name: str, dtype: str, tolerance: float
) -> None:
    llama_folders.write(tmp_path, name)
    model = Llama(tmp_path, device, dtype)
    found = logits(model, TOKENS, [40])
    errors = np.abs(found - RECORDED[name]).max(axis=-1)
    assert 1e-5 < np.median(errors) < tolerance / 2  # it does round
    # Rounding may lead a token to other experts.
    assert (errors >= tolerance).sum() <= (5 if model.config.experts else 0)


def test_gpt_oss_reaches_what_its_gate_cuts_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llama_folders.write(tmp_path, "gpt-oss")
    monkeypatch.setattr(ops, "_LIMIT", np.float32(70))
    found = logits(Llama(tmp_path, "cpu"), TOKENS, [40])
    assert np.abs(found - RECORDED["gpt-oss"]).max() > 0.1


def test_mxfp4(xp: Any) -> None:
    blocks = np.arange(256, dtype=np.uint8).reshape(2, 8, 1, 16)
    scales = np.array([*range(15), 250], np.uint8).reshape(2, 8, 1)
    found = as_numpy(mxfp4.unpacked(xp.asarray(blocks), xp.asarray(scales)))
    assert found.shape == (2, 8, 32)
    for matrix, row, number in np.ndindex(*found.shape):
        byte = int(blocks[matrix, row, 0, number // 2])
        bits = byte >> 4 if number % 2 else byte & 15
        # A sign, two bits of an exponent of bias 1, and one of the mantissa (e2m1).
        exponent, mantissa = bits >> 1 & 3, bits & 1
        magnitude = (1 + mantissa / 2) * 2 ** (exponent - 1) if exponent else mantissa / 2
        power = 2.0 ** (int(scales[matrix, row, 0]) - 127)
        exact = (-1) ** (bits >> 3) * magnitude * power
        # CuPy's kernels take what is below float32's normal numbers, powers too, for 0
        is_tiny = min(power, abs(exact)) < 2.0**-126
        right = (exact, 0.0) if is_tiny and xp is not np else (exact,)
        assert found[matrix, row, number] in right
    assert not np.isfinite(mxfp4.unpacked(blocks, np.full_like(scales, 255)).astype(float)).any()


def test_packed_tensors_are_bytes(tmp_path: Path) -> None:
    weights = llama_folders.write(tmp_path, "gpt-oss-mxfp4")
    name = "model.layers.1.mlp.experts.down_proj_scales"
    save_file({**weights, name: weights[name].astype(np.float32)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=rf"{name} is of type F32, .* \(U8 are\)"):
        Llama(tmp_path, "cpu")


@pytest.mark.parametrize("stored", DTYPES)
@pytest.mark.parametrize("name", ["llama3", "gpt-oss"])
def test_checkpoints_of_each_dtype(tmp_path: Path, name: str, stored: str) -> None:
    weights = llama_folders.write(tmp_path, name, torch_dtype=stored)
    rounded = {name: value.astype(DTYPES[stored]) for name, value in weights.items()}
    save_file(rounded, tmp_path / "model.safetensors")
    found = logits(Llama(tmp_path, "cpu"), TOKENS, [40])
    widened = {name: value.astype(np.float32) for name, value in rounded.items()}
    save_file(widened, tmp_path / "model.safetensors")
    assert np.array_equal(found, logits(Llama(tmp_path, "cpu"), TOKENS, [40]))


@pytest.mark.gpu
def test_the_checkpoints_dtype_is_the_gpus(tmp_path: Path) -> None:
    llama_folders.write(tmp_path, "llama3", torch_dtype="bfloat16")
    found = logits(Llama(tmp_path, "gpu"), TOKENS, [40])
    assert np.array_equal(found, logits(Llama(tmp_path, "gpu", "bfloat16"), TOKENS, [40]))


@pytest.mark.parametrize("name", ["qwen3", "qwen2-window", "gemma2", "gemma3", "gpt-oss"])
def test_sequences_of_different_lengths_step_together(
    tmp_path: Path, device: str, name: str
) -> None:
    llama_folders.write(tmp_path, name)
    model = Llama(tmp_path, device)
    lengths = [3, 3, 8, 21, 21]
    cache = model.cache([23] * len(lengths))
    for row, length in enumerate(lengths):
        ids = model.xp.asarray(TOKENS[row % 2, :length][None])
        model.extend(cache[row : row + 1], ids)
    for step in range(2):
        ids = np.array([[TOKENS[row % 2, n + step]] for row, n in enumerate(lengths)])
        states = model.extend(cache, model.xp.asarray(ids))
        found = as_numpy(model.logits(states[:, 0]))
        for row, length in enumerate(lengths):
            expected = RECORDED[name][row % 2, length + step]
            assert np.abs(found[row] - expected).max() < 3e-5
    assert cache.lengths.tolist() == [n + 2 for n in lengths]


@pytest.mark.parametrize("page_size", [None, 1, 3, 64])
@pytest.mark.parametrize(
    "name", ["llama3", "qwen3", "mistral-window", "gemma2", "gemma3", "gpt-oss"]
)
def test_pages(tmp_path: Path, device: str, name: str, page_size: int | None) -> None:
    llama_folders.write(tmp_path, name)
    model = Llama(tmp_path, device)
    cache = model.cache([17, 40], page_size)
    found = [model.extend(cache[:1], model.xp.asarray(TOKENS[:1, :17]))]
    for start, count in ((0, 5), (5, 33), (38, 2)):
        ids = model.xp.asarray(TOKENS[1:, start : start + count])
        found.append(model.extend(cache[1:], ids))
    flat = model.logits(model.xp.concatenate([states[0] for states in found]))
    expected = np.concatenate([RECORDED[name][0, :17], RECORDED[name][1]])
    assert np.abs(as_numpy(flat) - expected).max() < 3e-5
    with pytest.raises(cufa.CacheFullError):
        model.extend(cache[:1], model.xp.zeros((1, 64), np.int64))


@pytest.mark.parametrize("name", ["llama3", "mistral-window", "gemma3", "gpt-oss"])
def test_several_tokens_of_sequences_of_different_lengths(
    tmp_path: Path, device: str, name: str
) -> None:
    llama_folders.write(tmp_path, name)
    model = Llama(tmp_path, device)
    cache = model.cache([40, 40])
    model.extend(cache[1:], model.xp.asarray(TOKENS[1:, :9]))
    ids = np.stack([TOKENS[0, :20], TOKENS[1, 9:29]])
    found = as_numpy(model.logits(model.extend(cache, model.xp.asarray(ids)).reshape(40, -1)))
    expected = np.concatenate([RECORDED[name][0, :20], RECORDED[name][1, 9:29]])
    assert np.abs(found - expected).max() < 3e-5


@pytest.mark.parametrize("page_size", [None, 4])
@pytest.mark.parametrize(
    "name",
    ["mistral-window", "qwen2-window", "gemma2", "gemma3", "gpt-oss", "gpt-oss-mxfp4"],
)
def test_texts_longer_than_the_window(
    tmp_path: Path, device: str, name: str, page_size: int | None
) -> None:
    llama_folders.write(tmp_path, name)
    model = Llama(tmp_path, device, "float32")
    prompts = [Prompt(TOKENS[0, :length].tolist(), 12) for length in (3, 12, 30)]
    steps = np.stack(list(generate(model, prompts, Settings(), page_size)))
    for prompt, new in zip(prompts, steps.T, strict=True):
        text = np.array([[*prompt.tokens, *new]])
        whole = logits(model, text, [text.shape[1]])[0]
        assert np.array_equal(whole[len(prompt.tokens) - 1 : -1].argmax(axis=-1), new)


def test_operations_do_not_overflow(xp: Any) -> None:
    big = xp.asarray(np.array([[-1e30, -200, 0, 200, 1, 1, 1, 1]], np.float32))
    assert np.allclose(as_numpy(gated(big, "silu")), [[0, 0, 0, 200]])
    assert np.allclose(as_numpy(gated(big, "clamped")), [[0, 0, 0, 14]], atol=1e-4)
    x = xp.asarray(np.array([[3, -4], [0, 0]], np.float32))
    weight = xp.asarray(np.array([2, 1], np.float32))
    found = as_numpy(rms_norm(x, weight, 1e-6, np.dtype(np.float32)))
    assert np.allclose(found, [[6 / 12.5**0.5, -4 / 12.5**0.5], [0, 0]], atol=1e-6)


def shards(folder: Path) -> None:
    """Split the folder's weights in two files with an index."""
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    index = {name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(weights)}
    for shard in set(index.values()):
        part = {name: weights[name] for name in weights if index[name] == shard}
        save_file(part, folder / shard)
    text = json.dumps({"metadata": {}, "weight_map": index})
    (folder / "model.safetensors.index.json").write_text(text)


def test_shards(tmp_path: Path) -> None:
    llama_folders.write(tmp_path, "llama2")
    shards(tmp_path)
    found = logits(Llama(tmp_path, "cpu"), TOKENS, [40])
    assert np.abs(found - RECORDED["llama2"]).max() < 3e-5


def test_old_frequencies_and_a_tied_head_that_is_stored_are_no_extra_tensors(
    tmp_path: Path,
) -> None:
    weights = llama_folders.write(tmp_path, "smollm")
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    save_file(weights, tmp_path / "model.safetensors")
    assert np.abs(logits(Llama(tmp_path, "cpu"), TOKENS, [40]) - RECORDED["smollm"]).max() < 3e-5


def test_a_head_of_its_own_is_used_whatever_config_json_says(tmp_path: Path) -> None:
    weights = llama_folders.write(tmp_path, "smollm")
    weights["lm_head.weight"] = np.roll(weights["model.embed_tokens.weight"], 7, axis=0)
    save_file(weights, tmp_path / "model.safetensors")
    found = logits(Llama(tmp_path, "cpu"), TOKENS, [40])
    assert np.abs(found - np.roll(RECORDED["smollm"], 7, axis=-1)).max() < 3e-5


# --- what a folder may have wrong with it ---


def truncate(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-7])


def no_header(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")


def change_weights(change: Callable[[dict[str, np.ndarray]], Any]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        weights = load_file(folder / "model.safetensors")
        change(weights)
        save_file(weights, folder / "model.safetensors")

    return damage


def change_config(**changes: Any) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        path = folder / "config.json"
        config = {**json.loads(path.read_text()), **changes}
        path.write_text(json.dumps({k: v for k, v in config.items() if v != "absent"}))

    return damage


def no_shard(folder: Path) -> None:
    shards(folder)
    (folder / "model-00002-of-00002.safetensors").unlink()


def cut_shard(folder: Path) -> None:
    shards(folder)
    path = folder / "model-00001-of-00002.safetensors"
    path.write_bytes(path.read_bytes()[:1000])


def no_map(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text('{"metadata": {}}')


Q = "model.layers.1.self_attn.q_proj.weight"
DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no config": (lambda f: (f / "config.json").unlink(), "cannot read .*config.json: No such"),
    "bad JSON": (lambda f: (f / "config.json").write_text("{"), "config.json is not valid JSON"),
    "a list": (lambda f: (f / "config.json").write_text("[]"), "holds no JSON object"),
    "deep JSON": (
        lambda f: (f / "config.json").write_text("[" * 200_000),
        "config.json is not valid JSON",
    ),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "holds neither model.safetensors"),
    "truncated": (truncate, r"model.safetensors is damaged or no safetensors file: "),
    "a pointer": (no_header, r"model.safetensors is damaged or no safetensors file: "),
    "missing": (change_weights(lambda w: w.pop(Q)), f"lacks the tensor {Q}$"),
    "two missing": (
        change_weights(lambda w: (w.pop(Q), w.pop("lm_head.weight"))),
        "lacks the tensor lm_head.weight and 1 more$",
    ),
    "extra": (
        change_weights(lambda w: w.update({"model.layers.0.self_attn.q_proj.bias": w[Q][0]})),
        "holds the tensor model.layers.0.self_attn.q_proj.bias, which config.json leaves no",
    ),
    "shape": (
        change_weights(lambda w: w.update({Q: w[Q][:-1]})),
        rf"{Q} has the shape \(47, 48\), config.json says \(48, 48\)",
    ),
    "dtype": (
        change_weights(lambda w: w.update({Q: w[Q].astype(ml_dtypes.float8_e4m3fn)})),
        f"{Q} is of type F8_E4M3, which is not supported",
    ),
    "no shard": (no_shard, "model-00002-of-00002.safetensors is missing, which"),
    "cut shard": (cut_shard, "model-00001-of-00002.safetensors is damaged"),
    "no map": (no_map, "index.json: weight_map must name a file"),
    "architecture": (change_config(model_type="gpt2"), "type 'gpt2', which is not supported"),
    "no type": (change_config(model_type="absent"), "config.json: model_type is missing"),
    "no size": (change_config(hidden_size="absent"), "config.json: hidden_size is missing"),
    "no number": (
        change_config(hidden_size="48"),
        "hidden_size must be an integer of 1 or",
    ),
    "many layers": (
        change_config(num_hidden_layers=10**400),
        "num_hidden_layers must be an integer of 10000 or less",
    ),
    "zero": (change_config(vocab_size=0), "vocab_size must be an integer of 1 or more, not 0"),
    "eps": (change_config(rms_norm_eps=-1), "rms_norm_eps must be a positive number, not -1"),
    "flag": (change_config(tie_word_embeddings="no"), "must be true or false, not 'no'"),
    "heads": (change_config(num_key_value_heads=4), "6 query heads are no multiple of 4"),
    "head_dim": (change_config(head_dim=7), "heads of 7 elements"),
    "activation": (change_config(hidden_act="gelu"), "the activation 'gelu' is not supported"),
    "quantized": (change_config(quantization_config={}), "quantized weights"),
    "longrope": (
        change_config(rope_scaling={"rope_type": "longrope", "factor": 4.0}),
        "rotary scaling of type 'longrope' is not supported",
    ),
    "longrope of an old file": (
        change_config(rope_scaling={"type": "su", "short_factor": [1.0]}),
        "rotary scaling of type 'su' is not supported",
    ),
    "base": (
        change_config(rope_scaling={"rope_type": "yarn", "factor": 4.0}, rope_theta=1.0),
        "rope_theta must exceed 1",
    ),
    "scaling": (change_config(rope_scaling="yarn"), "rope_scaling must be an object, not 'yarn'"),
    "many turns": (
        change_config(rope_scaling={"rope_type": "yarn", "factor": 4.0, "beta_fast": 1e308}),
        "rotary scaling: beta_fast cannot be 1e\\+308",
    ),
    "few turns": (
        change_config(rope_scaling={"rope_type": "yarn", "factor": 4.0, "beta_slow": 1e-320}),
        "rotary scaling: beta_slow cannot be ",
    ),
    "no frequencies": (
        change_config(rope_scaling={"type": "linear", "factor": 1e-320}),
        "rotary scaling gives frequencies that are not finite",
    ),
    "factor": (
        change_config(rope_scaling={"type": "linear"}),
        "config.json: rope_scaling: factor is missing",
    ),
    "partial": (change_config(partial_rotary_factor=0.5), "a part of each head"),
    "eos": (change_config(eos_token_id="</s>"), "eos_token_id must be a token id or a list"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_folders_get_one_clear_line(tmp_path: Path, damage: str) -> None:
    llama_folders.write(tmp_path, "llama2")
    do, message = DAMAGES[damage]
    do(tmp_path)
    with pytest.raises(ModelError, match=message) as raised:
        Llama(tmp_path, "cpu")
    assert "\n" not in str(raised.value)


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "activation": (
        "gemma2",
        {"hidden_activation": "gelu"},
        r"the activation 'gelu' is not supported \(gelu_pytorch_tanh is\)",
    ),
    "both directions": (
        "gemma3",
        {"use_bidirectional_attention": True},
        "attention to later tokens is not supported",
    ),
    "softcap": ("gemma2", {"attn_logit_softcapping": 1e5}, "attn_logit_softcapping must be"),
    "scale": ("gemma2", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar must be a positive"),
    "number of layers": (
        "qwen3-window",
        {"layer_types": ["full_attention"]},
        "layer_types has 1 entries, but there are 2 layers",
    ),
    "type of layer": (
        "gemma3-types",
        {"layer_types": ["full_attention", "chunked_attention"]},
        "layers of type 'chunked_attention' are not supported",
    ),
    "experts": ("mistral", {"model_type": "mixtral"}, "type 'mixtral', which is not supported"),
    "too few experts": (
        "gpt-oss",
        {"num_experts_per_tok": 8},
        "num_experts_per_tok is 8, but there are 7 experts",
    ),
    "gate": ("gpt-oss", {"swiglu_limit": 6.0}, "swiglu_limit must be 7.0, not 6.0"),
    "quantized": (
        "gpt-oss",
        {"quantization_config": {"quant_method": "fp8"}},
        "quantized weights, which are not supported",
    ),
    "MXFP4 of others": (
        "llama3",
        {"quantization_config": {"quant_method": "mxfp4"}},
        "quantized weights, which are not supported",
    ),
    "sizes of MXFP4": (
        "gpt-oss-mxfp4",
        {"intermediate_size": 80},
        "MXFP4 needs sizes that are multiples of 32",
    ),
    "dense, but packed": (
        "gpt-oss-mxfp4",
        {"quantization_config": None},
        r"lacks the tensor model.layers.0.mlp.experts.gate_up_proj and 3 more$",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_supported_gets_one_clear_line(tmp_path: Path, case: str) -> None:
    name, changes, message = REFUSED[case]
    llama_folders.write(tmp_path, name)
    change_config(**changes)(tmp_path)
    with pytest.raises(ModelError, match=message) as raised:
        Llama(tmp_path, "cpu")
    assert "\n" not in str(raised.value)


ODD: list[Any] = [
    None,
    "x",
    "",
    -1,
    0,
    1,
    1.5,
    [],
    ["x"],
    [None],
    {},
    {"a": 1},
    True,
    np.nan,
    np.inf,
]


@pytest.mark.parametrize(
    "name", ["llama3", "mistral", "qwen2", "gemma2", "gemma3", "gpt-oss", "gpt-oss-mxfp4"]
)
def test_no_value_of_a_key_surprises(tmp_path: Path, name: str) -> None:
    llama_folders.write(tmp_path, name, use_sliding_window=True)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    rope = config.get("rope_scaling", {})
    others = (
        *(
            "swiglu_limit",
            "quantization_config",
            "layer_types",
            "rope_parameters",
            "dtype",
            "partial_rotary_factor",
            "mlp_bias",
        ),
        "use_bidirectional_attention",
    )
    for value in ODD:
        changes = [{key: value} for key in (*config, *others)]
        more = ("mscale", "mscale_all_dim", "attention_factor")
        changes += [{"rope_scaling": {**rope, key: value}} for key in (*rope, *more)]
        for change in changes:
            path.write_text(json.dumps({**config, **change}))
            with contextlib.suppress(ModelError):
                read_config(tmp_path)
    path.write_text(json.dumps({**config, "rms_norm_eps": 10**400}))
    with pytest.raises(ModelError, match="rms_norm_eps must be a positive number"):
        read_config(tmp_path)


FULL, SLIDING = "full_attention", "sliding_attention"
NULL: dict[str, Any] = {"sliding_window": None}
ON = {"use_sliding_window": True}


@pytest.mark.parametrize(
    ("name", "changes", "windows"),
    [
        ("llama3", {"sliding_window": 8}, [None, None]),  # Llama has none
        ("mistral", {}, [1024, 1024]),
        ("mistral", {"sliding_window": "absent"}, [None, None]),  # 4096, more than positions
        ("mistral", {"sliding_window": "absent", "max_position_embeddings": 9999}, [4096] * 2),
        ("mistral", {"sliding_window": 2048}, [None, None]),
        ("mistral", NULL, [None, None]),
        ("qwen2", {}, [None, None]),
        ("qwen2", ON, [None, 8]),
        ("qwen2", {**ON, **NULL}, [None, None]),
        ("qwen2", {**ON, "max_window_layers": 2}, [None, None]),
        ("qwen2", {**ON, "max_window_layers": 0}, [8, 8]),
        ("qwen3", {**ON, "layer_types": [FULL] * 2}, [None, None]),
        ("qwen3", {**ON, "layer_types": [SLIDING, FULL], "sliding_window": 9}, [9, None]),
        ("qwen3", {"layer_types": [SLIDING] * 2, "sliding_window": 9}, [None, None]),
        ("gemma2", {"num_hidden_layers": 3}, [7, None, 7]),
        ("gemma2", {"layer_types": [FULL, SLIDING]}, [None, 7]),
        ("gemma3", {}, [9, 9, None, 9]),
        ("gpt-oss", {}, [6, None, 6, None]),
        ("gpt-oss", {"sliding_window": "absent"}, [128, None, 128, None]),
        ("gpt-oss-mxfp4", {}, [None, 6]),
        (
            "gemma3",
            {"sliding_window_pattern": "absent", "num_hidden_layers": 7},
            [9] * 5 + [None, 9],
        ),
    ],
)
def test_sliding_windows(
    tmp_path: Path, name: str, changes: dict[str, Any], windows: list[int | None]
) -> None:
    llama_folders.write(tmp_path, name)
    change_config(**changes)(tmp_path)
    found = [attention.window for attention in read_config(tmp_path).attentions]
    assert found == [(None if window is None else window - 1, None) for window in windows]


@pytest.mark.parametrize("name", ["llama2", "mistral-window"])
def test_texts_are_as_long_as_the_positions(tmp_path: Path, name: str) -> None:
    llama_folders.write(tmp_path, name)
    model = Llama(tmp_path, "cpu")
    model.check_length(2048)
    with pytest.raises(ModelError, match=r"2049 tokens, .* exceed the model's 2048 positions"):
        model.check_length(2049)


@pytest.mark.parametrize(
    ("name", "rope", "context"),
    [
        ("llama2", {"type": "linear", "factor": 4.0}, 8192),
        ("qwen2", {"type": "yarn", "factor": 4.0}, 8192),
        ("qwen2", {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}, 8192),
        # Files that have the length after the scaling.
        ("qwen2", {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}, 2048),
        ("qwen3", {"type": "yarn", "factor": 2.5, "original_max_position_embeddings": 2047}, 5117),
        ("gemma3", {"rope_type": "linear", "factor": 8.0}, 2048),
        ("llama2", {"rope_type": "dynamic", "factor": 4.0}, 2048),
        (
            "llama2",
            {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 256,
            },
            2048,
        ),
        ("llama2", {"type": "linear", "factor": 1e300}, 2**31 - 1),
    ],
)
@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_scaling_lengthens_the_context(
    tmp_path: Path, name: str, rope: dict[str, Any], context: int, key: str
) -> None:
    changes: dict[str, Any] = {"rope_parameters": None, "rope_scaling": None}
    is_nested = name == "gemma3" and key == "rope_parameters"
    llama_folders.write(
        tmp_path, name, **{**changes, key: {"full_attention": rope} if is_nested else rope}
    )
    assert read_config(tmp_path).context == context


def test_a_window_within_the_lengthened_context_stays(tmp_path: Path) -> None:
    llama_folders.write(
        tmp_path,
        "mistral-window",
        sliding_window=4096,
        rope_scaling={"type": "yarn", "factor": 4.0},
    )
    assert {each.window for each in read_config(tmp_path).attentions} == {(4095, None)}


def test_dynamic_scaling_leaves_texts_of_all_positions(tmp_path: Path) -> None:
    llama_folders.write(tmp_path, "llama2", rope_scaling={"type": "dynamic", "factor": 2.0})
    assert np.abs(logits(Llama(tmp_path, "cpu"), TOKENS, [40]) - RECORDED["llama2"]).max() < 3e-5


YARN = llama_folders.CONFIGS["qwen3-yarn"]["rope_scaling"]


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("mistral-window", {"sliding_window": 9}),
        ("qwen2-window", {"max_window_layers": 2}),
        ("qwen3-window", {"layer_types": [FULL, SLIDING]}),
        ("gemma2", {"sliding_window": 8}),
        ("gemma2", {"attn_logit_softcapping": None}),
        ("gemma2", {"final_logit_softcapping": None}),
        ("gemma2", {"query_pre_attn_scalar": 25}),
        ("gemma3", {"sliding_window_pattern": 4}),
        ("gemma3", {"rope_local_base_freq": 1000.0}),
        ("gemma3", {"rope_scaling": None}),
        ("gemma3", {"final_logit_softcapping": 9.0}),
        ("qwen3-yarn", {"rope_scaling": {**YARN, "truncate": False}}),
        ("qwen3-yarn", {"rope_scaling": {**YARN, "attention_factor": 1.0}}),
        ("qwen3-yarn", {"rope_scaling": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.5}}),
        ("gpt-oss", {"sliding_window": 7}),
        ("gpt-oss", {"num_experts_per_tok": 2}),
        ("gpt-oss", {"rope_scaling": None}),
    ],
)
def test_what_config_json_says_of_attention_matters(
    tmp_path: Path, name: str, changes: dict[str, Any]
) -> None:
    llama_folders.write(tmp_path, name, **changes)
    found = logits(Llama(tmp_path, "cpu"), TOKENS, [40])
    assert np.abs(found - RECORDED[name]).max() > 1e-3


def test_wrong_arguments(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"dtype.*float64"):
        Llama(tmp_path, "cpu", "float64")
    with pytest.raises(ValueError, match=r"device.*tpu"):
        Llama(tmp_path, "tpu")


def test_a_missing_package_names_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llama_folders.write(tmp_path, "llama2")
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(ModelError, match=r"safetensors is not installed: pip install.*generate"):
        Llama(tmp_path, "cpu")
