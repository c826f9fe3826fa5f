"""Train the tiny Llama of scripts/data/adder, which adds two numbers, and save it as Llamas are.

    python scripts/train_adder.py scripts/data/adder

Needs PyTorch, safetensors and tokenizers, and half an hour of one core where there is no GPU. Sums
that `adder.is_held_out` names are never trained on.
"""

import argparse
import json
import math
import time
from pathlib import Path

import adder
import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, processors
from torch import nn
from torch.nn import functional

HIDDEN, INNER, LAYERS = 96, 256, 3
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 32
EPS, THETA = 1e-5, 10000.0
BOS, EOS = "<s>", "</s>"
VOCABULARY = {token: i for i, token in enumerate([BOS, EOS, *"0123456789+= "])}
# Positions of the longest line: two numbers, two signs, the sum twice, a space, a mark at each end.
LENGTH = 2 * adder.DIGITS + 2 + 2 * (adder.DIGITS + 1) + 1 + 2
IGNORED = -100  # cross_entropy's own mark

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": len(VOCABULARY),
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "hidden_act": "silu",
    "max_position_embeddings": LENGTH,
    "rms_norm_eps": EPS,
    "rope_theta": THETA,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "mlp_bias": False,
    "bos_token_id": VOCABULARY[BOS],
    "eos_token_id": VOCABULARY[EOS],
    "torch_dtype": "bfloat16",
}


