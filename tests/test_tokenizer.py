"""Text to tokens and back: streams of whole characters, spaces, chat templates."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import llama_folders
import numpy as np
import pytest
from llama import Tokenizer
from models import ModelError

TEXT = "naïve 😀👩‍👩‍👧 日本語\n\tend é "


@pytest.fixture
def bytes_(tmp_path: Path) -> Tokenizer:
    llama_folders.write_byte_tokenizer(tmp_path, chat=True)
    return Tokenizer(tmp_path)


@pytest.fixture
def pieces(tmp_path: Path) -> Tokenizer:
    llama_folders.write_piece_tokenizer(tmp_path)
    return Tokenizer(tmp_path)


def test_a_stream_gives_whole_characters(bytes_: Tokenizer) -> None:
    tokens = bytes_.encode(TEXT)
    assert len(tokens) == len(TEXT.encode())
    stream = bytes_.stream(bytes_.encode("Say: "))
    found = [stream.push(token) for token in tokens]
    assert "".join(found) + stream.end() == TEXT
    assert not any("\ufffd" in piece for piece in found)
    assert found.count("") == len(TEXT.encode()) - len(TEXT)  # each as soon as it is whole


def test_half_a_character_at_the_end_is_shown_as_such(bytes_: Tokenizer) -> None:
    stream = bytes_.stream([])
    shown = "".join(stream.push(token) for token in bytes_.encode("a日")[:-1])
    assert shown == "a"
    assert set(stream.end()) == {"\ufffd"}


def test_a_stream_after_half_a_character(bytes_: Tokenizer) -> None:
    first, *rest = bytes_.encode("é!")
    stream = bytes_.stream([first])
    assert "".join(stream.push(token) for token in rest).endswith("!")


@pytest.mark.parametrize("before", ["日日☃😀", "\n😀é", "é" * 9, "hi 本", "日", ""])
@pytest.mark.parametrize("after", ["本☃é", "😀", "é hi 日"])
def test_characters_of_several_bytes_after_others(
    pieces: Tokenizer, before: str, after: str
) -> None:
    """A decoder that falls back to bytes makes nothing of those that follow a part of one."""
    prompt = pieces.encode(f"x{before}")
    tokens = pieces.encode(f"x{before}{after}")[len(prompt) :]
    stream = pieces.stream(prompt)
    assert "".join(stream.push(token) for token in tokens) == after


@pytest.mark.parametrize("kind", ["bytes_", "pieces"])
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("日\ufffd\ufffd", "😀"),
        ("hi", "\ufffd\ufffd日\ufffd hi\ufffd"),
        ("\ufffd", "\ufffd"),
        ("", "\ufffdé\ufffd"),
    ],
)
def test_a_replacement_character_is_text_as_another(
    kind: str, before: str, after: str, request: pytest.FixtureRequest
) -> None:
    tokenizer = request.getfixturevalue(kind)
    prompt = tokenizer.encode(f"x{before}")
    tokens = tokenizer.encode(f"x{before}{after}")[len(prompt) :]
    stream = tokenizer.stream(prompt)
    assert "".join(stream.push(token) for token in tokens) + stream.end() == after


@pytest.mark.parametrize("kind", ["bytes_", "pieces"])
def test_random_texts_are_streamed_whole(kind: str, request: pytest.FixtureRequest) -> None:
    tokenizer = request.getfixturevalue(kind)
    rng = np.random.default_rng(5)
    letters = ["hi", " ", "h", "é", "日", "😀", "\ufffd", "\n", "\t", "👩\u200d👧", "\x00"]
    compared = 0
    for _ in range(300):
        before, after = ("".join(rng.choice(letters, rng.integers(1, 9))) for _ in range(2))
        prompt, tokens = tokenizer.encode(f"x{before}"), tokenizer.encode(f"x{before}{after}")
        if tokens[: len(prompt)] != prompt:
            continue  # a token has letters of both
        stream = tokenizer.stream(prompt)
        new = tokens[len(prompt) :]
        assert "".join(stream.push(token) for token in new) + stream.end() == after
        compared += 1
    assert compared > 200


@pytest.mark.parametrize("kind", ["bytes_", "pieces"])
def test_a_character_that_the_prompt_begins_is_whole(
    kind: str, request: pytest.FixtureRequest
) -> None:
    tokenizer = request.getfixturevalue(kind)
    text = "日é😀☃"
    tokens = tokenizer.encode(f"\n{text}")[-len(text.encode()) :]
    for cut in range(len(tokens)):
        stream = tokenizer.stream([*tokenizer.encode("\n"), *tokens[:cut]])
        shown = "".join(stream.push(token) for token in tokens[cut:]) + stream.end()
        sizes = np.cumsum([0, *(len(letter.encode()) for letter in text)])
        assert shown == text[int((sizes <= cut).sum()) - 1 :]


def test_bytes_that_are_no_text(bytes_: Tokenizer, pieces: Tokenizer) -> None:
    """One U+FFFD for what is broken; letters around it stay, which no later byte can take back."""
    for tokenizer, names in (
        (bytes_, ["0", "Ç", "4", "æ", "Ĺ", "!"]),
        (pieces, ["<0x30>", "<0xC7>", "<0x34>", "<0xE6>", "<0x97>", "<0x21>"]),
    ):
        tokens = [tokenizer._tokenizer.token_to_id(name) for name in names]
        stream = tokenizer.stream([])
        assert "".join(stream.push(token) for token in tokens) == "0\ufffd4\ufffd!"
        assert stream.end() == ""


def test_a_stream_takes_the_same_time_for_each_token(
    bytes_: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where nothing is a whole character for long."""
    seen: list[int] = []
    decode = Tokenizer.decode

    def counted(self: Tokenizer, tokens: Sequence[int]) -> str:
        seen.append(len(tokens))
        return decode(self, tokens)

    monkeypatch.setattr(Tokenizer, "decode", counted)
    stream = bytes_.stream([])
    half = bytes_.encode("日")[0]
    assert "".join(stream.push(half) for _ in range(1000)) + stream.end() == "\ufffd" * 1000
    assert max(seen, default=0) <= 2


