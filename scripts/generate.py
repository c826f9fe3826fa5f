"""Generate text with a Llama, Mistral, Qwen, Gemma, gpt-oss or SmolLM, on cufa's attention.

    python scripts/generate.py scripts/data/adder "47+285="
    python scripts/generate.py ~/models/Qwen2.5-0.5B-Instruct          # a conversation
    python scripts/generate.py ~/models/Qwen2.5-0.5B-Instruct < question.txt
    python scripts/generate.py ~/models/SmolLM2-135M-Instruct.Q4_1.gguf "What is a cat?"

On a GPU with CuPy, where a step is a CUDA graph, and on the CPU with NumPy.
"""

import argparse
import io
import math
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path

from llama import CACHES, Llama, Prompt, Settings, Speed, Tokenizer, complete, read_defaults
from models import DTYPES, FileError, ModelError, drop_output, open_text, shown

#: New tokens where the user names no number; fewer where the model takes no more.
NEW_TOKENS = 512

INTERRUPTED = 130  # a shell's status of a command that Ctrl-C ended


class Assistant:
    """A model with its tokenizer and the user's settings.

    Parameters
    ----------
    arguments : argparse.Namespace
        As `parse_arguments` returns them.

    Raises
    ------
    ModelError
        As `Llama` and `Tokenizer`.
    """

    def __init__(self, arguments: argparse.Namespace) -> None:
        path: Path = arguments.model
        if not path.exists():
            raise ModelError(f"there is no folder or file {path} (models are not downloaded)")
        self._tokenizer = Tokenizer(path)
        defaults = read_defaults(path)
        self.settings = settings(arguments, defaults.settings)
        self._model = Llama(path, arguments.device, arguments.dtype, arguments.cache)
        self._eos = {*defaults.eos, *self._model.config.eos, *self._tokenizer.eos}
        self._count = arguments.max_new_tokens
        self._page_size = arguments.page_size
        self._system = []
        if arguments.system is not None:
            self._system.append({"role": "system", "content": arguments.system})
        self.chats = self._tokenizer.template is not None and not arguments.raw
        if self._system and not self.chats:
            raise ModelError("--system needs a chat template, and no --raw")

    def prompt(self, messages: Sequence[dict[str, str]], number: int) -> Prompt:
        """Return a conversation as a prompt, or the last message alone if there are no chats.

        Raises
        ------
        ModelError
            The chat template fails, or it is too long for the model, empty or not UTF-8.
        """
        if self.chats:
            tokens = self._tokenizer.chat([*self._system, *messages])
        else:
            tokens = self._tokenizer.encode(messages[-1]["content"])
        if not tokens:
            raise ModelError("the prompt is empty, and the model has no token that begins a text")
        room = self._model.longest - len(tokens)
        count = self._count or max(1, min(NEW_TOKENS, room))
        self._model.check_length(len(tokens) + count)
        return Prompt(tokens, count, number)

    def answer(self, prompts: Sequence[Prompt], headings: Sequence[str]) -> list[str]:
        """Print what follows each prompt, in their order, and return it.

        The first that is not complete is printed as it comes; those after it, when it is.
        """
        texts = [""] * len(prompts)
        done = [False] * len(prompts)
        current = 0
        emit(headings[0])
        speed = Speed()
        model, tokenizer, eos = self._model, self._tokenizer, self._eos
        how = self.settings, eos, speed, self._page_size
        for piece in complete(model, tokenizer, prompts, *how):
            texts[piece.prompt] += piece.text
            done[piece.prompt] = piece.last
            if piece.prompt == current:
                emit(piece.text)
                while current < len(prompts) and done[current]:
                    emit("\n")
                    current += 1
                    if current < len(prompts):
                        emit(headings[current] + texts[current])
        line = str(speed)
        if speed.cut:
            line += f"; {speed.cut} of {len(prompts)} texts cut there"
        print(line, file=sys.stderr)
        return texts


def settings(arguments: argparse.Namespace, defaults: Settings) -> Settings:
    """Return the folder's settings with the user's in their place."""
    chosen = {
        name: value
        for name in ("temperature", "top_k", "top_p", "repetition_penalty")
        if (value := getattr(arguments, name)) is not None
    }
    if "temperature" not in chosen and ("top_k" in chosen or "top_p" in chosen):
        chosen["temperature"] = defaults.temperature or 1.0
    seed = secrets.randbelow(2**32) if arguments.seed is None else arguments.seed
    return defaults._replace(**chosen, seed=seed)


def emit(text: str) -> None:
    """Print text at once, as it is."""
    print(text, end="", flush=True)


def converse(assistant: Assistant) -> None:
    """Answer each line of standard input; a chat model knows what was said before."""
    messages: list[dict[str, str]] = []
    turn = 0
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "")
        except EOFError:
            return
        if not line.strip():
            continue
        messages.append({"role": "user", "content": line})
        try:
            prompt = assistant.prompt(messages, turn)
        except ModelError as error:
            print(f"generate.py: {error}", file=sys.stderr)
            messages.pop()
            continue
        try:
            (text,) = assistant.answer([prompt], [""])
        except KeyboardInterrupt:  # of this answer alone
            emit("\n")
            messages.pop()
            continue
        messages.append({"role": "assistant", "content": text})
        turn += 1


def read_prompts(arguments: argparse.Namespace) -> list[str]:
    """Return the prompts of the command line, of files and of standard input.

    Raises
    ------
    FileError
        A file cannot be read or is not UTF-8, or there is no prompt in it.
    """
    prompts = list(arguments.prompts)
    files = list(arguments.file)
    if not prompts and not files and not arguments.lines:
        files = ["-"]
    for name in files:
        with open_text(name) as file:
            prompts.append(file.read().rstrip("\n"))
    for name in arguments.lines:
        with open_text(name) as file:
            lines = [line.rstrip("\n") for line in file if line.strip()]
        if not lines:
            raise FileError(f"no text in {shown(name)}")
        prompts += lines
    return prompts


