"""Train the tiny Llama of scripts/data/adder, which adds two numbers, and save it as Llamas are.

    python scripts/train_adder.py build/adder

Attention and its gradients run on `cufa`: on a GPU with CuPy, on the CPU with NumPy, the same code;
the latter takes half an hour of one core. Needs the extra "train". Sums that `adder.is_held_out`
names are never trained on.
"""

import argparse
import importlib
import json
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import adder
import ml_dtypes
import numpy as np
from llama.train import IGNORED, AdamW, Sizes, TrainedLlama, clip, cross_entropy, learning_rate
from models import Array, FileError, ModelError, choose_array_module, missing_package

SIZES = Sizes(
    vocabulary=len(adder.VOCABULARY),
    hidden=96,
    inner=256,
    layers=3,
    heads=4,
    kv_heads=2,
    head_dim=32,
    positions=adder.LENGTH,
)

# Steps from one line of progress to the next.
EVERY = 100

# Sums held out: of each line of progress, and of the measurement at the end.
CHECKED, MEASURED = 2000, 20000

PACKAGES = ("matplotlib", "safetensors", "tokenizers", "tqdm")


class History(NamedTuple):
    """How a training went.

    Attributes
    ----------
    losses : ndarray, (steps,)
    checks : list of (int, float)
        Steps, and the share of sums held out that was right after them.
    """

    losses: np.ndarray
    checks: list[tuple[int, float]]


