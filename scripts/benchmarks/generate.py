"""Generating text: tokens a second of scripts/llama, their bound, and transformers."""

from __future__ import annotations

import statistics
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import cupy
import numpy as np
from llama import Llama, Prompt, Settings, generate
from llama.config import config_of
from llama.folder import Values
from llama.tensors import EMBEDDING, tensor_shapes
from models import DTYPES

from benchmarks import graphs
from benchmarks.contestants import free_memory, reason, rounded, say
from benchmarks.results import figures
from cufa.explorer.clock import CudaClock

DTYPE = "bfloat16"

ALIKE = 0.15
"""Logits of bfloat16 models differ by less of their deviation, those of different models by 1.4."""

SKIPPED = 4
"""New tokens before the time is taken: meanwhile the graph is captured."""

_LLAMA_31 = {
    "model_type": "llama",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}
MODELS: dict[str, dict[str, Any]] = {
    "Llama-3.1-8B": {
        **_LLAMA_31,
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
    "tiny": {
        **_LLAMA_31,
        "vocab_size": 1000,
        "hidden_size": 256,
        "intermediate_size": 704,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 64,
    },
}
"""config.json of the sizes that there are."""

Run = Callable[[np.ndarray, int], list[float]]
"""Takes prompts, (batch, tokens), and a number of new tokens; returns when each was there."""


def random_model(name: str) -> Llama:
    """Return a model of random weights on the GPU, which are the same in every run."""
    config = config_of(Values(MODELS[name], name), name)

    def read(tensor: str) -> Any:
        shape = tensor_shapes(config)[tensor]
        if len(shape) == 1:
            return cupy.ones(shape, np.float32)
        rng = cupy.random.default_rng(zlib.crc32(tensor.encode()))
        values = rng.standard_normal(shape, dtype=cupy.float32)
        values *= np.float32(shape[1] ** -0.5)
        return values.astype(DTYPES[DTYPE])

    return Llama.of_tensors(config, read, cupy, DTYPES[DTYPE])


def ours(model: Llama) -> Run:
    """Return what generates with cufa."""

    def run(prompts: np.ndarray, new: int) -> list[float]:
        texts = [Prompt(prompt.tolist(), new) for prompt in prompts]
        return [time.perf_counter() for _ in generate(model, texts, Settings())]

    return run


def transformers(model: Llama, name: str) -> Run:
    """Return what generates with transformers, by SDPA, on the same weights.

    Raises
    ------
    ImportError
        There is no PyTorch, or no transformers.
    RuntimeError
        Its logits are not those of cufa.
    """
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig
    from transformers.generation import StoppingCriteria, StoppingCriteriaList

    config = LlamaConfig(**{k: v for k, v in MODELS[name].items() if k != "model_type"})
    with torch.device("cuda"):
        other = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation="sdpa"
        )
    other.load_state_dict(_tensors(model), assign=True)
    torch.cuda.empty_cache()
    other.eval()
    other.generation_config.eos_token_id = None
    other.generation_config.pad_token_id = 0

    class Times(StoppingCriteria):  # type: ignore[misc]
        """Notes when each token is there, and never stops."""

        def __init__(self) -> None:
            self.times: list[float] = []

        def __call__(self, ids: Any, scores: Any, **_: Any) -> Any:
            torch.cuda.synchronize()
            self.times.append(time.perf_counter())
            return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)

    @torch.inference_mode()
    def run(prompts: np.ndarray, new: int) -> list[float]:
        times = Times()
        ids = torch.from_numpy(prompts).cuda()
        other.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new,
            do_sample=False,
            stopping_criteria=StoppingCriteriaList([times]),
        )
        return times.times

    ids = np.random.default_rng(0).integers(0, model.config.vocabulary, (1, 40))
    states = model.extend(model.cache([40]), cupy.asarray(ids))
    mine = model.logits(states[0]).get()
    with torch.inference_mode():
        found = other(torch.from_numpy(ids).cuda()).logits[0].float().cpu().numpy()
    error = ((found - mine) ** 2).mean() ** 0.5 / mine.std()
    if not error < ALIKE:
        raise RuntimeError(f"its logits differ by {error:.2g} of their deviation")
    return run


