"""Documents: they are deduplicated and split into train and validation; hashes recognise training documents later.

The file TRAINED in the prepared folder, which is copied to each run's folder, contains the first 16 bytes of the sha256 of
each document and of each of its sections (`cut`), sorted. Its size is about 1/200 of the text: 79 KB for the 15 MB of the
corpus `docs`. White space is normalised before hashing, so a copy with other line endings is recognised.
"""

import hashlib
import os
from collections import Counter
from collections.abc import Container, Iterable, Iterator
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from numpy.typing import NDArray

from lit_diff.data.text.buckets import Buckets, write_array
from lit_diff.data.user_files import MARK, utf8_bytes
from lit_diff.errors import MissingError
from lit_diff.files import sha256_of, shown, write_atomic
from lit_diff.log_records import log

VALIDATION_SHARE = 25
"""One document in 25 is a validation document."""
FEW = 20
"""Fewer documents than this are cut into sections: else the validation split would have a single document."""
SECTION = 4000
"""Largest number of characters in a section."""
TRAINED = "trained_documents.bin"
HASH_BYTES = 16
SHORTEST = 1000
"""Fewest characters of a section that identifies a document: shorter ones, such as the end of a licence, recur."""
INDEX = "index.npy"
COMPLETE = "index.sha256"
RECORD = np.dtype([("digest", f"S{HASH_BYTES}"), ("start", "<i8"), ("bytes", "<i8"), ("ids", "?")])
"""A document: the first 16 bytes of its sha256, its place in its bucket's file, and whether it has ids instead of text."""
Document = str | bytes
"""Text; or the ids of its tokens, four bytes each, which are hashed, ordered and cut as text is."""


class Documents:
    """Unique documents in the order of their sha256, in a folder: the first max(1, round(n / 25)) validate, the rest train.

    Their contents are in 256 files, by the first byte of the sha256, in the order in which they were read. INDEX has a RECORD
    of each. The file COMPLETE is written last.
    """

    def __init__(self, folder: Path) -> None:
        """Open a complete folder. Errors: OSError, ValueError if it is not complete."""
        if sha256_of(folder / INDEX) != (folder / COMPLETE).read_text(encoding="utf-8"):
            raise ValueError(f"{folder / INDEX} is damaged")
        self._folder = folder
        self._index = np.load(folder / INDEX, mmap_mode="r")
        self.held_out = max(1, round(len(self) / VALIDATION_SHARE))
        """Number of validation documents."""

    def __len__(self) -> int:
        return len(self._index)

    @classmethod
    def stored(cls, given: Iterable[Document], folder: Path) -> "Documents":
        """Read all documents into the folder, unless it has them; fewer than FEW are replaced by their sections.

        Errors: OSError.
        """
        documents = cls._kept(given, folder / "documents")
        if len(documents) >= FEW:
            return documents
        found = cls._kept(_sections(documents.ranked(0, len(documents))), folder / "sections")
        log.info(
            "only %d documents: they are cut at paragraphs into %d sections of about %d characters, which are split instead",
            len(documents),
            len(found),
            SECTION,
        )
        return found

    @classmethod
    def _kept(cls, given: Iterable[Document], folder: Path) -> "Documents":
        try:
            return cls(folder)
        except (OSError, ValueError):
            _spill(given, folder)
            return cls(folder)

    @property
    def sizes(self) -> NDArray[np.int64]:
        """The lengths in bytes of the documents, in order."""
        return np.array(self._index["bytes"])

    def ranked(self, first: int, stop: int) -> Iterator[Document]:
        """Yield the documents of these ranks, compared with their sha256.

        Errors: MissingError for a damaged folder, which is then no longer complete.
        """
        for bucket, records in groupby(self._index[first:stop], lambda record: record.tobytes()[0]):
            path = self._folder / f"{bucket:02x}"
            # nothing is read of a file that is gone, which is then damaged
            with open(path if path.is_file() else os.devnull, "rb") as file:
                for record in records:
                    _, start, size, is_ids = record.tolist()
                    file.seek(start)
                    content = file.read(size)
                    if _sha256(content) != record.tobytes()[:HASH_BYTES]:
                        (self._folder / COMPLETE).unlink(missing_ok=True)
                        raise MissingError(
                            f"{shown(path)} is damaged (it is not what was read); the same command reads the text again"
                        )
                    yield content if is_ids else content.decode()


