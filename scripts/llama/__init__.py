"""Decoders of Llama's architecture, of folders or GGUF files, on NumPy or CuPy arrays."""

from llama.cache import CACHES
from llama.completion import Piece, Speed, complete
from llama.defaults import Defaults, read_defaults
from llama.generation import Prompt, generate
from llama.model import Llama
from llama.sampling import Settings
from llama.tokenizer import Tokenizer

__all__ = [
    "CACHES",
    "Defaults",
    "Llama",
    "Piece",
    "Prompt",
    "Settings",
    "Speed",
    "Tokenizer",
    "complete",
    "generate",
    "read_defaults",
]