def test_special_tokens_are_not_text(bytes_: Tokenizer) -> None:
    stream = bytes_.stream(bytes_.encode("<|im_start|>"))
    found = [stream.push(token) for token in bytes_.encode("a<|im_start|>b")]
    assert found == ["a", "", "b"]


def test_a_space_that_belongs_to_the_next_word_is_kept(pieces: Tokenizer) -> None:
    assert pieces.encode("hi hi") == [1, 263, 263]
    stream = pieces.stream(pieces.encode("hi"))
    assert [stream.push(263), stream.push(263)] == [" hi", " hi"]
    # At the very beginning there is none.
    stream = pieces.stream([1])
    assert [stream.push(263), stream.push(263)] == ["hi", " hi"]
    stream = pieces.stream([1])
    tokens = pieces.encode("hi 日本 é")[1:]
    assert "".join(stream.push(token) for token in tokens) == "hi 日本 é"


def test_eos(bytes_: Tokenizer, pieces: Tokenizer) -> None:
    assert pieces.eos == (2,)
    # <|endoftext|> and <|im_end|>, of which tokenizer_config.json names one.
    assert bytes_.eos == (256, 258)
    assert bytes_.encode("<|endoftext|><|im_end|>") == [256, 258]


def test_text_that_no_token_is_for(tmp_path: Path) -> None:
    llama_folders.write_byte_tokenizer(tmp_path)
    path = tmp_path / "tokenizer.json"
    content = json.loads(path.read_text())
    content["model"]["vocab"].pop("x")
    path.write_text(json.dumps(content))
    tokenizer = Tokenizer(tmp_path)
    assert tokenizer.decode(tokenizer.encode("axb")) == "ab"
    assert tokenizer.encode("") == []
    with pytest.raises(ModelError, match="the tokenizer has no tokens for 'xx'"):
        tokenizer.encode("xx")


