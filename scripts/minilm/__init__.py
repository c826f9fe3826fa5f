"""all-MiniLM-L6-v2, a sentence-embedding model, on NumPy or CuPy arrays with `cufa.attention`."""

from minilm.backend import DTYPES, choose_array_module
from minilm.errors import ModelError
from minilm.model import DIM, MiniLM

__all__ = ["DIM", "DTYPES", "MiniLM", "ModelError", "choose_array_module"]
