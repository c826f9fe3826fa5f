"""cache.py: where the user's files are, and that they are whole."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

import pytest

from cufa.compiler import cache, source
from cufa.variant import Variant

VARIANT = Variant("fa2_mma", "float16", 128, 128, 128, 64, 2, 4, 2, score=("Causal",))


def test_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("CUFA_CACHE_DIR", str(tmp_path / "own"))
    assert cache.folder() == tmp_path / "own"
    monkeypatch.setenv("CUFA_CACHE_DIR", "~/own")
    assert cache.folder() == tmp_path / "home" / "own"
    monkeypatch.delenv("CUFA_CACHE_DIR")
    assert cache.folder() == tmp_path / "xdg" / "cufa"
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    assert cache.folder() == tmp_path / "home" / ".cache" / "cufa"
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def homeless(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a container's user without an entry in the list of users."""

    def home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    for name in ("CUFA_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(cache.Path, "home", home)


@pytest.mark.usefixtures("homeless")
def test_without_a_home_nothing_is_found_and_writing_says_so() -> None:
    assert cache.find_cubin(VARIANT, "sm_90a") is None
    for call in (cache.folder, lambda: cache.store_cubin(VARIANT, "sm_90a", b"x")):
        with pytest.raises(OSError, match="set CUFA_CACHE_DIR"):
            call()


def test_the_home_of_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUFA_CACHE_DIR", "~nobody-of-this-name/own")
    with pytest.raises(OSError, match="set CUFA_CACHE_DIR"):
        cache.folder()


def test_a_folder_that_cannot_be(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("CUFA_CACHE_DIR", str(tmp_path / "file" / "cufa"))
    assert cache.find_cubin(VARIANT, "sm_90a") is None
    assert cache.size_bytes(cache.folder()) == 0
    with pytest.raises(OSError, match="file"):
        cache.store_cubin(VARIANT, "sm_90a", b"x")


def test_write_makes_folders_and_replaces(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "file.json"
    for data in (b"one", b"", b"three"):
        cache.write(path, data)
        assert path.read_bytes() == data
        assert list(path.parent.iterdir()) == [path]


def test_others_may_read_what_is_written(tmp_path: Path) -> None:
    """As they may any file that the user makes."""
    plain, written = tmp_path / "plain", tmp_path / "written"
    plain.touch()
    cache.write(written, b"data")
    assert stat.S_IMODE(written.stat().st_mode) == stat.S_IMODE(plain.stat().st_mode)


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_an_interrupted_write_leaves_the_file_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    path = tmp_path / "file"
    cache.write(path, b"before")

    def replace(source: object, target: object) -> None:
        raise error

    monkeypatch.setattr(os, "replace", replace)
    with pytest.raises(error):
        cache.write(path, b"after")
    assert path.read_bytes() == b"before"
    assert list(tmp_path.iterdir()) == [path]


def test_size() -> None:
    assert cache.size_bytes(cache.folder()) == 0
    cache.write(cache.folder() / "one", bytes(100))
    cache.write(cache.folder() / "kernels" / "two", bytes(23))
    assert cache.size_bytes(cache.folder()) == 123


def test_cubins_are_found_again() -> None:
    assert cache.find_cubin(VARIANT, "sm_90a") is None
    path = cache.store_cubin(VARIANT, "sm_90a", b"\x7fELF")
    assert path == cache.cubin_path(VARIANT, "sm_90a")
    assert path.parent == cache.folder() / "kernels"
    assert re.fullmatch(r"[0-9a-f]{64}\.cubin", path.name)
    assert cache.find_cubin(VARIANT, "sm_90a") == b"\x7fELF"
    assert cache.find_cubin(VARIANT, "sm_80") is None
    assert cache.find_cubin(VARIANT._replace(score=()), "sm_90a") is None
    assert cache.find_cubin(VARIANT._replace(dtype="bfloat16"), "sm_90a") is None


def test_cubins_of_other_sources_are_not_found(monkeypatch: pytest.MonkeyPatch) -> None:
    cache.store_cubin(VARIANT, "sm_90a", b"\x7fELF")
    text = source.text(VARIANT.kernel)
    monkeypatch.setattr(source, "text", lambda kernel: f"{text}// edited\n")
    assert cache.find_cubin(VARIANT, "sm_90a") is None
