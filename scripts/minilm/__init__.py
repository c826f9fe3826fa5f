"""all-MiniLM-L6-v2, a sentence-embedding model, on NumPy or CuPy arrays with `cufa.attention`."""

from minilm.model import DIM, MiniLM

__all__ = ["DIM", "MiniLM"]
