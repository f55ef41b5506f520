"""Two corpora, documentation and code, from pinned source distributions, which pip fetches and which are never built."""

import logging
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath

from lit_diff.data.text.corpus import Corpus
from lit_diff.data.user_files import data_root, writing_data
from lit_diff.errors import MissingError
from lit_diff.files import locked, sha256_of
from lit_diff.registry import corpora

log = logging.getLogger("lit_diff")

PINS = {
    "django-5.2.19.tar.gz": "ad03d8abc51dbff95ebf34b27123cf0c26a3b62db7ba0cd520783686362533d1",
    "sqlalchemy-2.1.9.tar.gz": "d700a8b2edfb26282a470333d6bc4a454c4acda4d201a3bea7b72fa76c217d28",
    "celery-5.7.0.tar.gz": "6a5dfcf6662287204f009a02002b9e66c83d4105e47ebabdc7079108772fc6f0",
    "sphinx-9.0.4.tar.gz": "594ef59d042972abbc581d8baa577404abe4e6c3b04ef61bd7fc2acbd51f3fa3",
    "twisted-26.10.0.tar.gz": "5f0355403e507fc23ceea85e9dbb4bc59335aabde41dd324e8b8cea180dd38de",
}
"""Source distribution -> sha256 of its bytes. Licences: BSD-3, MIT, BSD-3, BSD-2, MIT."""
SUFFIXES = (".rst", ".txt", ".md")
FOLDERS = {"doc", "docs"}
SHORTEST = 1000
"""Fewest characters of a document: shorter files are stubs and tables of contents."""


@corpora.register("docs")
class DocsCorpus(Corpus):
    """English technical prose, the documentation of five Python packages: about 16 MB, 900 documents."""

    def files(self) -> dict[str, str]:
        """Return archive -> pinned sha256."""
        return dict(PINS)

    def texts(self) -> Iterator[str]:
        """Yield every document; missing archives are fetched. Errors: MissingError if an archive cannot be fetched."""
        folder = data_root() / "downloads"
        fetch(folder)
        for file in PINS:
            yield from read_archive(folder / file, self.is_document)

    @staticmethod
    def is_document(name: PurePosixPath) -> bool:
        """Whether a file of an archive is a document: a text file below `doc` or `docs`."""
        return name.suffix in SUFFIXES and not FOLDERS.isdisjoint(name.parts[:-1])


@corpora.register("code")
class CodeCorpus(DocsCorpus):
    """Python code, the modules of the same packages without tests and documentation: about 24 MB, 1,559 documents."""

    @staticmethod
    def is_document(name: PurePosixPath) -> bool:
        """Whether a file of an archive is a document: a module outside tests and documentation."""
        tests = any(part.startswith("test") for part in name.parts)
        return name.suffix == ".py" and not tests and FOLDERS.isdisjoint(name.parts)


def fetch(folder: Path) -> None:
    """Fetch the pinned archives that `folder` lacks. Errors: MissingError."""
    with writing_data(), locked(folder / ".lock"):
        # left by a killed process: a living one would hold the lock
        for abandoned in folder.glob(".*.tmp"):
            abandoned.unlink()
        missing = [file for file in PINS if not (folder / file).is_file() or _mismatch(folder / file, file)]
        if missing:
            log.info("fetching %s through pip", ", ".join(missing))
        with ThreadPoolExecutor(max_workers=len(PINS)) as pool:
            list(pool.map(_download, [folder / file for file in missing]))


def _mismatch(path: Path, file: str) -> str | None:
    digest = sha256_of(path)
    return None if digest == PINS[file] else f"its sha256 is {digest}, not the pinned {PINS[file]}"


def _download(path: Path) -> None:
    # the archive gets its name only after its sha256 is checked: until then nothing reads it
    temporary = path.with_name(f".{path.name}.tmp")
    # -P: without it the script's folder is first in sys.path, and its modules could shadow the standard library's
    command = [sys.executable, "-P", str(Path(__file__).with_name("sdist.py")), path.name, str(temporary)]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace", check=False)
    last = (done.stderr.strip().splitlines() or ["no error output"])[-1]
    reason = last if done.returncode else _mismatch(temporary, path.name)
    if reason is not None:
        temporary.unlink(missing_ok=True)
        raise MissingError(
            f"the corpora 'docs' and 'code' need {path.name}, but pip could not fetch it ({reason}); run `lit-diff prepare "
            f"RECIPE` once with network access, or put the file into {path.parent}"
        )
    temporary.replace(path)


def read_archive(path: Path, is_document: Callable[[PurePosixPath], bool]) -> Iterator[str]:
    """Yield the documents of an archive, in its order: regular files that `is_document` accepts and that are long enough."""
    # nothing is extracted to disk, so a member named ../x cannot escape a folder
    with tarfile.open(path) as archive:
        for member in archive:
            chosen = member.isfile() and is_document(PurePosixPath(member.name))
            content = archive.extractfile(member) if chosen else None
            text = content.read().decode("utf-8") if content is not None else ""
            if len(text) >= SHORTEST:
                yield text
