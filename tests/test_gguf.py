"""GGUF files: the same model and the same tokens as a Hugging Face folder, and damaged files."""

from __future__ import annotations

import contextlib
import json
import re
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import llama_folders
import numpy as np
import pytest
from llama import Llama, Tokenizer, read_defaults
from llama_folders import TOKENS, VOCABULARY
from models import ModelError
from safetensors.numpy import save_file

pytest.importorskip("gguf", reason="the package gguf is not installed: pip install -e '.[test]'")

import gguf_files
from gguf import GGMLQuantizationType, GGUFWriter, TokenType
from gguf.quants import dequantize, quantize

#: Folders of each architecture, and what GGUF files cannot say otherwise.
NAMES: dict[str, dict[str, Any]] = {
    "llama2": {},
    "llama3": {},
    "llama-biased-linear": {},
    "smollm": {},
    "qwen2": {},
    "qwen3": {},
    "qwen3-yarn": {},
    "gemma3": {"query_pre_attn_scalar": 16},
}


def logits(model: Llama) -> np.ndarray:
    states = model.extend(model.cache([40, 40]), model.xp.asarray(TOKENS))
    found = model.logits(states.reshape(80, -1))
    return found if isinstance(found, np.ndarray) else found.get()


@pytest.mark.parametrize("device", ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("name", NAMES)
def test_a_file_is_the_model_of_its_folder(tmp_path: Path, name: str, device: str) -> None:
    weights = llama_folders.write(tmp_path, name, **NAMES[name])
    gguf_files.write(tmp_path / "model.gguf", tmp_path, weights)
    folder, file = Llama(tmp_path, device), Llama(tmp_path / "model.gguf", device)
    assert np.abs(logits(file) - logits(folder)).max() < 1e-5
    assert file.config.context == folder.config.context
    assert file.config.tied == folder.config.tied


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
@pytest.mark.parametrize("name", ["llama3", "qwen2"])
def test_types_of_weights(tmp_path: Path, name: str, kind: str) -> None:
    weights = llama_folders.write(tmp_path, name, hidden_size=64, head_dim=32, intermediate_size=96)
    gguf_files.write(tmp_path / "model.gguf", tmp_path, weights, kind)
    type_ = GGMLQuantizationType[kind]
    for tensor, weight in weights.items():
        if weight.ndim > 1:
            weights[tensor] = dequantize(quantize(weight, type_), type_)
    save_file(weights, tmp_path / "model.safetensors")
    file = Llama(tmp_path / "model.gguf", "cpu")
    assert np.abs(logits(file) - logits(Llama(tmp_path, "cpu"))).max() < 1e-5
    assert file.config.dtype == ("float16" if kind == "F16" else "bfloat16")


# --- tokenizers ---

TEXT = """It's 1234567 o'clock, we'LL see: naïve café,  日本語 😀👩‍👩‍👧!?

\tfoo_bar(x1, y22)   == "quoted"... \r\n\r\n  end e\u0301 \u00a0x """

#: The training text.
SENTENCES = Path(__file__).resolve().parent.parent / "scripts" / "data" / "sentences.txt"
SAMPLE = [TEXT, *SENTENCES.read_text(encoding="utf-8").splitlines()]

QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3 = QWEN2.replace(r"\p{N}|", r"\p{N}{1,3}|", 1)


def pre_tokenizer(name: str) -> Any:
    """Return what stands in the tokenizer.json of Qwen 2, Llama 3, SmolLM and GPT-2."""
    from tokenizers import Regex, pre_tokenizers

    whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    after = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    digits = pre_tokenizers.Digits(individual_digits=True)
    return {
        "gpt-2": whole,
        "smollm": pre_tokenizers.Sequence([digits, whole]),
        "qwen2": pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(QWEN2), "isolated"), after]),
        "llama-bpe": pre_tokenizers.Sequence(
            [pre_tokenizers.Split(Regex(LLAMA3), "isolated"), after]
        ),
    }[name]