def test_chat(bytes_: Tokenizer) -> None:
    pytest.importorskip("jinja2")
    messages = [{"role": "user", "content": "Hi"}]
    expected = (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert bytes_.chat(messages) == bytes_.encode(expected)
    assert bytes_.chat(messages)[0] == bytes_.encode("<|im_start|>")[0] >= 256
    with pytest.raises(ModelError, match="the chat template fails: Unknown role: tool"):
        bytes_.chat([{"role": "tool", "content": "Hi"}])


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ bos_token }}{{ messages[0].content | tojson }}", '<s>"<é & ü>"'),
        ("{% for m in messages %}\n  {% break %}\n{% endfor %}\nx", "x"),
        ("a{% generation %}b{{ messages[0].role }}{% endgeneration %}c", "abuserc"),
        ("{% generation %}\n  {% set x = 1 %}\n{% endgeneration %}\n{{ x }}y", "y"),
        (
            "{{ {'b': 1, 'a': [2]} | tojson(separators=(',', ':'), sort_keys=True) }}",
            '{"a":[2],"b":1}',
        ),
        ("{{ {'a': 1} | tojson(indent=1) }}", '{\n "a": 1\n}'),
        ("{% set n = namespace(i=1) %}{% set n.i = 2 %}{{ n.i }}{{ dict(a=3).a }}", "23"),
        ("{{ tools is none }}{{ documents is none }}{{ add_generation_prompt }}", "TrueTrueTrue"),
        ("{% generation %}", "the chat template fails"),
        ("{% set n = namespace() %}{% set n._a = 2 %}", "the chat template fails"),
        ("{{ namespace(__class__=1) }}", "the chat template fails"),
        ("{{ strftime_now('%Y')[:2] }}", "20"),
        ("{{ messages[0].content.__class__.__mro__ }}", "unsafe"),
        ("{% for %}", "the chat template fails"),
        ("{{ messages + 1 }}", "the chat template fails"),
        ("{{ 1 // 0 }}", "the chat template fails"),
        ("{{ '%(a)s' % {} }}", "the chat template fails"),
        ("{% for i in range(10**9) %}{% endfor %}", "the chat template fails"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "the chat template fails"),
        ("{{ '\\udce9' }}", "the text is not UTF-8"),
        ("{{ raise_exception('no\nno') }}", "the chat template fails: no no"),
    ],
)
def test_templates_see_what_transformers_shows_them(
    tmp_path: Path, template: str, expected: str
) -> None:
    pytest.importorskip("jinja2")
    llama_folders.write_byte_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": "not this one", "bos_token": "<s>"})
    )
    (tmp_path / "chat_template.jinja").write_text(template, encoding="utf-8")
    tokenizer = Tokenizer(tmp_path)
    messages = [{"role": "user", "content": "<é & ü>"}]
    if expected.startswith(("unsafe", "the chat template fails", "the text is not UTF-8")):
        with pytest.raises(ModelError, match=expected) as raised:
            tokenizer.chat(messages)
        assert "\n" not in str(raised.value)
    else:
        assert tokenizer.decode(tokenizer.chat(messages)) == expected


def test_templates_by_name(tmp_path: Path) -> None:
    llama_folders.write_byte_tokenizer(tmp_path)
    named = [{"name": "rag", "template": "no"}, {"name": "default", "template": "yes"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert Tokenizer(tmp_path).template == "yes"
    for odd in ([], ["default"], [{"name": "default"}], [None]):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": odd}))
        assert Tokenizer(tmp_path).template is None
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ModelError, match=r"cannot read .*chat_template.jinja: .*utf-8"):
        Tokenizer(tmp_path)


def test_no_template(pieces: Tokenizer) -> None:
    assert pieces.template is None
    with pytest.raises(ModelError, match="no chat template"):
        pieces.chat([{"role": "user", "content": "Hi"}])


def test_folders_without_a_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelError, match=r"neither config.json nor tokenizer.json$"):
        Tokenizer(tmp_path)
    (tmp_path / "config.json").touch()
    with pytest.raises(ModelError, match=r"tokenizer.json is missing$"):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer.model").touch()
    with pytest.raises(ModelError, match=r"missing \(tokenizer.model alone is not enough\)"):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match=r"tokenizer.json is damaged: "):
        Tokenizer(tmp_path)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ModelError, match=r"tokenizers is not installed: pip install.*generate"):
        Tokenizer(tmp_path)


@pytest.mark.parametrize(
    "damage",
    [
        {"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "[UNK]"}},
        {"model": {"type": "Unigram", "vocab": [["a", 0.0]], "unk_id": None}},
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
        {"decoder": {"type": "Strip", "content": "b", "start": 1, "stop": 1}},
    ],
)
def test_damage_that_shows_when_a_tokenizer_is_used(tmp_path: Path, damage: dict[str, Any]) -> None:
    llama_folders.write_byte_tokenizer(tmp_path)
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **damage}))
    with pytest.raises(ModelError, match=r"tokenizer.json is damaged: ") as error:
        Tokenizer(tmp_path).decode(Tokenizer(tmp_path).encode("bcd"))
    assert len(str(error.value).splitlines()) == 1


def test_chat_without_jinja_names_the_command(
    bytes_: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "jinja2.exceptions", None)
    with pytest.raises(ModelError, match=r"jinja2 is not installed: pip install.*generate"):
        bytes_.chat([])