def answer_all(assistant: Assistant, texts: Sequence[str], batch: int) -> None:
    """Answer each text by itself, a batch at a time."""
    prompts = [
        assistant.prompt([{"role": "user", "content": text}], number)
        for number, text in enumerate(texts)
    ]
    headings = [f"> {text}\n" for text in texts] if len(texts) > 1 else [""]
    for start in range(0, len(prompts), batch):
        some = slice(start, start + batch)
        assistant.answer(prompts[some], headings[some])


def positive(text: str) -> int:
    """Return the positive integer that `text` says, for argparse."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not positive")
    return value


def seed(text: str) -> int:
    """Return the integer of 0 or more that `text` says, for argparse."""
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text} is negative")
    return value


def temperature(text: str) -> float:
    """Return the number of 0 or more that `text` says, for argparse."""
    value = float(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is no number of 0 or more")
    return value


def penalty(text: str) -> float:
    """Return the positive number that `text` says, for argparse."""
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is no positive number")
    return value


def probability(text: str) -> float:
    """Return the number above 0 and up to 1 that `text` says, for argparse."""
    value = float(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not above 0 and up to 1")
    return value


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the command line's arguments, or exit with status 2 and the reason."""
    parser = argparse.ArgumentParser(
        prog="generate.py",
        description="Generate text with a Llama, Mistral, Qwen, Gemma, gpt-oss or SmolLM.",
        epilog="Without prompts, on a terminal, each line that you type is answered. Defaults "
        "are those of the folder's generation_config.json.",
    )
    parser.add_argument(
        "model",
        type=Path,
        help="a folder with config.json, safetensors and tokenizer.json, or a GGUF file",
    )
    parser.add_argument("prompts", nargs="*", metavar="PROMPT", help="what to answer or go on from")
    parser.add_argument(
        "-f",
        "--file",
        action="append",
        default=[],
        metavar="FILE",
        help="a prompt in UTF-8; - is standard input, the default where that is no terminal",
    )
    parser.add_argument(
        "-l",
        "--lines",
        action="append",
        default=[],
        metavar="FILE",
        help="a prompt a line; blank lines are left out",
    )
    parser.add_argument(
        "-i", "--interactive", action="store_true", help="answer each line of standard input"
    )
    parser.add_argument(
        "--system",
        metavar="TEXT",
        help="what a chat model is told before",
    )
    parser.add_argument(
        "--raw", action="store_true", help="go on from prompts as they are, without chat template"
    )
    parser.add_argument(
        "-n",
        "--max-new-tokens",
        type=positive,
        metavar="N",
        help=f"default {NEW_TOKENS}, or what the model has room for",
    )
    parser.add_argument(
        "-t", "--temperature", type=temperature, metavar="T", help="0: always the likeliest token"
    )
    parser.add_argument(
        "--top-k", type=positive, metavar="K", help="draw from the K likeliest tokens"
    )
    parser.add_argument(
        "--top-p",
        type=probability,
        metavar="P",
        help="draw from the fewest tokens that have the probability P together",
    )
    parser.add_argument(
        "--repetition-penalty", type=penalty, metavar="R", help="above 1: fewer repetitions"
    )
    parser.add_argument("--seed", type=seed, metavar="S", help="the same seed, the same text")
    parser.add_argument(
        "--batch", type=positive, default=16, metavar="N", help="prompts at a time (default 16)"
    )
    parser.add_argument(
        "--page-size",
        type=positive,
        metavar="N",
        help="keep keys and values in pages of N tokens, as many as each sequence needs",
    )
    parser.add_argument("--device", choices=("auto", "cpu", "gpu"), default="auto")
    parser.add_argument(
        "--dtype",
        choices=("auto", *DTYPES),
        default="auto",
        help="auto: the checkpoint's on a GPU, float32 on the CPU",
    )
    parser.add_argument(
        "--cache",
        choices=CACHES,
        default="auto",
        help="keys and values in 8 bits, with a scale for each token and head: half of the memory "
        "of 16 bits; int8 is more exact (auto: in the model's dtype)",
    )
    arguments = parser.parse_intermixed_args(argv)
    given = arguments.prompts or arguments.file or arguments.lines
    if arguments.interactive and given:
        parser.error("--interactive takes its prompts from standard input alone")
    if arguments.interactive and sys.stdin is None:
        parser.error("--interactive: standard input is closed")
    arguments.interactive |= not given and sys.stdin is not None and sys.stdin.isatty()
    return arguments


def run(arguments: argparse.Namespace) -> None:
    """Load the model and answer.

    Raises
    ------
    FileError
        As `read_prompts`.
    ModelError
        As `Assistant`.
    """
    if arguments.interactive:
        assistant = Assistant(arguments)
        converse(assistant)
    else:
        texts = read_prompts(arguments)
        assistant = Assistant(arguments)
        answer_all(assistant, texts, arguments.batch)
    if assistant.settings.temperature > 0 and arguments.seed is None:
        print(f"seed {assistant.settings.seed}", file=sys.stderr)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return its exit status."""
    arguments = parse_arguments(argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a model may say what the terminal cannot
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # what is not UTF-8 is refused line by line
    try:
        run(arguments)
    except (FileError, ModelError, ValueError) as error:  # the last is what cufa refuses
        print(f"generate.py: {error}", file=sys.stderr)
        return 2
    except MemoryError as error:  # CuPy's is one, too
        print(f"generate.py: out of memory: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # whoever read has gone
        drop_output()
        return 1
    except OSError as error:
        drop_output()
        print(f"generate.py: {error.strerror or error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