def _tensors(model: Llama) -> dict[str, Any]:
    """Return a checkpoint of a random model, whose norms are ones: its matrices, not copied."""
    import torch

    from benchmarks.inputs import to_torch

    return {
        name: to_torch(model.matrices[name])
        if name in model.matrices
        else torch.ones(shape, dtype=torch.bfloat16, device="cuda")
        for name, shape in tensor_shapes(model.config).items()
    }


PEERS = {"transformers": transformers}


def weight_bytes(model: Llama) -> int:
    """Return what a step reads of the weights: all of them, but of an embedding a few rows."""
    names = [name for name in model.matrices if name != EMBEDDING or model.config.tied]
    return sum(int(model.matrices[name].nbytes) for name in names)


def rows(
    name: str,
    batches: Iterable[int],
    prompt: int,
    new: int,
    peers: Iterable[str],
    rounds: int,
    read_gbs: float,
) -> Iterator[dict[str, Any]]:
    """Yield a row for each batch, and print a line for each.

    Parameters
    ----------
    name : str
        A key of `MODELS`.
    batches : iterable of int
    prompt, new : int
        Tokens of a sequence.
    peers : iterable of str
        Keys of `PEERS`.
    rounds : int
        In which contestants take turns, after one to warm up.
    read_gbs : float
        Bandwidth of reading, measured in the same run.
    """
    model = random_model(name)
    runs = {"cufa": ours(model)}
    for peer in peers:
        try:
            runs[peer] = PEERS[peer](model, name)
        except (ImportError, RuntimeError) as error:
            say(f"{peer} is left out: {reason(error)}")
    for batch in batches:
        rng = np.random.default_rng(batch)
        prompts = rng.integers(0, model.config.vocabulary, (batch, prompt))
        found: dict[str, list[float]] = {run: [] for run in runs}
        for number in range(rounds + 1):
            for contestant, run in runs.items():
                speed = tokens_per_second(run(prompts, new), batch)
                if number:
                    found[contestant].append(speed)
        medians = {run: statistics.median(speeds) for run, speeds in found.items()}
        bound = batch * read_gbs * 1e9 / weight_bytes(model)
        ours_ = medians.pop("cufa")
        row = {
            "model": name,
            "dtype": DTYPE,
            "batch": batch,
            "prompt": prompt,
            "new": new,
            "unit": "tokens/s",
            "cufa": rounded(ours_, 5),
            "bound": rounded(bound, 5),
            "bound_share": rounded(ours_ / bound, 4),
            "attention_share": rounded(
                attention_ms(model, batch, prompt + new // 2) * ours_ / batch / 1e3, 4
            ),
            "peers": {peer: rounded(speed, 5) for peer, speed in medians.items()},
        }
        print(f"batch {batch}: {figures(row)}, bound {row['bound']}", flush=True)
        yield row
        free_memory()


def tokens_per_second(times: Sequence[float], batch: int) -> float:
    """Return the speed of all sequences together, from the times of the new tokens."""
    taken = times[SKIPPED:]
    return batch * (len(taken) - 1) / (taken[-1] - taken[0])


def attention_ms(model: Llama, batch: int, length: int) -> float:
    """Return the time of a step's attention alone: in all layers, by graph replay."""
    c = model.config
    cache = model.cache([length] * batch)
    cache.extend(length)
    new = cupy.zeros((batch, c.kv_heads, length, c.head_dim), DTYPES[DTYPE])
    for layer in range(c.layers):
        cache.write(new, new, layer=layer)
    q = cupy.ones((batch, c.heads, 1, c.head_dim), DTYPES[DTYPE])
    out = cupy.empty_like(q)

    def attend() -> Any:
        for layer in range(c.layers):
            cache.decode(q, layer=layer, out=out)
        return out

    attend()
    replay = graphs.capture(attend, 1)
    clock = CudaClock(every_call=True)  # a step reads the weights in between
    return statistics.median(clock.burst(replay, 1)() for _ in range(15))