def write_tokens(path: Path, add: Callable[[GGUFWriter], Any]) -> Tokenizer:
    """Write a file of a tokenizer alone, and read it."""
    writer = GGUFWriter(path, "llama")
    add(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return Tokenizer(path)


@pytest.mark.parametrize("name", ["gpt-2", "smollm", "qwen2", "llama-bpe"])
def test_vocabularies_of_bytes(tmp_path: Path, name: str) -> None:
    from tokenizers import Tokenizer as Rust
    from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>"]
    rust = Rust(models.BPE())
    rust.pre_tokenizer, rust.decoder = pre_tokenizer(name), decoders.ByteLevel()
    if name == "qwen2":
        rust.normalizer = normalizers.NFC()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    rust.train_from_iterator(SAMPLE, trainer)
    model = json.loads(rust.to_str())["model"]
    texts = sorted(model["vocab"], key=model["vocab"].__getitem__)
    merges = [each if isinstance(each, str) else " ".join(each) for each in model["merges"]]

    def add(writer: GGUFWriter) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(name)
        writer.add_token_list(texts)
        kinds = [TokenType.CONTROL] * 3 + [TokenType.USER_DEFINED]
        writer.add_token_types(kinds + [TokenType.NORMAL] * (len(texts) - 4))
        writer.add_token_merges(merges)
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_chat_template("{{ eos_token }}{{ messages[0].content }}")

    tokenizer = write_tokens(tmp_path / "t.gguf", add)
    for text in (*SAMPLE, "日本", " ", "\n \n", "12 345 6789", "don't DON'T"):
        expected = rust.encode(text).ids
        begins = [1] if name == "llama-bpe" else []
        assert tokenizer.encode(text) == begins + expected
        assert tokenizer.decode(expected) == rust.decode(expected)
    assert tokenizer.chat([{"role": "user", "content": "<|im_start|>a"}]) == [
        2,
        1,
        texts.index("a"),
    ]
    assert tokenizer.eos == (0, 2)
    thought = tokenizer.encode(
        "<think>a<|im_end|>",
    )[-3:]
    assert thought == [3, texts.index("a"), 2]
    assert tokenizer.decode(thought) == "<think>a"


def by_scores(text: str, scores: dict[str, float]) -> list[str]:
    """Return pieces as SentencePiece finds them: the best pair of neighbours first."""
    pieces = list(text)
    while True:
        pairs = [(left + right, i) for i, (left, right) in enumerate(pairwise(pieces))]
        known = [(-scores[pair], i) for pair, i in pairs if pair in scores]
        if not known:
            break
        _, i = min(known)
        pieces[i : i + 2] = [pieces[i] + pieces[i + 1]]
    found: list[str] = []
    for piece in pieces:
        found += [piece] if piece in scores else [f"<0x{byte:02X}>" for byte in piece.encode()]
    return found


@pytest.mark.parametrize("has_prefix", [True, False], ids=["llama", "gemma"])
def test_vocabularies_of_pieces(tmp_path: Path, has_prefix: bool) -> None:
    from tokenizers import Tokenizer as Rust
    from tokenizers import models, pre_tokenizers, trainers

    rust = Rust(models.BPE())
    rust.pre_tokenizer = pre_tokenizers.Metaspace()
    rust.train_from_iterator(
        SAMPLE, trainers.BpeTrainer(vocab_size=400, show_progress=False, limit_alphabet=80)
    )
    vocabulary = rust.get_vocab()
    texts = ["<unk>", "<s>", "</s>", "<end_of_turn>", "  "]
    kinds = [TokenType.UNKNOWN, *[TokenType.CONTROL] * 3, TokenType.USER_DEFINED]
    texts += [f"<0x{byte:02X}>" for byte in range(256)]
    kinds += [TokenType.BYTE] * 256
    pieces = sorted(vocabulary, key=vocabulary.__getitem__)
    first = len(texts)
    texts += pieces
    kinds += [TokenType.NORMAL] * len(pieces)
    scores = [0.0] * first + [-float(i) for i in range(len(pieces))]

    def add(writer: GGUFWriter) -> None:
        writer.add_tokenizer_model("llama")
        writer.add_token_list(texts)
        writer.add_token_scores(scores)
        writer.add_token_types(kinds)
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_unk_token_id(0)
        if not has_prefix:
            writer.add_add_space_prefix(False)

    tokenizer = write_tokens(tmp_path / "t.gguf", add)
    known = dict(zip(pieces, scores[first:], strict=True))
    for text in (*SAMPLE, "日本", "hello hello", "ab"):
        text = re.sub("  +", " ", text)
        expected = by_scores((" " * has_prefix + text).replace(" ", "▁"), known)
        assert [texts[i] for i in tokenizer.encode(text)] == ["<s>", *expected]
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.eos == (2, 3)
    assert tokenizer.template is None
    assert 4 in tokenizer.encode("x  x")
    assert tokenizer.decode(tokenizer.encode("x<end_of_turn>")) == "x"


# --- what is refused ---


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Return a file of a model and its tokenizer."""
    weights = llama_folders.write(tmp_path, "llama3", num_hidden_layers=1)
    gguf_files.write(tmp_path / "model.gguf", tmp_path, weights, also=add_letters)
    return tmp_path / "model.gguf"


def add_letters(writer: GGUFWriter) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([chr(ord("0") + i) for i in range(VOCABULARY)])
    writer.add_token_merges(["a b"][:0])


def test_defaults_of_a_file(file: Path) -> None:
    assert read_defaults(file).eos == ()
    assert Tokenizer(file).encode("01") == [0, 1]
    assert Llama(file, "cpu").config.dtype == "float32"


@pytest.mark.parametrize(
    ("also", "message"),
    [
        (lambda w: w.add_uint32("llama.expert_count", 8), "holds a mixture of experts"),
        (
            lambda w: w.add_float32("llama.logit_scale", 2.0),
            "llama.logit_scale is 2.0, which is no",
        ),
        (lambda w: w.add_uint32("split.count", 2), "is a part of a model: llama-gguf-split --me"),
        (lambda w: w.add_string("llama.rope.scaling.type", "longrope"), "type 'longrope' is not"),
        (lambda w: w.add_array("llama.expert_used_count", [1]), None),
        (lambda w: w.add_tensor("blk.0.attn_q.scale", np.ones(1, np.float32)), "attn_q.scale, whi"),
        (lambda w: w.add_tensor("blk.7.attn_q.weight", np.ones(1, np.float32)), "layers.7.self_at"),
    ],
)
def test_what_is_not_supported_gets_one_clear_line(
    tmp_path: Path, also: Callable[[GGUFWriter], Any], message: str | None
) -> None:
    weights = llama_folders.write(tmp_path, "llama2")
    gguf_files.write(tmp_path / "model.gguf", tmp_path, weights, also=also)
    if message is None:
        Llama(tmp_path / "model.gguf", "cpu")
        return
    with pytest.raises(ModelError, match=message) as raised:
        Llama(tmp_path / "model.gguf", "cpu")
    assert "model.gguf" in str(raised.value) or "longrope" in str(raised.value)


@pytest.mark.parametrize(
    ("add", "message"),
    [
        (lambda w: w.add_tokenizer_model("t5"), "a tokenizer of type 't5' is not supported"),
        (
            lambda w: (w.add_tokenizer_model("gpt2"), w.add_tokenizer_pre("dbrx")),
            "'dbrx' is not su",
        ),
        (lambda w: (w.add_tokenizer_model("llama"), w.add_token_scores([1.0])), "but 1 scores"),
        (lambda w: None, "tokenizer.ggml.model is missing"),
    ],
)
def test_tokenizers_that_are_not_supported(
    tmp_path: Path, add: Callable[[GGUFWriter], Any], message: str
) -> None:
    def all_of_it(writer: GGUFWriter) -> None:
        writer.add_token_list(["a", "b"])
        add(writer)

    with pytest.raises(ModelError, match=message):
        write_tokens(tmp_path / "t.gguf", all_of_it)
    with pytest.raises(ModelError, match="there are no tokens"):
        write_tokens(tmp_path / "t.gguf", lambda writer: writer.add_tokenizer_model("gpt2"))


def test_another_architecture(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "t.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelError, match="architecture 'mamba', which is not supported"):
        Llama(tmp_path / "t.gguf", "cpu")


def test_damaged_files_get_one_clear_line(file: Path, tmp_path: Path) -> None:
    whole = file.read_bytes()
    cut = tmp_path / "cut.gguf"
    for length in (*range(0, 2000, 13), len(whole) // 2, len(whole) - 1):
        cut.write_bytes(whole[:length])
        for read in (Tokenizer, lambda path: Llama(path, "cpu")):
            with pytest.raises(ModelError, match=r"cut.gguf (is|holds|lacks)") as raised:
                read(cut)
            assert "\n" not in str(raised.value)
    rng = np.random.default_rng(3)
    for _ in range(150):
        damaged = bytearray(whole)
        for place in rng.integers(0, 3000, 3):
            damaged[place] = rng.integers(256)
        cut.write_bytes(damaged)
        for read in (Tokenizer, lambda path: Llama(path, "cpu")):
            with contextlib.suppress(ModelError):
                read(cut)


def test_a_missing_package_names_the_command(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ModelError, match=r"gguf is not installed: pip install.*generate"):
        Tokenizer(file)
