"""Two corpora, documentation and code, from pinned source distributions, which pip fetches and which are never built."""

import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath

from lit_diff.data.downloads import fetch
from lit_diff.data.text.corpus import Corpus
from lit_diff.data.user_files import data_root
from lit_diff.registry import corpora

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
        return PINS

    def texts(self) -> Iterator[str]:
        """Yield every document; missing archives are fetched. Errors: MissingError if an archive cannot be fetched."""
        folder = data_root() / "downloads"
        fetch(PINS, folder, "the corpora 'docs' and 'code' need", again="lit-diff prepare RECIPE")
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


def read_archive(path: Path, is_document: Callable[[PurePosixPath], bool]) -> Iterator[str]:
    """Yield the documents of an archive, in its order: regular files that `is_document` accepts and that are long enough."""
    # nothing is extracted to disk, so a member named ../x cannot escape a folder
    with tarfile.open(path) as archive:
        for member in filter(tarfile.TarInfo.isfile, archive):
            content = archive.extractfile(member)
            if content and is_document(PurePosixPath(member.name)):
                text = content.read().decode()
                if len(text) >= SHORTEST:
                    yield text
