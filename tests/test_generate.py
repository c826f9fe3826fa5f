"""scripts/generate.py: batches, limits, conversations, and its commands."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import generate as script
import llama_folders
import numpy as np
import pytest
from llama import (
    Llama,
    Prompt,
    Settings,
    Speed,
    Tokenizer,
    complete,
    generate,
    generation,
    read_defaults,
)
from llama.decoder import Decoder
from models import HostCopy, ModelError, flat
from safetensors.numpy import save_file

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "scripts" / "generate.py"

VOCABULARY = llama_folders.VOCABULARY
LENGTHS = [5, 30, 1, 5, 17, 30]
PROMPTS = [
    Prompt(np.random.default_rng(i).integers(0, VOCABULARY, length).tolist(), 20, i)
    for i, length in enumerate(LENGTHS)
]
SAMPLED = Settings(1.0, top_k=20, top_p=0.9, repetition_penalty=1.1, seed=3)


@pytest.fixture(scope="module", params=["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Llama:
    folder = tmp_path_factory.mktemp("qwen3")
    llama_folders.write(folder, "qwen3", max_position_embeddings=64)
    return Llama(folder, request.param)


def tokens(model: Llama, prompts: list[Prompt], settings: Settings, count: int = 20) -> np.ndarray:
    """Return the tokens that follow, (prompts, count)."""
    prompts = [prompt._replace(max_new_tokens=count) for prompt in prompts]
    return np.stack(list(generate(model, prompts, settings)), axis=1)


def oracle(model: Llama, prompt: Prompt, count: int) -> list[int]:
    """Return the likeliest tokens, each from the whole text again."""
    text = list(prompt.tokens)
    for _ in range(count):
        states = model.extend(model.cache([99]), model.xp.asarray([text]))
        text.append(int(model.logits(states[:, -1]).argmax()))
    return text[-count:]


def test_prompts_may_come_behind_options() -> None:
    arguments = script.parse_arguments(["folder", "-n", "3", "one", "--seed", "1", "two"])
    assert (arguments.prompts, arguments.max_new_tokens) == (["one", "two"], 3)


def test_greedy_takes_the_likeliest_token_of_the_whole_text(model: Llama) -> None:
    found = tokens(model, PROMPTS, Settings())
    for prompt, row in zip(PROMPTS, found.tolist(), strict=True):
        assert row == oracle(model, prompt, 20)


@pytest.mark.parametrize("settings", [Settings(), SAMPLED], ids=["greedy", "sampled"])
def test_a_batch_gives_what_each_prompt_gives_alone(model: Llama, settings: Settings) -> None:
    together = tokens(model, PROMPTS, settings)
    assert len(np.unique(together)) > 10
    for prompt, row in zip(PROMPTS, together, strict=True):
        assert np.array_equal(tokens(model, [prompt], settings)[0], row)
    order = [4, 0, 2, 5, 1, 3]
    assert np.array_equal(tokens(model, [PROMPTS[i] for i in order], settings), together[order])


@pytest.mark.parametrize("most", [1, 7, 35, 70])
def test_prompts_in_parts(model: Llama, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = tokens(model, PROMPTS, Settings(), 8)
    monkeypatch.setattr(generation, "PREFILL_TOKENS", most)
    assert np.array_equal(tokens(model, PROMPTS, Settings(), 8), whole)


@pytest.mark.parametrize("page_size", [1, 16, 100, 2**40])
def test_pages_make_no_difference(model: Llama, page_size: int) -> None:
    prompts = [prompt._replace(max_new_tokens=3 + i) for i, prompt in enumerate(PROMPTS)]
    whole = list(generate(model, prompts, SAMPLED))
    paged = list(generate(model, prompts, SAMPLED, page_size))
    for step, (tokens_, others) in enumerate(zip(whole, paged, strict=True)):
        going_on = [prompt.max_new_tokens > step for prompt in prompts]
        assert np.array_equal(tokens_[going_on], others[going_on])


def test_a_step_leaves_out_who_is_at_the_end(model: Llama) -> None:
    decoder = Decoder(model, [9, 5, 9], None)
    for counts in ([1, 1, 1], [1, 0, 1], 1):
        decoder.step(model.xp.asarray([3, 4, 5]), counts)
    assert decoder.cache.host_lengths.tolist() == [3, 2, 3]


@pytest.mark.parametrize("page_size", [None, 4])
def test_a_cache_is_used_again(model: Llama, page_size: int | None) -> None:
    model.idle = None
    first = list(generate(model, PROMPTS[:2], Settings(), page_size))
    decoder = model.idle
    assert np.array_equal(list(generate(model, PROMPTS[:2], Settings(), page_size)), first)
    assert model.idle is decoder
    # By one at a time, and not by one who needs another.
    both = zip(
        *(generate(model, PROMPTS[:2], Settings(), page_size) for _ in range(2)), strict=True
    )
    for tokens_, one, other in zip(first, *zip(*both, strict=True), strict=True):
        assert np.array_equal(tokens_, one)
        assert np.array_equal(tokens_, other)
    decoder = model.idle
    list(generate(model, PROMPTS[:3], Settings(), page_size))
    assert model.idle is not decoder
    decoder = model.idle
    next(generate(model, PROMPTS[:3], Settings(), 5))
    assert model.idle is not decoder


def test_work_ends_with_the_iterator(model: Llama, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = []
    step = Decoder.step

    def counted(*arguments: Any) -> Any:
        steps.append(1)
        return step(*arguments)

    monkeypatch.setattr(Decoder, "step", counted)
    for number, _ in enumerate(generate(model, PROMPTS[:1], Settings())):
        if number == 2:
            break
    assert len(steps) <= 3  # two tokens, and on a GPU the one that was under way
    steps.clear()
    assert len(list(generate(model, PROMPTS[:1], Settings()))) == 20
    assert len(steps) == 19


@pytest.mark.parametrize("taken", [1, 3, 20])
def test_no_copy_is_left_under_way(
    model: Llama, monkeypatch: pytest.MonkeyPatch, taken: int
) -> None:
    """Its memory on the host would be another's while a GPU still writes there."""
    made: list[HostCopy] = []
    waited: list[HostCopy] = []

    class Copy(HostCopy):
        def __init__(self, array: Any) -> None:
            super().__init__(array)
            made.append(self)

        def wait(self) -> np.ndarray:
            waited.append(self)
            return super().wait()

    monkeypatch.setattr(generation, "HostCopy", Copy)
    # On the CPU, too, a step is begun before the tokens of the one before it are there.
    monkeypatch.setattr(generation, "np", SimpleNamespace(**vars(np)))
    tokens_: Any = generate(model, PROMPTS[:1], Settings())
    for _ in range(taken):
        next(tokens_)
    tokens_.close()
    assert len(made) == min(taken + 1, 20)
    assert waited == made


