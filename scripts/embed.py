"""Embed the lines of text files with all-MiniLM-L6-v2 and search them by meaning.

    python scripts/embed.py scripts/data/sentences.txt --query "how do plants make food"
    cat notes.txt | python scripts/embed.py --save notes.npy

Attention runs on `cufa.attention`: on a GPU with CuPy, on the CPU with NumPy, the same code.
"""

import argparse
import io
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from minilm import MiniLM
from models import (
    DTYPES,
    FileError,
    ModelError,
    drop_output,
    is_text,
    missing_package,
    open_text,
    shown,
)

# Seconds of work before a progress bar appears.
PROGRESS_DELAY = 1.0


class Line(NamedTuple):
    """A line of text and the place where it stands, as "file:number"."""

    place: str
    text: str


def read_lines(names: Sequence[str]) -> list[Line]:
    """Return the lines of UTF-8 files that hold more than white space; "-" is standard input.

    Raises
    ------
    FileError
        A file cannot be read or is not UTF-8, or none holds any text.
    """
    lines = [line for name in names for line in _lines_of(name)]
    if not lines:
        raise FileError(f"no text in {', '.join(map(shown, names))}")
    return lines


def _lines_of(name: str) -> Iterator[Line]:
    with open_text(name) as file:
        for number, text in enumerate(file, start=1):
            if text := text.strip():
                yield Line(f"{shown(name)}:{number}", text)


def embed(model: MiniLM, texts: Sequence[str]) -> Any:
    """Return `model.encode(texts)`; work long enough to wait for shows a bar on a terminal."""
    try:
        from tqdm import tqdm
    except ImportError:
        raise missing_package("tqdm", "embed") from None
    # disable=None: no bar where standard error is no terminal.
    with tqdm(
        total=len(texts), unit=" lines", delay=PROGRESS_DELAY, disable=None, leave=False
    ) as bar:
        return model.encode(texts, progress=bar.update)


def top_lines(embeddings: Any, query: Any, count: int) -> list[tuple[float, int]]:
    """Return the `count` rows nearest to `query` as (cosine similarity, row), best first."""
    scores = to_numpy(embeddings @ query)
    order = np.argsort(-scores, kind="stable")[:count]
    return [(float(scores[row]), int(row)) for row in order]


def to_numpy(array: Any) -> np.ndarray:
    """Return a NumPy or CuPy array as a NumPy array."""
    return array if isinstance(array, np.ndarray) else array.get()


def positive(text: str) -> int:
    """Return the positive integer that `text` says, for argparse."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not positive")
    return value


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the command line's arguments, or exit with status 2 and the reason."""
    parser = argparse.ArgumentParser(
        prog="embed.py",
        description="Embed the lines of text files and search them by meaning.",
        epilog="A line is cut after 256 tokens. Blank lines are left out.",
    )
    parser.add_argument(
        "files", nargs="*", metavar="FILE", help="UTF-8 text; none, or -, is standard input"
    )
    parser.add_argument(
        "-q",
        "--query",
        action="append",
        default=[],
        metavar="TEXT",
        help="print the lines nearest in meaning, with cosine similarities; may be repeated",
    )
    parser.add_argument(
        "-k", "--top", type=positive, default=3, metavar="N", help="lines a query (default 3)"
    )
    parser.add_argument(
        "-s", "--save", type=Path, metavar="OUT.npy", help="write the embeddings, a row a line"
    )
    parser.add_argument("--device", choices=("auto", "cpu", "gpu"), default="auto")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="float32")
    arguments = parser.parse_args(argv)
    if not arguments.query and arguments.save is None:
        parser.error("nothing to do: give --query, --save or both")
    if any(not query.strip() for query in arguments.query):
        parser.error("--query is empty")
    if not all(map(is_text, arguments.query)):
        parser.error("--query is not UTF-8 text")
    if arguments.save is not None and not arguments.save.parent.is_dir():
        parser.error(f"--save: there is no folder {arguments.save.parent}")
    return arguments


def run(arguments: argparse.Namespace) -> None:
    """Do what the arguments ask: read, embed, save, search.

    Raises
    ------
    FileError
        As `read_lines`, or the output cannot be written.
    ModelError
        As `MiniLM`.
    """
    lines = read_lines(arguments.files or ["-"])
    model = MiniLM(arguments.device, arguments.dtype)
    embeddings = embed(model, [line.text for line in lines])
    if arguments.save is not None:
        try:
            # An open file, so that NumPy does not append ".npy" to another name.
            with open(arguments.save, "wb") as file:
                np.save(file, to_numpy(embeddings))
        except OSError as error:
            raise FileError(f"cannot write {arguments.save}: {error.strerror}") from None
    if arguments.query:
        for text, query in zip(arguments.query, model.encode(arguments.query), strict=True):
            print(f"\n{text}")
            for score, row in top_lines(embeddings, query, arguments.top):
                print(f"  {score:.3f}  {lines[row].text}  ({lines[row].place})")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return its exit status."""
    arguments = parse_arguments(argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # lines may hold what the terminal cannot show
    try:
        run(arguments)
        sys.stdout.flush()
    except (FileError, ModelError) as error:
        print(f"embed.py: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # whoever read has gone
        drop_output()
        return 1
    except OSError as error:
        drop_output()
        print(f"embed.py: {error.strerror or error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
