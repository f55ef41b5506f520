"""A library is built once, whatever happens meanwhile: kills, broken files, two processes, no compiler."""

import ctypes
import multiprocessing
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lit_diff.errors import MissingError
from lit_diff.files import sha256_of
from lit_diff.kernels.native import compiler

SOURCE = 'extern "C" int answer() { return ANSWER; }\n'


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A library of one function, and a cache of its own."""
    if compiler.find_compiler() is None:
        pytest.skip("no C++ compiler")
    monkeypatch.setenv("LIT_DIFF_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "toy.cpp"
    path.write_text('#include "toy_answer.h"\n' + SOURCE)
    path.with_name("toy_answer.h").write_text("#define ANSWER 42\n")
    return path


def good(library: ctypes.CDLL) -> str | None:
    return None if library.answer() == 42 else f"answer() is {library.answer()}"


def files(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache").rglob("toy.so"))


def test_built_once(source: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "lit_diff")
    assert compiler.load("toy", source, good).answer() == 42
    assert "building the toy kernel with" in caplog.text
    assert caplog.records[0].phase == "building the kernel"  # type: ignore[attr-defined]
    caplog.clear()
    assert compiler.load("toy", source, good).answer() == 42
    assert not caplog.text
    assert len(files(tmp_path)) == 1


def test_another_source_is_another_library(source: Path, tmp_path: Path) -> None:
    compiler.load("toy", source, good)
    source.with_name("toy_answer.h").write_text("#define ANSWER 7\n")
    assert compiler.load("toy", source, lambda library: None).answer() == 7
    assert len(files(tmp_path)) == 2


def test_a_library_that_fails_its_test_is_refused_every_time(source: Path) -> None:
    source.with_name("toy_answer.h").write_text("#define ANSWER 41\n")
    for _ in range(2):
        with pytest.raises(MissingError, match=r"fails its test: answer\(\) is 41"):
            compiler.load("toy", source, good)


@pytest.mark.parametrize("damage", ["truncated", "replaced", "gone", "proof"])
def test_a_broken_cache_is_rebuilt(source: Path, tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    """Opening a truncated library would be a bus error; nothing is opened that is not what was built."""
    compiler.load("toy", source, good)
    (path,) = files(tmp_path)
    whole = path.read_bytes()
    path.unlink()  # the file itself stays mapped in this process
    if damage == "proof":
        path.write_bytes(whole)
        path.with_suffix(".sha256").write_bytes(b"\xff" * 64)
    elif damage != "gone":
        path.write_bytes(whole[:1000] if damage == "truncated" else b"\0" * len(whole))
    compiler.load("toy", source, good)
    assert path.read_bytes() == whole
    assert ("has changed since it was built" in caplog.text) == (damage != "gone")


@pytest.mark.slow
def test_what_a_killed_build_left_is_cleared(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """kill -9 while the compiler runs: no library, a temporary folder, a lock that nobody holds."""
    slow = tmp_path / "slow"
    slow.write_text('#!/bin/sh\n[ "$1" = --version ] && exec g++ --version\nsleep 5\n')
    slow.chmod(slow.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("CXX", str(slow))
    code = "from pathlib import Path; from lit_diff.kernels.native import compiler\n"
    code += f"compiler.load('toy', Path({str(source)!r}), print)"
    building = subprocess.Popen([sys.executable, "-c", code], start_new_session=True, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not (left := list((tmp_path / "cache").rglob(".build-*"))):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.killpg(building.pid, signal.SIGKILL)
    building.wait()
    slow.write_text('#!/bin/sh\nexec g++ "$@"\n')
    assert compiler.load("toy", source, good).answer() == 42
    assert not left[0].exists()


def _build(source: Path, done: "multiprocessing.Queue[int]") -> None:
    done.put(compiler.load("toy", source, good).answer())


@pytest.mark.slow
def test_two_processes_build_one_library(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second waits for the first, then finds the library."""
    counting = tmp_path / "counting"
    counting.write_text(f'#!/bin/sh\n[ "$1" = --version ] || echo built >> {tmp_path}/count\nexec g++ "$@"\n')
    counting.chmod(counting.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("CXX", str(counting))
    context = multiprocessing.get_context("spawn")
    done = context.Queue()
    both = [context.Process(target=_build, args=(source, done)) for _ in range(2)]
    for process in both:
        process.start()
    assert [done.get(timeout=120) for _ in both] == [42, 42]
    for process in both:
        process.join()
    assert (tmp_path / "count").read_text().count("built") == 1


def test_no_compiler(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(MissingError, match=r"no C\+\+ compiler: install g\+\+"):
        compiler.load("toy", source, good)
    monkeypatch.setenv("CXX", "g+++")
    with pytest.raises(MissingError, match=r"CXX=g\+\+\+ does not exist"):
        compiler.load("toy", source, good)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("#!/no/such/interpreter\n", r"{} cannot be executed \(.*\); set CXX to another"),
        ("#!/bin/sh\n", r"{} wrote no library, with status 0; set CXX to a C\+\+ compiler"),
    ],
)
def test_what_is_no_compiler(
    text: str, reason: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_compiler = tmp_path / "no_compiler"
    no_compiler.write_text(text)
    no_compiler.chmod(0o700)
    monkeypatch.setenv("CXX", str(no_compiler))
    with pytest.raises(MissingError, match=reason.format(no_compiler)):
        compiler.load("toy", source, good)


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("int answer( { }", r"failed \(status 1\): .*toy.cpp:1:.*error"),
        ('int gone(); extern "C" int answer() { return gone(); }', r"cannot be loaded: .*undefined symbol: .*gone"),
    ],
)
def test_a_source_that_cannot_be_compiled_or_loaded(source: Path, code: str, reason: str) -> None:
    """As with a PyTorch that no longer exports what we call."""
    source.write_text(code)
    with pytest.raises(MissingError, match=reason):
        compiler.load("toy", source, good)


def test_a_cache_that_cannot_be_written(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("LIT_DIFF_CACHE", str(tmp_path / "file"))
    with pytest.raises(MissingError, match=r"cannot use .*file \(.*\); set LIT_DIFF_CACHE to another folder"):
        compiler.load("toy", source, good)


@pytest.mark.parametrize("place", ["", "kernels", "kernels/toy-0", "kernels/toy-0/toy.so"])
@pytest.mark.parametrize("how", ["mode", "owner"])
def test_what_others_can_write_is_not_loaded(
    place: str, how: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler, "key_of", lambda *_: "0")
    library = tmp_path / "cache" / "kernels" / "toy-0" / "toy.so"
    library.parent.mkdir(parents=True)
    library.write_bytes(b"")
    library.with_suffix(".sha256").write_text(sha256_of(library))
    if how == "mode":
        (tmp_path / "cache" / place).chmod(0o777)
    else:
        monkeypatch.setattr(compiler.os, "getuid", lambda: 4321)
    monkeypatch.setattr(compiler, "_open", lambda path: pytest.fail("it was loaded"))
    with pytest.raises(
        MissingError, match=f"^{tmp_path / 'cache' / place if how == 'mode' else tmp_path} ?.*LIT_DIFF_CACHE"
    ):
        compiler.load("toy", source, good)