# --- CUDA graphs ---


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return folders of random weights of three architectures."""
    names = ("llama3", "llama-biased-linear", "qwen3")
    made = {name: tmp_path_factory.mktemp(name) for name in names}
    for name, folder in made.items():
        llama_folders.write(folder, name)
    return made


@pytest.mark.gpu
@pytest.mark.parametrize("page_size", [None, 16])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("name", ["llama3", "llama-biased-linear", "qwen3"])
def test_a_replayed_step_computes_what_the_step_does(
    folders: dict[str, Path],
    name: str,
    dtype: str,
    page_size: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = Llama(folders[name], "gpu", dtype)
    lengths = [1, 700, 33]
    tokens = np.random.default_rng(1).integers(0, VOCABULARY, (3, 740))

    def logits(steps: int) -> list[np.ndarray]:
        decoder = Decoder(model, [n + steps for n in lengths], page_size)
        for i, n in enumerate(lengths):
            model.extend(decoder.cache[i : i + 1], model.xp.asarray(tokens[i : i + 1, :n]))
        found = []
        for step in range(steps):
            ids = [tokens[i, n + step] for i, n in enumerate(lengths)]
            found.append(decoder.step(model.xp.asarray(ids)).get())
        assert (decoder._graph is not None) == (steps > 1 and model.is_capturable(3))
        return found

    replayed = logits(40)
    with monkeypatch.context() as patch:
        patch.setattr(Llama, "is_capturable", lambda *_: False)
        plain = logits(40)
    for one, other in zip(replayed, plain, strict=True):
        assert np.array_equal(one, other)


@pytest.mark.gpu
@pytest.mark.parametrize("settings", [Settings(), SAMPLED], ids=["greedy", "sampled"])
def test_more_sequences_than_a_graph_takes(folders: dict[str, Path], settings: Settings) -> None:
    model = Llama(folders["qwen3"], "gpu", "float32")
    count = flat.MOST_ROWS + 1
    assert model.is_capturable(count - 1)
    assert not model.is_capturable(count)
    prompts = [PROMPTS[i % len(PROMPTS)]._replace(number=i) for i in range(count)]
    together = tokens(model, prompts, settings)
    assert np.array_equal(tokens(model, prompts[:-1], settings), together[:-1])


def test_limits(model: Llama) -> None:
    assert tokens(model, PROMPTS, Settings(), 34).shape == (6, 34)
    with pytest.raises(ModelError, match=r"65 tokens, .* exceed the model's 64 positions"):
        tokens(model, PROMPTS, Settings(), 35)
    for unknown in (VOCABULARY, -1):
        with pytest.raises(ModelError, match=f"token {unknown}, the model knows {VOCABULARY}"):
            next(generate(model, [*PROMPTS, Prompt([0, unknown, 0], 1)], Settings()))
    for nothing in ([], [Prompt([], 1)]):
        with pytest.raises(ValueError, match="needs a token"):
            next(generate(model, nothing, Settings()))
    with pytest.raises(ValueError, match="max_new_tokens must be at least 1"):
        next(generate(model, [*PROMPTS, Prompt([0], 0)], Settings()))
    with pytest.raises(ValueError, match="page_size must be at least 1, not 0"):
        next(generate(model, PROMPTS, Settings(), 0))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("value", [np.inf, np.nan, 3e38])
def test_logits_that_are_not_finite(tmp_path: Path, value: float) -> None:
    """An error says so, and no warning of NumPy's."""
    weights = llama_folders.write(tmp_path, "qwen2")
    weights["model.layers.1.mlp.down_proj.weight"][...] = value
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match="logits are not finite: some weight is not, or its dtype"):
        next(generate(Llama(tmp_path, "cpu"), PROMPTS, Settings()))


