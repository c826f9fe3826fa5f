"""Decoders of Llama's architecture, from Hugging Face folders, on NumPy or CuPy arrays."""

from llama.model import Llama

__all__ = ["Llama"]