class Attention(nn.Module):
    """Grouped-query attention with rotary positions."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(HIDDEN, HEADS * HEAD_DIM, bias=False)
        self.k_proj = nn.Linear(HIDDEN, KV_HEADS * HEAD_DIM, bias=False)
        self.v_proj = nn.Linear(HIDDEN, KV_HEADS * HEAD_DIM, bias=False)
        self.o_proj = nn.Linear(HEADS * HEAD_DIM, HIDDEN, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Return the attended `x`, (batch, seq, hidden) as it is."""
        batch, seq, _ = x.shape
        q, k, v = (
            proj(x).view(batch, seq, -1, HEAD_DIM).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        k, v = (t.repeat_interleave(HEADS // KV_HEADS, dim=1) for t in (k, v))
        # By its formula: for lines this short it is faster than PyTorch's fused kernels.
        scores = q @ k.transpose(-1, -2) * HEAD_DIM**-0.5
        hidden = torch.ones(seq, seq, dtype=torch.bool, device=x.device).triu(1)
        out = scores.masked_fill(hidden, -math.inf).softmax(-1) @ v
        return self.o_proj(out.transpose(1, 2).reshape(batch, seq, -1))


class Perceptron(nn.Module):
    """SwiGLU."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(HIDDEN, INNER, bias=False)
        self.up_proj = nn.Linear(HIDDEN, INNER, bias=False)
        self.down_proj = nn.Linear(INNER, HIDDEN, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the perceptron of `x`, of the same shape."""
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """One decoder layer; its parameters have the names that Llama's have."""

    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(HIDDEN, EPS)
        self.self_attn = Attention()
        self.post_attention_layernorm = nn.RMSNorm(HIDDEN, EPS)
        self.mlp = Perceptron()

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Return the layer's output, of the shape of `x`."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    """Embedding, layers, last norm; the embedding's matrix gives the logits, too."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(len(VOCABULARY), HIDDEN)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm = nn.RMSNorm(HIDDEN, EPS)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.05)
        steps = torch.arange(0, HEAD_DIM, 2) / HEAD_DIM
        angles = torch.arange(LENGTH)[:, None] * THETA**-steps
        self.register_buffer("cos", torch.cat([angles.cos()] * 2, -1), persistent=False)
        self.register_buffer("sin", torch.cat([angles.sin()] * 2, -1), persistent=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the logits, (batch, seq, vocabulary), of token ids (batch, seq)."""
        x = self.embed_tokens(ids)
        cos, sin = self.cos[: ids.shape[1]], self.sin[: ids.shape[1]]
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.norm(x) @ self.embed_tokens.weight.T


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Return `x` with the rotary embedding applied, in its half-split form."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


def lines(pairs: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """Return token ids (sums, LENGTH) and the targets: each next token of the answers alone."""
    ids = np.full((len(pairs), LENGTH + 1), VOCABULARY[EOS])
    targets = np.full_like(ids, IGNORED)
    for row, (a, b) in enumerate(pairs.tolist()):
        question, answer = adder.prompt(a, b), adder.answer(a, b)
        line = [VOCABULARY[c] for c in question + answer]
        ids[row, 0] = VOCABULARY[BOS]
        ids[row, 1 : len(line) + 1] = line
        targets[row, len(question) : len(line) + 1] = [*line[len(question) :], VOCABULARY[EOS]]
    return torch.from_numpy(ids[:, :LENGTH]), torch.from_numpy(targets[:, :LENGTH])


@torch.no_grad()
def accuracy(model: Decoder, pairs: np.ndarray, device: str) -> float:
    """Return the share of sums of which every token of the answer is the likeliest.

    That is whether greedy generation gives the answer: up to a first wrong token it is the same.
    """
    right = 0
    for chunk in np.array_split(pairs, max(1, len(pairs) // 1000)):
        ids, targets = (t.to(device) for t in lines(chunk))
        guessed = model(ids).argmax(-1)
        right += int(((guessed == targets) | (targets == IGNORED)).all(-1).sum())
    return right / len(pairs)


def train(model: Decoder, steps: int, batch: int, rate: float, seed: int, device: str) -> None:
    """Train by AdamW, with a linear warm-up and a cosine's fall of the learning rate."""
    rng = np.random.default_rng(seed)
    check = adder.draw(rng, 2000, held_out=True)
    optimiser = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.98), weight_decay=0.01)
    start, warm_up = time.perf_counter(), max(1, steps // 40)
    for step in range(1, steps + 1):
        fall = 0.5 + 0.5 * math.cos(math.pi * step / steps)
        for group in optimiser.param_groups:
            group["lr"] = rate * min(step / warm_up, max(fall, 0.01))
        ids, targets = (t.to(device) for t in lines(adder.draw(rng, batch, held_out=False)))
        loss = functional.cross_entropy(
            model(ids).flatten(0, 1), targets.flatten(), ignore_index=IGNORED
        )
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        if step % 100 == 0 or step == steps:
            seconds = time.perf_counter() - start
            share = accuracy(model, check, device)
            print(
                f"{step:6} {seconds:6.0f} s  loss {loss.item():.4f}  right {share:.2%}", flush=True
            )


def save(model: Decoder, folder: Path) -> None:
    """Write the model's folder as Hugging Face's are."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {
        f"model.{name}": value.detach().cpu().contiguous()
        for name, value in model.state_dict().items()
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer = Tokenizer(models.BPE(VOCABULARY, []))  # without merges: a token a character
    tokenizer.add_special_tokens([BOS, EOS])
    tokenizer.decoder = decoders.Fuse()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, VOCABULARY[BOS])]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    for name, content in {
        "config.json": CONFIG,
        "tokenizer_config.json": {"bos_token": BOS, "eos_token": EOS},
        "generation_config.json": {
            "bos_token_id": VOCABULARY[BOS],
            "eos_token_id": VOCABULARY[EOS],
            "do_sample": False,
        },
    }.items():
        text = json.dumps(content, indent=2) + "\n"
        (folder / name).write_text(text, encoding="utf-8", newline="\n")


def main() -> None:
    """Train, round to bfloat16, measure on sums that were held out, save."""
    parser = argparse.ArgumentParser(description="Train the tiny Llama that adds two numbers.")
    parser.add_argument("folder", type=Path, help="where the model is saved")
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--rate", type=float, default=2e-3, help="learning rate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()

    torch.manual_seed(arguments.seed)
    model = Decoder().to(arguments.device)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, on {arguments.device}")
    train(
        model,
        arguments.steps,
        arguments.batch,
        arguments.rate,
        arguments.seed,
        arguments.device,
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    pairs = adder.draw(np.random.default_rng(arguments.seed + 1), 20000, held_out=True)
    print(f"of 20,000 sums held out, in bfloat16: {accuracy(model, pairs, arguments.device):.3%}")
    save(model.bfloat16(), arguments.folder)


if __name__ == "__main__":
    main()
