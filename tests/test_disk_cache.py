"""disk_cache.py and cubins.py: where the user's files are, and that they are whole."""

from __future__ import annotations

import os
import re
import stat
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from cufa import disk_cache
from cufa.compiler import cubins, source
from cufa.specs.variant import Variant

VARIANT = Variant("fa2_mma", "float16", 128, 128, 128, 64, 2, 4, 2, score=("Causal",))
KEY = (VARIANT, "sm_90a", (13, 0))

posix = pytest.mark.skipif(os.name == "nt", reason="has no owners and modes")


def test_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("CUFA_CACHE_DIR", str(tmp_path / "own"))
    assert disk_cache.folder() == tmp_path / "own"
    monkeypatch.setenv("CUFA_CACHE_DIR", "~/own")
    assert disk_cache.folder() == tmp_path / "home" / "own"
    monkeypatch.delenv("CUFA_CACHE_DIR")
    assert disk_cache.folder() == tmp_path / "xdg" / "cufa"
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    assert disk_cache.folder() == tmp_path / "home" / ".cache" / "cufa"
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def homeless(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a container's user without an entry in the list of users."""

    def home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    for name in ("CUFA_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(disk_cache.Path, "home", home)


@pytest.mark.usefixtures("homeless")
def test_without_a_home_nothing_is_found_and_writing_says_so() -> None:
    assert cubins.find(*KEY) is None
    for call in (disk_cache.folder, lambda: cubins.store(*KEY, b"x")):
        with pytest.raises(OSError, match="set CUFA_CACHE_DIR"):
            call()


def test_the_home_of_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUFA_CACHE_DIR", "~nobody-of-this-name/own")
    with pytest.raises(OSError, match="set CUFA_CACHE_DIR"):
        disk_cache.folder()


def test_a_folder_that_cannot_be(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("CUFA_CACHE_DIR", str(tmp_path / "file" / "cufa"))
    assert cubins.find(*KEY) is None
    assert disk_cache.size_bytes(disk_cache.folder()) == 0
    with pytest.raises(OSError, match="file"):
        cubins.store(*KEY, b"x")


def test_write_makes_folders_and_replaces(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "file.json"
    for data in (b"one", b"", b"three"):
        disk_cache.write(path, data)
        assert path.read_bytes() == data
        assert list(path.parent.iterdir()) == [path]


@pytest.fixture(params=[0o022, 0o002, 0, 0o077], ids="{:03o}".format)
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


@posix
def test_others_may_read_what_is_written_and_not_write(tmp_path: Path, umask: int) -> None:
    """Whatever is usual for the user's files."""
    path = tmp_path / "a" / "b" / "file"
    disk_cache.write(path, b"data")
    assert stat.S_IMODE(path.stat().st_mode) == 0o644 & ~umask
    for folder in (path.parent, path.parent.parent):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o755 & ~umask


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_an_interrupted_write_leaves_the_file_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    path = tmp_path / "file"
    disk_cache.write(path, b"before")

    def replace(source: object, target: object) -> None:
        raise error

    monkeypatch.setattr(os, "replace", replace)
    with pytest.raises(error):
        disk_cache.write(path, b"after")
    assert path.read_bytes() == b"before"
    assert list(tmp_path.iterdir()) == [path]


def test_size() -> None:
    assert disk_cache.size_bytes(disk_cache.folder()) == 0
    disk_cache.write(disk_cache.folder() / "one", bytes(100))
    disk_cache.write(disk_cache.folder() / "kernels" / "two", bytes(23))
    assert disk_cache.size_bytes(disk_cache.folder()) == 123


def test_cubins_are_found_again() -> None:
    assert cubins.find(*KEY) is None
    path = cubins.store(*KEY, b"\x7fELF")
    assert path == cubins.path(*KEY)
    assert path.parent == disk_cache.folder() / "kernels"
    assert re.fullmatch(r"[0-9a-f]{64}\.cubin", path.name)
    assert cubins.find(*KEY) == b"\x7fELF"
    others = (VARIANT._replace(score=()), VARIANT._replace(dtype="bfloat16"))
    for variant in others:
        assert cubins.find(variant, *KEY[1:]) is None
    assert cubins.find(VARIANT, "sm_80", (13, 0)) is None


@pytest.mark.parametrize("other", [(12, 0), (13, 1)])
def test_cubins_of_another_compiler_are_not_found(other: tuple[int, int]) -> None:
    cubins.store(*KEY, b"\x7fELF")
    assert cubins.find(VARIANT, "sm_90a", other) is None
    cubins.store(VARIANT, "sm_90a", other, b"another")
    assert cubins.find(*KEY) == b"\x7fELF"


def test_cubins_of_other_sources_are_not_found(monkeypatch: pytest.MonkeyPatch) -> None:
    cubins.store(*KEY, b"\x7fELF")
    text = source.text(VARIANT.kernel)
    monkeypatch.setattr(source, "text", lambda kernel: f"{text}// edited\n")
    assert cubins.find(*KEY) is None


# --- files that somebody else could have made ---


@pytest.mark.usefixtures("umask")
def test_what_was_written_is_read() -> None:
    path = cubins.store(*KEY, b"\x7fELF")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert disk_cache.read(path) == b"\x7fELF"
        assert disk_cache.read(path.with_name("other")) is None
        assert disk_cache.read(path.parent) is None
        assert disk_cache.read(path / "file") is None


def place_of(level: int) -> Path:
    """Return a cubin's file, or a folder that it lies in."""
    path = cubins.store(*KEY, b"\x7fELF")
    return (path, path.parent, disk_cache.folder())[level]


@posix
@pytest.mark.parametrize("level", range(3))
@pytest.mark.parametrize("bits", [0o020, 0o002, 0o1777])
def test_what_others_may_write_is_ignored_with_one_warning(level: int, bits: int) -> None:
    place = place_of(level)
    place.chmod(place.stat().st_mode | bits)
    with pytest.warns(RuntimeWarning) as caught:
        found = [cubins.find(*KEY) for _ in range(2)]
    assert found == [None, None]
    (warning,) = caught
    assert str(warning.message).startswith(f"{place} is ignored: others may write it")
    place.chmod(0o700)
    assert cubins.find(*KEY) == b"\x7fELF"


@posix
@pytest.mark.parametrize("level", range(3))
def test_what_belongs_to_another_user_is_ignored_with_one_warning(
    monkeypatch: pytest.MonkeyPatch, level: int
) -> None:
    place = place_of(level)
    inode, owner = place.stat().st_ino, os.geteuid() + 1

    def status(descriptor: int) -> os.stat_result:
        found = os.stat(descriptor)
        return os.stat_result((*found[:4], owner, *found[5:])) if found.st_ino == inode else found

    monkeypatch.setattr(os, "fstat", status)
    with pytest.warns(RuntimeWarning) as caught:
        found = [cubins.find(*KEY) for _ in range(2)]
    assert found == [None, None]
    (warning,) = caught
    assert str(warning.message).startswith(f"{place} is ignored: it belongs to another user")
    assert (disk_cache.why_ignored(disk_cache.folder() / "kernels") is None) == (level == 0)
    owner = 0  # root's are taken, as those of an image
    assert cubins.find(*KEY) == b"\x7fELF"


@posix
def test_a_file_elsewhere(tmp_path: Path) -> None:
    """It counts, and so does the folder that it lies in."""
    path = tmp_path / "other" / "table.json"
    disk_cache.write(path, b"{}")
    tmp_path.chmod(0o777)
    assert disk_cache.read(path) == b"{}"
    path.parent.chmod(0o777)
    with pytest.warns(RuntimeWarning, match="others may write it"):
        assert disk_cache.read(path) is None


@posix
@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("bits", [0o020, 0o002, 0o1777])
def test_a_folder_can_be_asked_whether_it_is_ignored(level: int, bits: int) -> None:
    folder = disk_cache.folder() / "kernels"
    assert disk_cache.why_ignored(folder) is None  # there is none
    place = place_of(level)
    assert disk_cache.why_ignored(folder) is None
    place.chmod(place.stat().st_mode | bits)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = disk_cache.why_ignored(folder)
    assert found == f"{place} is ignored: others may write it, see chmod go-w"
    assert (disk_cache.why_ignored(disk_cache.folder()) is None) == (level == 1)


@posix
def test_where_nothing_is_there_is_nothing_to_warn_of() -> None:
    disk_cache.make_folder(disk_cache.folder())
    disk_cache.folder().chmod(0o777)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert cubins.find(*KEY) is None


@posix
def test_links_are_followed(tmp_path: Path) -> None:
    """Their targets count."""
    path = cubins.store(*KEY, b"\x7fELF")
    path.parent.rename(tmp_path / "elsewhere")
    path.parent.symlink_to(tmp_path / "elsewhere")
    assert cubins.find(*KEY) == b"\x7fELF"
    (tmp_path / "elsewhere").chmod(0o777)
    with pytest.warns(RuntimeWarning, match="others may write it"):
        assert cubins.find(*KEY) is None


@posix
def test_a_pipe_is_not_waited_for() -> None:
    path = cubins.store(*KEY, b"\x7fELF")
    path.unlink()
    os.mkfifo(path, 0o600)
    assert not cubins.find(*KEY)


def test_the_folder_may_be_relative(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (".", "below", "../beside"):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("CUFA_CACHE_DIR", name)
        cubins.store(*KEY, b"\x7fELF")
        assert cubins.find(*KEY) == b"\x7fELF"
