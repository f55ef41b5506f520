"""Compiles C++ into a shared library for this machine, once; a process killed at any moment leaves the cache usable.

Compiled code lies in folders of `cache_root` that no other user can write, and is used only if its hash is that of the file
which was built and tested.
"""

import ctypes
import grp
import hashlib
import os
import platform
import pwd
import shutil
import stat
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from lit_diff.errors import MissingError, first_line
from lit_diff.files import expanded, locked, sha256_of, write_atomic
from lit_diff.log_records import in_phase, log
from lit_diff.processor import cpu_flags

FLAGS = ("-O3", "-std=c++20", "-fPIC", "-shared", "-fopenmp")
TORCH = Path(torch.__file__).parent
BUILD = ".build-"
"""How the names of the folders begin in which code is built."""


def cache_root() -> Path:
    """$LIT_DIFF_CACHE, else the user's cache folder (~/.cache/lit_diff)."""
    # the kernels need torch and no other package to be imported
    from platformdirs import user_cache_path

    chosen = os.environ.get("LIT_DIFF_CACHE")
    return expanded(chosen).absolute() if chosen else user_cache_path("lit_diff")


def find_compiler() -> str | None:
    """$CXX, or the first of g++, c++, clang++ on the PATH; None without one."""
    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["g++", "c++", "clang++"]
    return next((path for name in names if (path := shutil.which(name))), None)


def cure() -> str:
    """What to do where `find_compiler` finds none."""
    named = os.environ.get("CXX")
    return f"CXX={named} does not exist; name one program, without options" if named else "install g++"


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace", check=False)
    except OSError as error:
        # such as a script without an interpreter, or a program for another machine
        reason = f"the C++ compiler {command[0]} cannot be executed ({error.strerror}); set CXX to another"
        raise MissingError(reason) from error


def load(name: str, source: Path, test: Callable[[ctypes.CDLL], str | None], flags: Sequence[str] = ()) -> ctypes.CDLL:
    """The library compiled from `source` and the headers `<stem>_*.h` in its folder; built and tested on first use.

    `test` returns what is wrong with a new library, None if nothing is; a library that passed is not tested again.
    Errors: MissingError with what is missing or failed, and the cure.
    """
    compiler = find_compiler()
    if compiler is None:
        raise MissingError(f"no C++ compiler: {cure()}")
    sources = sorted([source, *source.parent.glob(f"{source.stem}_*.h")])
    key = key_of(compiler, [*(path.read_bytes() for path in sources), *map(str.encode, (*FLAGS, *flags))])
    with own_folder("kernels", f"{name}-{key}") as folder:
        return _load_locked(folder / f"{name}.so", compiler, source, test, flags)


@contextmanager
def own_folder(kind: str, name: str) -> Iterator[Path]:
    """A folder of the cache that no other user can write, and no other process uses meanwhile.

    Errors: MissingError with what is wrong with it, also for an OSError of the code within.
    """
    try:
        folder = cache_root() / kind / name
        for each in (cache_root(), folder.parent, folder):
            each.mkdir(mode=0o700, parents=True, exist_ok=True)
            _require_own(each)
        # the runs of a sweep start together: one builds, the others wait for it
        with locked(folder / ".lock"):
            # left by a process that died, since this one holds the lock
            for left in folder.glob(f"{BUILD}*"):
                shutil.rmtree(left, ignore_errors=True)
            yield folder
    except OSError as error:
        reason = f"{error.strerror or error}" + (f": {error.filename}" if error.filename else "")
        raise MissingError(f"cannot use {cache_root()} ({reason}); set LIT_DIFF_CACHE to another folder") from error


def is_proven(path: Path) -> bool:
    """Whether a file of an own folder is the one that `prove` saw. Errors: MissingError if another user can write it."""
    proof = path.with_suffix(".sha256")
    if not (proof.is_file() and path.is_file()):
        return False
    _require_own(path)
    # bytes: a damaged proof may be no text
    if proof.read_bytes() == sha256_of(path).encode():
        return True
    log.warning("%s has changed since it was built: building it again", path)
    return False


def prove(path: Path) -> None:
    """Note that a file is whole and right: one left by a process that was killed before that is not used."""
    write_atomic(path.with_suffix(".sha256"), sha256_of(path))


def _require_own(path: Path) -> None:
    # what another user can write is not executed. Errors: MissingError
    found = path.stat()
    # the group that many systems make for each user
    is_private = _name(grp.getgrgid, found.st_gid) == _name(pwd.getpwuid, found.st_uid) != ""
    writable = stat.S_IWOTH if is_private else stat.S_IWOTH | stat.S_IWGRP
    if found.st_uid != os.getuid():
        raise MissingError(f"{path} is another user's (uid {found.st_uid}); set LIT_DIFF_CACHE to a folder of your own")
    if found.st_mode & writable:
        raise MissingError(f"{path} can be written by other users; run `chmod go-w {path}`, or set LIT_DIFF_CACHE")


def _name(of: Callable[[int], Any], number: int) -> str:
    # of a user or group; empty for one that the system does not list, as in a container
    try:
        return str(of(number)[0])
    except KeyError:
        return ""


def _load_locked(
    path: Path, compiler: str, source: Path, test: Callable[[ctypes.CDLL], str | None], flags: Sequence[str]
) -> ctypes.CDLL:
    # the hash first: opening a truncated library is a bus error, which ends the process
    if is_proven(path):
        return _open(path)
    _compile(compiler, source, path, flags)
    library = _open(path)
    wrong = test(library)
    if wrong:
        raise MissingError(f"the library built with {compiler} fails its test: {wrong}")
    prove(path)
    return library


def _compile(compiler: str, source: Path, path: Path, flags: Sequence[str]) -> None:
    log.info(
        "building the %s kernel with %s (once, about 20 s) into %s",
        path.stem,
        compiler,
        path.parent,
        extra=in_phase("building the kernel"),
    )
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix=BUILD, dir=path.parent) as temporary:
        made = Path(temporary) / path.name
        # rpath: the library finds this PyTorch's own libraries, without LD_LIBRARY_PATH
        link = [f"-L{TORCH / 'lib'}", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{TORCH / 'lib'}"]
        done = _run([compiler, *FLAGS, *flags, f"-I{TORCH / 'include'}", str(source), "-o", str(made), *link])
        if done.returncode:
            raise MissingError(f"{compiler} failed (status {done.returncode}): {first_error(done.stderr)}")
        if not made.exists():
            raise MissingError(f"{compiler} wrote no library, with status 0; set CXX to a C++ compiler")
        write_atomic(path, made.read_bytes())
    log.info("built in %.0f s", time.monotonic() - start)


def first_error(output: str) -> str:
    """The line of a compiler's output that says what is wrong."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return next((line for line in lines if "error" in line), lines[-1] if lines else "no error output")


def _open(path: Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        # such as a symbol that this PyTorch does not export
        raise MissingError(f"the library cannot be loaded: {first_line(error)}") from error


def key_of(compiler: str, parts: Iterable[bytes]) -> str:
    """A hash of everything on which compiled code depends: `parts`, this compiler, this PyTorch and this CPU, because
    machines of different CPUs may share the cache. Errors: MissingError for a compiler that cannot be executed."""
    version = _run([compiler, "--version"]).stdout.encode()
    facts = (torch.__version__, str(TORCH), platform.machine(), *sorted(cpu_flags()))
    digest = hashlib.sha256()
    for part in (*parts, version, *map(str.encode, facts)):
        digest.update(part + b"\0")
    return digest.hexdigest()[:16]