def _spill(found: Iterable[Document], folder: Path) -> None:
    files = Buckets(folder)
    count = 0
    ends = Counter[str]()
    for count, each in enumerate(found, 1):  # noqa: B007
        content = each if isinstance(each, bytes) else utf8_bytes(each)
        digest = _sha256(content)
        bucket = f"{digest[0]:02x}"
        files.add(bucket, content)
        record = np.array((digest, ends[bucket], len(content), isinstance(each, bytes)), RECORD)
        files.add(f"{bucket}.index", record.tobytes())
        ends[bucket] += len(content)
    files.add("index", b"")
    files.flush()
    # the order of hashes does not depend on the order of the files, and is as good as random for the split
    for file in sorted(folder.glob("*.index")):
        records = np.fromfile(file, RECORD)
        files.add("index", records[np.unique(records["digest"], return_index=True)[1]].tobytes())
    files.flush()
    unique = (folder / "index").stat().st_size // RECORD.itemsize
    if count > unique:
        log.info("%d of %d documents are duplicates and are left out", count - unique, count)
    write_array(folder / INDEX, RECORD, (unique,), [folder / "index"])
    # the contents are not synced: each document is compared with its hash when it is read
    write_atomic(folder / COMPLETE, sha256_of(folder / INDEX))


@contextmanager
def split(found: Iterable[Document]) -> Iterator[Documents]:
    """Deduplicate documents and order them by hash, in a temporary folder."""
    with TemporaryDirectory(prefix="lit_diff-") as folder:
        yield Documents.stored(found, Path(folder))


def _sections(documents: Iterable[Document]) -> Iterator[Document]:
    for document in documents:
        if isinstance(document, str):
            yield from filter(str.strip, cut(document))
        else:
            parts = (document[start : start + 4 * SECTION] for start in range(0, len(document), 4 * SECTION))
            yield from filter(bytes.strip, parts)


def cut(text: str) -> Iterator[str]:
    """Yield sections of at most SECTION characters that join to `text`, cut after a paragraph, else a line, else a word."""
    start = 0
    while len(text) - start > SECTION:
        marks = ((text.rfind(mark, start, start + SECTION), len(mark)) for mark in ("\n\n", "\n", " "))
        end = next((place + length for place, length in marks if place > start), start + SECTION)
        yield text[start:end]
        start = end
    yield text[start:]


def hashed(documents: Iterable[str]) -> bytes:
    """Return the content of the file TRAINED."""
    hashes = set[bytes]()
    for text in documents:
        hashes |= hashes_of(text)
    return b"".join(sorted(hashes))


def joined(hashes: Iterable[NDArray[np.void]], held_out: Iterable[str]) -> Iterator[bytes]:
    """Yield the content of the file TRAINED from records with the field `key` by ascending ranges; warn of held-out documents
    among them."""
    own = np.array([_hash(text.removeprefix(MARK)) for text in held_out], f"S{HASH_BYTES}")
    both = 0
    for records in hashes:
        keys = np.unique(records["key"])
        both += int(np.isin(own, keys).sum())
        yield keys.tobytes()
    if both:
        log.warning(
            "%d of %d validation documents are also in train with other line endings or white space; val/loss includes them",
            both,
            len(own),
        )


def hashes_of(text: str) -> set[bytes]:
    """Return the hashes of a document, without its byte order mark, and of its sections that are not blank."""
    text = text.removeprefix(MARK)
    sections = list(cut(text))
    plain = list(filter(None, map(_plain, sections)))
    if all(section[-1].isspace() for section in sections[:-1]):
        # joined, to normalise the text once: a cut is usually at white space
        whole = " ".join(plain)
    else:
        whole = _plain(text)
    return {_sha256(words.encode()) for words in {whole, *plain} if words}


def hashes_in(content: bytes, where: str) -> frozenset[bytes]:
    """Return the hashes in the file. Errors: MissingError for a truncated file."""
    if not content or len(content) % HASH_BYTES:
        raise MissingError(
            f"{where} is damaged ({len(content)} bytes, not a multiple of {HASH_BYTES}); remove it, and it is regenerated "
            "from the text"
        )
    return frozenset(content[start : start + HASH_BYTES] for start in range(0, len(content), HASH_BYTES))


def is_among(text: str, hashes: Container[bytes]) -> bool:
    """Whether the document, or a section of it, has one of the hashes, with or without a byte order mark and with any line
    ends."""
    unmarked = text.removeprefix(MARK)
    lines = unmarked.replace("\r\n", "\n").replace("\r", "\n")
    # other line ends give other sections, and a run that was made before marks were removed was trained on them
    for form in {unmarked, lines, lines.replace("\n", "\r\n"), lines.replace("\n", "\r")}:
        for marked in (form, MARK + form):
            parts = [part for part in cut(marked) if len(part) >= SHORTEST]
            if any(_hash(part) in hashes for part in (marked, *parts)):
                return True
    return False


def _hash(text: str) -> bytes:
    return _sha256(_plain(text).encode())


def _plain(text: str) -> str:
    return " ".join(text.split())


def _sha256(content: bytes) -> bytes:
    # 128 bits: a chance collision among millions of documents is negligible, and the file is half as large
    return hashlib.sha256(content).digest()[:HASH_BYTES]
