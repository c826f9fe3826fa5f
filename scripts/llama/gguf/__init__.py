"""Models in GGUF files, llama.cpp's format: tokenizer, configuration and weights in one."""

from llama.gguf.checkpoint import GgufCheckpoint
from llama.gguf.config import read_config
from llama.gguf.file import GgufFile
from llama.gguf.vocabulary import read_vocabulary

__all__ = ["GgufCheckpoint", "GgufFile", "read_config", "read_vocabulary"]