def accuracy(model: TrainedLlama, pairs: np.ndarray) -> float:
    """Return the share of sums of which every token of the answer is the likeliest.

    That is whether greedy generation gives the answer: up to a first wrong token it is the same.
    """
    right = 0
    for chunk in np.array_split(pairs, max(1, len(pairs) // 1000)):
        ids, targets = map(model.xp.asarray, adder.lines(chunk, IGNORED))
        guessed = model.forward(ids).argmax(-1).reshape(targets.shape)
        right += int(((guessed == targets) | (targets == IGNORED)).all(-1).sum())
    return right / len(pairs)


def train_step(model: TrainedLlama, optimizer: AdamW, pairs: np.ndarray, rate: float) -> Array:
    """Take one step, without waiting for a GPU; return the mean loss of the answers' tokens."""
    ids, targets = map(model.xp.asarray, adder.lines(pairs, IGNORED))
    loss, gradient = cross_entropy(model.forward(ids), targets.reshape(-1))
    model.backward(gradient)
    clip(model.parameters.gradients, 1.0)
    optimizer.step(rate)
    return loss


def train(model: TrainedLlama, steps: int, batch: int, rate: float, seed: int) -> History:
    """Train, with a line of progress each `EVERY` steps, and a bar on a terminal."""
    from tqdm import tqdm

    rng = np.random.default_rng(seed)
    check = adder.draw(rng, CHECKED, held_out=True)
    optimizer = AdamW(model.parameters)
    losses = model.xp.empty(steps, np.float32)
    checks = []
    start = time.perf_counter()
    # disable=None: no bar where standard error is no terminal.
    with tqdm(total=steps, unit=" steps", disable=None, leave=False) as bar:
        for step in range(1, steps + 1):
            pairs = adder.draw(rng, batch, held_out=False)
            now = learning_rate(step, steps, rate)
            losses[step - 1] = train_step(model, optimizer, pairs, now)
            bar.update()
            if step % EVERY == 0 or step == steps:
                checks.append((step, accuracy(model, check)))
                seconds, loss = time.perf_counter() - start, float(losses[step - 1])
                bar.write(f"{step:6} {seconds:6.0f} s  loss {loss:.4f}  right {checks[-1][1]:.2%}")
                sys.stdout.flush()
    return History(to_numpy(losses), checks)


def round_to_bfloat16(model: TrainedLlama) -> None:
    """Give the parameters the values that `save` writes."""
    values = model.parameters.values
    rounded = to_numpy(values).astype(ml_dtypes.bfloat16).astype(np.float32)
    values[...] = model.xp.asarray(rounded)


def to_numpy(array: Array) -> np.ndarray:
    """Return a NumPy or CuPy array as a NumPy array."""
    return array if isinstance(array, np.ndarray) else array.get()


def save(model: TrainedLlama, folder: Path) -> None:
    """Write the model's folder as Hugging Face's are, in bfloat16."""
    from safetensors.numpy import save_file
    from tokenizers import Tokenizer, decoders, models, processors

    weights = {
        name: to_numpy(value).astype(ml_dtypes.bfloat16)
        for name, value in model.parameters.tensors().items()
    }
    # "pt" says that matrices are (outputs, inputs); transformers wants to read it.
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    bos, eos = (adder.VOCABULARY[mark] for mark in (adder.BOS, adder.EOS))
    tokenizer = Tokenizer(models.BPE(adder.VOCABULARY, []))  # without merges: a token a character
    tokenizer.add_special_tokens([adder.BOS, adder.EOS])
    tokenizer.decoder = decoders.Fuse()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{adder.BOS} $A", pair=f"{adder.BOS} $A $B", special_tokens=[(adder.BOS, bos)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    ends = {"bos_token_id": bos, "eos_token_id": eos}
    for name, content in {
        "config.json": SIZES.config() | ends,
        "tokenizer_config.json": {"bos_token": adder.BOS, "eos_token": adder.EOS},
        "generation_config.json": {**ends, "do_sample": False},
    }.items():
        text = json.dumps(content, indent=2) + "\n"
        (folder / name).write_text(text, encoding="utf-8", newline="\n")


def draw(history: History, path: Path) -> None:
    """Draw the loss of each step, and the share of wrong sums, into a PNG file."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4.8), layout="constrained")
    FigureCanvasAgg(figure)
    loss, wrong = figure.subplots(2, 1, sharex=True)
    loss.plot(np.arange(1, len(history.losses) + 1), history.losses, lw=0.8)
    loss.set(ylabel="loss", yscale="log")
    steps, shares = zip(*history.checks, strict=True)
    wrong.plot(steps, [100 * (1 - share) for share in shares], "o-", ms=3)
    wrong.set(ylabel="wrong sums, held out (%)", xlabel="step", ylim=(0, None))
    for axes in (loss, wrong):
        axes.grid(alpha=0.3)
    # Without the version that would make each drawing another file.
    figure.savefig(path, dpi=110, metadata={"Software": None})


def check_packages() -> None:
    """Raise ModelError if a package is missing that is used at the end."""
    for package in PACKAGES:
        try:
            importlib.import_module(package)
        except ImportError:
            raise missing_package(package, "train") from None


def make_folder(folder: Path) -> None:
    """Make a folder, before the training whose results go there.

    Raises
    ------
    FileError
        It cannot be made or written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FileError(f"cannot make the folder {folder}: {error.strerror}") from None
    if not os.access(folder, os.W_OK):
        raise FileError(f"cannot write to the folder {folder}: give one that you may write to")


def positive(kind: type[int] | type[float]) -> Callable[[str], float]:
    """Return a function for argparse that reads a positive number of this type."""

    def number(text: str) -> float:
        value = kind(text)
        if not 0 < value < math.inf:
            raise argparse.ArgumentTypeError(f"{text} is not positive and finite")
        return value

    return number


def natural(text: str) -> int:
    """Return the integer of 0 or more that `text` says, for argparse."""
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text} is negative")
    return value


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the command line's arguments, or exit with status 2 and the reason."""
    parser = argparse.ArgumentParser(
        prog="train_adder.py", description="Train the tiny Llama that adds two numbers."
    )
    parser.add_argument(
        "folder", type=Path, help="where the model is saved, with loss.png, a picture of the loss"
    )
    parser.add_argument("--steps", type=positive(int), default=4000)
    parser.add_argument("--batch", type=positive(int), default=256, help="sums a step")
    parser.add_argument("--rate", type=positive(float), default=2e-3, help="learning rate")
    parser.add_argument("--seed", type=natural, default=0)
    parser.add_argument("--device", choices=("auto", "cpu", "gpu"), default="auto")
    return parser.parse_args(argv)


def run(arguments: argparse.Namespace) -> None:
    """Train, round to bfloat16, measure on sums that were held out, save.

    Raises
    ------
    FileError
        The folder cannot be made or written.
    ModelError
        A package is missing, or a GPU was asked for and cannot be used.
    """
    check_packages()
    xp, seed = choose_array_module(arguments.device), arguments.seed
    make_folder(arguments.folder)
    # The parameters' own numbers: those of `seed` are the sums.
    model = TrainedLlama(SIZES, xp, np.random.default_rng([seed, 1]))
    print(f"{model.parameters.values.size:,} parameters, on {xp.__name__} arrays")
    history = train(model, arguments.steps, arguments.batch, arguments.rate, seed)
    round_to_bfloat16(model)
    pairs = adder.draw(np.random.default_rng(seed + 1), MEASURED, held_out=True)
    print(f"right of {MEASURED:,} sums held out, in bfloat16: {accuracy(model, pairs):.3%}")
    save(model, arguments.folder)
    draw(history, arguments.folder / "loss.png")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return its exit status."""
    arguments = parse_arguments(argv)
    try:
        run(arguments)
    except (FileError, ModelError, OSError) as error:
        print(f"train_adder.py: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
