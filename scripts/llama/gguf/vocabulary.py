"""The tokenizer of a GGUF file, made of its list of tokens, and its chat template."""

from pathlib import Path
from typing import Any

from models import ModelError, missing_package

from llama.folder import Values
from llama.gguf.file import GgufFile
from llama.gguf.pre_tokenizers import pre_tokenizer
from llama.vocabulary import SPECIAL, Vocabulary, told

KEYS = "tokenizer.ggml."
TEMPLATE = "tokenizer.chat_template"

#: Types of tokens.
CONTROL, USER_DEFINED = 3, 4

#: The file's names of the numbers of `SPECIAL`.
_IDS = dict(zip(SPECIAL, ("bos", "eos", "unknown", "padding"), strict=True))

#: Vocabularies of bytes that begin a text with bos where the file does not say.
_BOS = ("llama-bpe",)

_SPACE = "▁"


def read_vocabulary(path: Path) -> Vocabulary:
    """Return what a file's metadata says.

    Raises
    ------
    ModelError
        The file is damaged, or its tokenizer is of a kind that is not supported.
    """
    try:
        import tokenizers
    except ImportError:
        raise missing_package("tokenizers", "generate") from None
    file = GgufFile(path)
    values = Values(file.metadata, str(path))
    texts = values.items(f"{KEYS}tokens")
    ids = {text: number for number, text in enumerate(texts)}
    if len(ids) < max(1, len(texts)):
        raise ModelError(f"{path} is damaged: there are no tokens, or the same twice")
    special = {}
    for name, key in _IDS.items():
        number = values.integer(f"{KEYS}{key}_token_id", -1, least=-1)
        if number in range(len(texts)):
            special[name] = texts[number]
    kind = values.text(f"{KEYS}model")
    with told(path):
        if kind == "gpt2":
            tokenizer = _of_bytes(values, ids)
        elif kind == "llama":
            tokenizer = _of_pieces(values, ids, special.get("unk_token"))
        else:
            raise ModelError(f"{path}: a tokenizer of type {kind!r} is not supported (gpt2, llama)")
        for of, is_special in ((CONTROL, True), (USER_DEFINED, False)):
            types = zip(texts, values.items(f"{KEYS}token_type"), strict=False)
            tokens = [text for text, type_ in types if type_ == of]
            tokenizer.add_tokens(
                [tokenizers.AddedToken(t, special=is_special, normalized=False) for t in tokens]
            )
        _add_marks(tokenizer, values, kind, special, ids)
    ends = (values.integer(f"{KEYS}{key}_token_id", -1, least=-1) for key in ("eos", "eot", "eom"))
    eos = tuple(end for end in ends if end >= 0)
    template = values.text(TEMPLATE) if values.has(TEMPLATE) else None
    return Vocabulary(tokenizer, special, eos, template)


def _of_bytes(values: Values, ids: dict[str, int]) -> Any:
    from tokenizers import Tokenizer, decoders, models, normalizers

    name = values.text(f"{KEYS}pre", "default")
    split = pre_tokenizer(name)
    pairs = [tuple(merge.split(" ", 1)) for merge in values.items(f"{KEYS}merges")]
    tokenizer = Tokenizer(models.BPE(ids, pairs, ignore_merges=name == "llama-bpe"))
    tokenizer.pre_tokenizer = split
    if name == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _of_pieces(values: Values, ids: dict[str, int], unknown: str | None) -> Any:
    """Return a tokenizer in the way of SentencePiece: pieces with spaces, else bytes."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    scores = values.items(f"{KEYS}scores")
    if len(scores) != len(ids):
        raise ModelError(f"there are {len(ids)} tokens, but {len(scores)} scores")
    tokenizer = Tokenizer(
        models.BPE(ids, _merges(ids, scores), unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    has_prefix = values.flag(f"{KEYS}add_space_prefix", True)
    prefix = [normalizers.Prepend(_SPACE)] if has_prefix else []
    tokenizer.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", _SPACE)])
    to_text = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if has_prefix:
        to_text.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(to_text)
    return tokenizer


def _merges(ids: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """Return the pairs of pieces that make another, that of the best score first."""
    found = []
    for piece, number in ids.items():
        for i in range(1, len(piece)):
            left, right = piece[:i], piece[i:]
            if left in ids and right in ids:
                found.append((-scores[number], number, ids[left], ids[right], left, right))
    return [pair[-2:] for pair in sorted(found)]


def _add_marks(
    tokenizer: Any, values: Values, kind: str, special: dict[str, str], ids: dict[str, int]
) -> None:
    """Let texts begin with bos and end with eos, where the file says so."""
    from tokenizers.processors import TemplateProcessing

    usual = kind == "llama" or values.get(f"{KEYS}pre") in _BOS
    marks = [
        special.get(f"{name}_token") if values.flag(f"{KEYS}add_{name}_token", default) else None
        for name, default in (("bos", usual), ("eos", False))
    ]
    bos, eos = marks
    if bos or eos:
        tokenizer.post_processor = TemplateProcessing(
            single=[*filter(None, [bos]), "$A", *filter(None, [eos])],
            special_tokens=[(mark, ids[mark]) for mark in {bos, eos} if mark],
        )
