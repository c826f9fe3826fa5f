"""Record the logits of transformers for the small checkpoints of tests/llama_folders.py.

    PYTHONPATH=.:scripts:tests python tests/data/llama/record.py

Needs PyTorch, transformers and accelerate, which the tests do not: they compare with what is
recorded here.
"""

import tempfile
from pathlib import Path

import llama_folders
import numpy as np
import torch
from transformers import AutoModelForCausalLM


def main() -> None:
    """Write logits.npz: (2, 40, vocabulary) float32 by name of the checkpoint."""
    recorded = {}
    for name in llama_folders.CONFIGS:
        with tempfile.TemporaryDirectory() as folder:
            llama_folders.write(Path(folder), name)
            model, info = AutoModelForCausalLM.from_pretrained(
                folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
            )
            assert not any(info.values()), info
            with torch.no_grad():
                recorded[name] = model(torch.from_numpy(llama_folders.TOKENS)).logits.numpy()
    np.savez_compressed(Path(__file__).with_name("logits.npz"), **recorded)


if __name__ == "__main__":
    main()
