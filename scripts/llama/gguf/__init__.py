"""Models in GGUF files, the format of llama.cpp: a tokenizer, a configuration and weights in one."""

from llama.gguf.checkpoint import GgufCheckpoint
from llama.gguf.config import read_config
from llama.gguf.file import GgufFile
from llama.gguf.vocabulary import read_vocabulary

__all__ = ["GgufCheckpoint", "GgufFile", "read_config", "read_vocabulary"]
