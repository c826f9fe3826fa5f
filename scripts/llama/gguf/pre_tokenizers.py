"""How vocabularies of bytes cut a text in words, by the names that GGUF files give the ways."""

from typing import Any

from models import ModelError

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_OTHERS = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"

#: Patterns of words, for those that do not cut as GPT-2 does.
_PATTERNS = {
    "qwen2": rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_OTHERS}",
    "llama-bpe": rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_OTHERS}",
}

#: Pre-tokenizers that cut as GPT-2 does; "smollm" takes each digit by itself.
_AS_GPT2 = ("gpt-2", "smollm")


def pre_tokenizer(name: str) -> Any:
    """Return the pre-tokenizer of `tokenizers` that a GGUF file names.

    Raises
    ------
    ModelError
        It is none of those that are known.
    """
    from tokenizers import Regex, pre_tokenizers

    if name in _PATTERNS:
        split = pre_tokenizers.Split(Regex(_PATTERNS[name]), "isolated")
        parts = [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        return pre_tokenizers.Sequence(parts)
    if name not in _AS_GPT2:
        known = ", ".join(sorted((*_PATTERNS, *_AS_GPT2)))
        raise ModelError(f"the pre-tokenizer {name!r} is not supported ({known} are)")
    as_gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if name == "gpt-2":
        return as_gpt2
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), as_gpt2])