# --- text ---


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a chat model of random weights."""
    folder = tmp_path_factory.mktemp("chat")
    llama_folders.write(folder, "qwen2", vocab_size=300, max_position_embeddings=200)
    llama_folders.write_byte_tokenizer(folder, chat=True)
    (folder / "generation_config.json").write_text('{"eos_token_id": [256, 258]}')
    return folder


def test_texts_end_at_an_end_token(folder: Path) -> None:
    model, tokenizer = Llama(folder, "cpu"), Tokenizer(folder)
    counts = [12, 12, 12, 3, 7]
    texts = [tokenizer.encode("a"), tokenizer.encode("bcd"), [257], [101], [5, 6]]
    prompts = [Prompt(text, count) for text, count in zip(texts, counts, strict=True)]
    following = tokens(model, prompts, Settings(), 12)
    eos = set(following[0, 4:6].tolist())  # tokens that come
    speed = Speed()
    pieces = list(complete(model, tokenizer, prompts, Settings(), eos, speed))
    cut = 0
    for i, (row, count) in enumerate(zip(following.tolist(), counts, strict=True)):
        end = next((place for place, token in enumerate(row[:count]) if token in eos), None)
        cut += end is None
        text = "".join(piece.text for piece in pieces if piece.prompt == i)
        assert text == tokenizer.decode(row[: count if end is None else end])
        assert [piece.last for piece in pieces if piece.prompt == i].count(True) == 1
    assert 0 < speed.cut == cut < 5
    assert str(speed).startswith("prompt 8 tokens, ")


def test_defaults(tmp_path: Path) -> None:
    assert read_defaults(tmp_path) == (Settings(), ())

    def read(**content: Any) -> tuple[Settings, tuple[int, ...]]:
        (tmp_path / "generation_config.json").write_text(json.dumps(content))
        return read_defaults(tmp_path)

    assert read(eos_token_id=7, temperature=0.6) == (Settings(), (7,))
    assert read(do_sample=True) == (Settings(1.0, top_k=50), ())
    found = read(
        do_sample=True,
        temperature=0.6,
        top_k=0,
        top_p=0.9,
        repetition_penalty=1.05,
        eos_token_id=[1, 2],
    )
    assert found == (Settings(0.6, None, 0.9, 1.05), (1, 2))
    with pytest.raises(ModelError, match=r"generation_config.json: top_p must be a positive num"):
        read(do_sample=True, top_p="high")


# --- the command ---


class Done(NamedTuple):
    """The results of a run of the command."""

    returncode: int
    stdout: str
    stderr: str


Command = Callable[..., Done]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Command:
    """Return what runs the command on the CPU: in this process, unless it reads standard input."""

    def command(*arguments: object, stdin: str | bytes = b"") -> Done:
        words = [*map(str, arguments), "--device", "cpu"]
        if stdin:
            done = subprocess.run(
                [sys.executable, str(SCRIPT), *words],
                input=stdin.encode() if isinstance(stdin, str) else stdin,
                capture_output=True,
                env=environment(),
            )
            return Done(done.returncode, done.stdout.decode(), done.stderr.decode())
        try:
            code = script.main(words)
        except SystemExit as exit_:
            code = int(exit_.code or 0)
        return Done(code, *capsys.readouterr())

    return command


def environment() -> dict[str, str]:
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONUTF8": "1"}


@pytest.fixture(scope="module")
def expected(folder: Path) -> Callable[[str], str]:
    """Return what gives the text that follows a prompt as it is, by 9 tokens."""
    model, tokenizer = Llama(folder, "cpu"), Tokenizer(folder)

    def text(prompt: str) -> str:
        row = tokens(model, [Prompt(tokenizer.encode(prompt), 9)], Settings(), 9)[0].tolist()
        end = next((i for i, token in enumerate(row) if token in (256, 258)), 9)
        return tokenizer.decode(row[:end])

    return text


def test_command_goes_on_from_prompts(
    run: Command, folder: Path, tmp_path: Path, expected: Callable[[str], str]
) -> None:
    done = run(folder, "Once", "--raw", "-n", 9)
    assert (done.returncode, done.stdout) == (0, expected("Once") + "\n")
    assert run(folder, "Once", "--raw", "-n", 9, "--page-size", 4).stdout == done.stdout
    in_8_bits = run(folder, "Once", "--raw", "-n", 9, "--cache", "int8", "--page-size", 4)
    assert (in_8_bits.returncode, in_8_bits.stdout[:4]) == (0, done.stdout[:4])
    (line,) = done.stderr.splitlines()
    assert line.startswith("prompt 4 tokens, ")
    assert "new 9 tokens, " in line
    assert line.endswith("/s; 1 of 1 texts cut there")

    (tmp_path / "one.txt").write_bytes("\ufeffTwo\nlines\n".encode())
    (tmp_path / "many.txt").write_bytes("first é\r\n\r\nsecond\n".encode())
    files = ("-f", tmp_path / "one.txt", "-l", tmp_path / "many.txt", "-f", "-")
    done = run(folder, "Once", *files, "--raw", "-n", 9, "--batch", 2, stdin="piped\n")
    texts = ["Once", "Two\nlines", "piped", "first é", "second"]
    assert done.stdout == "".join(f"> {text}\n{expected(text)}\n" for text in texts)
    assert len(done.stderr.splitlines()) == 3  # batches

    assert run(folder, "--raw", "-n", 9, stdin="piped\n").stdout == expected("piped") + "\n"


def test_command_converses(run: Command, folder: Path, expected: Callable[[str], str]) -> None:
    pytest.importorskip("jinja2")

    def turn(role: str, content: str) -> str:
        return f"<|im_start|>{role}\n{content}<|im_end|>\n"

    system, begin = turn("system", "Be brief."), "<|im_start|>assistant\n"
    first = expected(system + turn("user", "Hi") + begin)
    history = turn("user", "Hi") + turn("assistant", first) + turn("user", "And?")
    second = expected(system + history + begin)
    done = run(folder, "-i", "-n", 9, stdin="Hi\n\nAnd?\n")
    assert (done.returncode, done.stdout) == (0, f"{first}\n{second}\n")
    assert run(folder, "Hi", "-n", 9).stdout == first + "\n"
    told = expected(turn("system", "Sing.") + turn("user", "Hi") + begin)
    assert run(folder, "Hi", "-n", 9, "--system", "Sing.").stdout == told + "\n"
    # A turn that is too long is refused, and the conversation goes on.
    done = run(folder, "-i", "-n", 9, stdin=f"Hi\n{'x' * 200}\nAnd?\n")
    assert done.stdout == f"{first}\n{second}\n"
    assert "exceed the model's 200 positions" in done.stderr
    done = run(folder, "-i", "-n", 9, stdin=b"Hi\n\xe9\nAnd?\n")
    assert done.stdout == f"{first}\n{second}\n"
    assert "the text is not UTF-8" in done.stderr


def test_command_samples(run: Command, folder: Path) -> None:
    def sampled(*arguments: object) -> tuple[str, str]:
        done = run(folder, "a", "a", "--raw", "-n", 30, *arguments)
        assert done.returncode == 0, done.stderr
        return done.stdout, done.stderr

    text, errors = sampled("-t", 1.5, "--top-k", 40, "--top-p", 0.95, "--seed", 5)
    assert text == sampled("-t", 1.5, "--top-k", 40, "--top-p", 0.95, "--seed", 5)[0]
    assert "seed" not in errors
    first, second = text.removeprefix("> a\n").split("\n> a\n")
    assert first != second.removesuffix("\n")
    other, errors = sampled("--top-k", 40)
    assert errors.splitlines()[-1].startswith("seed ")
    again = sampled("--top-k", 40, "--seed", errors.split()[-1])
    assert again[0] == other != text


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_command_dtypes(
    run: Command, folder: Path, dtype: str, expected: Callable[[str], str]
) -> None:
    done = run(folder, "Once", "--raw", "-n", 2, "--dtype", dtype)
    assert done.returncode == 0, done.stderr
    assert expected("Once").startswith(done.stdout.rstrip("\n"))


def read_until(stream: Any, text: str) -> str:
    """Return what comes of a pipe up to a text."""
    found = b""
    while text.encode() not in found and (byte := stream.read(1)):
        found += byte
    return found.decode(errors="replace")


def test_command_streams_and_stops_when_interrupted(
    folder: Path, expected: Callable[[str], str]
) -> None:
    process = subprocess.Popen(
        [sys.executable, str(SCRIPT), str(folder), "-i", "--raw", "--device", "cpu", "-n", "190"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(),
    )
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(b"Once\n")
    process.stdin.flush()
    start = expected("Once")[:2]
    assert read_until(process.stdout, start).endswith(start)  # long before the text's end
    process.send_signal(signal.SIGINT)  # ends this text, or if that is over, the conversation
    out, errors = process.communicate(timeout=60)
    assert process.returncode in (0, 130)
    assert b"Traceback" not in errors
    assert out.endswith(b"\n") or process.returncode == 130


def test_command_is_silent_when_nobody_reads_on(folder: Path) -> None:
    command = [sys.executable, str(SCRIPT), str(folder), "a", "--raw", "--device", "cpu"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment()
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait() == 1


def test_command_without_standard_input(folder: Path) -> None:
    for words, message in ((), "cannot read standard input"), (("-i",), "--interactive: standard"):
        command = [sys.executable, str(SCRIPT), str(folder), "--device", "cpu", *words]
        done = subprocess.run(
            ["sh", "-c", 'exec "$@" <&-', "sh", *command],
            capture_output=True,
            text=True,
            env=environment(),
        )
        assert (done.returncode, done.stdout) == (2, "")
        assert message in done.stderr.splitlines()[-1]
        assert "is closed" in done.stderr.splitlines()[-1]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_command_whose_output_cannot_be_written(folder: Path) -> None:
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [sys.executable, str(SCRIPT), str(folder), "a", "--raw", "--device", "cpu"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(),
        )
    assert (done.returncode, done.stderr) == (2, "generate.py: No space left on device\n")


@pytest.mark.parametrize(
    ("arguments", "stdin", "message"),
    [
        (("no/such/folder", "x"), b"", "there is no folder or file no/such/folder (models"),
        ((ROOT, "x"), b"", "is no model's folder: it has neither config.json nor tokenizer.json"),
        ((SCRIPT, "x"), b"", "generate.py is no GGUF file, nor a folder"),
        (("{folder}", "-f", "no-such-file"), b"", "cannot read no-such-file: No such file"),
        (("{folder}", "-f", ROOT), b"", "Is a directory"),
        (("{folder}",), b"\xff\xfe", "standard input is not UTF-8"),
        (("{folder}", "-l", "-"), b"\n\n", "no text in standard input"),
        (("{folder}", "", "--raw"), b"", "the prompt is empty"),
        (("{folder}", "caf\udce9", "--raw"), b"", "the text is not UTF-8"),
        (("{folder}", "x" * 200, "--raw"), b"", "201 tokens, of the prompt and new ones, exceed"),
        (("{folder}", "x", "--raw", "-n", 200), b"", "201 tokens, of the prompt and new ones"),
        (("{folder}", "x", "--raw", "--system", "y"), b"", "--system needs a chat template"),
        (("{folder}", "x", "-i"), b"", "--interactive takes its prompts from standard input"),
        (("{folder}", "x", "-n", 0), b"", "0 is not positive"),
        (("{folder}", "x", "-t", -1), b"", "-1 is no number of 0 or more"),
        (("{folder}", "x", "-t", "nan"), b"", "nan is no number of 0 or more"),
        (("{folder}", "x", "--top-p", 1.1), b"", "1.1 is not above 0 and up to 1"),
        (("{folder}", "x", "--top-k", "few"), b"", "invalid positive value: 'few'"),
        (("{folder}", "x", "--repetition-penalty", 0), b"", "0 is no positive number"),
        (("{folder}", "x", "--seed", -1), b"", "-1 is negative"),
        (("{folder}", "x", "--dtype", "int8"), b"", "invalid choice"),
        (("{folder}", "x", "--cache", "fp4"), b"", "invalid choice"),
        (("{folder}", "x", "--page-size", 0), b"", "0 is not positive"),
    ],
)
def test_command_errors_are_clear(
    run: Command, folder: Path, arguments: tuple[Any, ...], stdin: bytes, message: str
) -> None:
    done = run(*(str(a).replace("{folder}", str(folder)) for a in arguments), stdin=stdin)
    assert done.returncode == 2
    assert done.stdout == ""
    assert message in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


def test_a_model_that_is_too_large_gets_one_line(
    run: Command, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_large(*_: object) -> None:
        raise MemoryError("Out of memory allocating 99 bytes")

    monkeypatch.setattr(Llama, "cache", too_large)
    message = "generate.py: out of memory: Out of memory allocating 99 bytes\n"
    assert run(folder, "x", "--raw") == (2, "", message)
