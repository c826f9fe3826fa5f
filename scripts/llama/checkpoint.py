"""The weights of a folder: one safetensors file, or several with an index."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from models import ModelError, missing_package

from llama.folder import Values, read_json
from llama.tensors import BLOCKS, SCALES, check_shapes

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

DTYPES = ("F32", "F16", "BF16")
PACKED_DTYPES = ("U8",)

#: A suffix of tensors that are no weights: old checkpoints of Llama 2 save these frequencies.
IGNORED = ".rotary_emb.inv_freq"


class Checkpoint:
    """Tensors by name; none is read before it is asked for.

    Parameters
    ----------
    folder : Path

    Raises
    ------
    ModelError
        There are no safetensors, or a file is missing or damaged.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, Any] = {}
        if (folder / INDEX).is_file():
            index = Values(read_json(folder / INDEX), str(folder / INDEX)).get("weight_map")
            if not isinstance(index, dict) or not all(isinstance(n, str) for n in index.values()):
                raise ModelError(f"{folder / INDEX}: weight_map must name a file for each tensor")
            for shard in sorted(set(index.values())):
                self._files |= self._open(shard)
        elif (folder / SINGLE).is_file():
            self._files = self._open(SINGLE)
        else:
            raise ModelError(f"{folder} holds neither {SINGLE} nor {INDEX}")

    def _open(self, shard: str) -> dict[str, Any]:
        try:
            from safetensors import SafetensorError, safe_open
        except ImportError:
            raise missing_package("safetensors", "generate") from None
        path = self._folder / shard
        if not os.path.isfile(path):  # which raises nothing, as `Path.is_file` does
            raise ModelError(f"{path} is missing, which {INDEX} names")
        try:
            file = safe_open(path, framework="numpy")
        except (OSError, SafetensorError) as error:
            raise ModelError(f"{path} is damaged or no safetensors file: {error}") from None
        return {name: file for name in file.keys() if not name.endswith(IGNORED)}  # noqa: SIM118

    def check(self, expected: Mapping[str, tuple[int, ...]]) -> None:
        """Raise ModelError unless the checkpoint holds tensors of just these names and shapes."""
        slices = {name: file.get_slice(name) for name, file in self._files.items()}
        shapes = {name: tuple(tensor.get_shape()) for name, tensor in slices.items()}
        check_shapes(str(self._folder), shapes, expected, "config.json")
        for name in expected:
            known = PACKED_DTYPES if name.endswith((BLOCKS, SCALES)) else DTYPES
            if slices[name].get_dtype() not in known:
                raise ModelError(
                    f"{self._folder}: {name} is of type {slices[name].get_dtype()}, "
                    f"which is not supported ({', '.join(known)} are)"
                )

    def __contains__(self, name: str) -> bool:
        """Return whether there is such a tensor."""
        return name in self._files

    def read(self, name: str) -> np.ndarray:
        """Return a tensor in the dtype of its file."""
        # NumPy knows bfloat16 by that name since cufa imported ml_dtypes.
        return self._files[name].get_tensor(name)
