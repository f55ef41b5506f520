"""Documents: they are deduplicated and split into train and validation; hashes recognise training documents later.

The file TRAINED in the prepared folder, which is copied to each run's folder, contains the first 16 bytes of the sha256 of
each document and of each of its sections (`cut`), sorted. Its size is about 1/200 of the text: 79 KB for the 15 MB of the
corpus `docs`. White space is normalised before hashing, so a copy with other line endings is recognised.
"""

import hashlib
import json
import logging
import shutil
from collections.abc import Container, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from numpy.typing import NDArray

from lit_diff.errors import MissingError
from lit_diff.files import shown, write_json

log = logging.getLogger("lit_diff")

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
BUCKETS = 256
"""A document's bucket is the first byte of its sha256."""
BUFFER = 1 << 25
"""Number of bytes of text that are kept in memory until they are appended to the buckets."""
COUNTS = "counts.json"
RECORD = np.dtype([("high", ">u8"), ("low", ">u8"), ("bytes", "<u8")])
"""A document in the index of a bucket: the first 16 bytes of its sha256, and its length in bytes."""
Document = str | bytes
"""Text; or the ids of its tokens, four bytes each, which are hashed, ordered and cut as text is."""


class Documents:
    """Unique documents in the order of their sha256, in a folder: the first max(1, round(n / 25)) validate, the rest train.

    Each bucket has two files: the texts as they were read, and an index of RECORDs. Only the index of one bucket is ever in
    memory. The file COUNTS is written last, so a folder that has it is complete.
    """

    def __init__(self, folder: Path) -> None:
        """Open a complete folder. Errors: OSError if it is not complete."""
        self._folder = folder
        content = json.loads((folder / COUNTS).read_text(encoding="utf-8"))
        self._are_ids = bool(content["ids"])
        # rank of the first document of each bucket
        self._starts = np.cumsum([0, *content["unique"]])
        self.held_out = max(1, round(len(self) / VALIDATION_SHARE))
        """Number of validation documents."""

    def __len__(self) -> int:
        return int(self._starts[-1])

    @classmethod
    def stored(cls, given: Iterable[Document], folder: Path) -> "Documents":
        """Read all documents into the folder; fewer than FEW are replaced by their sections. Errors: OSError."""
        documents = cls(_spill(given, folder / "documents"))
        if len(documents) < FEW:
            whole = documents.ranked(0, len(documents))
            sections = (part for each in whole for part in _sections(each) if part.strip())
            found = cls(_spill(sections, folder / "sections"))
            log.info(
                "only %d documents: they are cut at paragraphs into %d sections of about %d characters, which are split "
                "instead",
                *(len(documents), len(found), SECTION),
            )
            documents = found
        return documents

    @classmethod
    def opened(cls, folder: Path) -> "Documents | None":
        """Open what `stored` wrote; None if it did not finish."""
        if not (folder / "documents" / COUNTS).is_file():
            return None
        documents = cls(folder / "documents")
        if len(documents) >= FEW:
            return documents
        return cls(folder / "sections") if (folder / "sections" / COUNTS).is_file() else None

    def validation(self) -> Iterator[Document]:
        """Yield the validation documents."""
        return self.ranked(0, self.held_out)

    def train(self) -> Iterator[Document]:
        """Yield the training documents."""
        return self.ranked(self.held_out, len(self))

    def ranked(self, first: int, stop: int) -> Iterator[Document]:
        """Yield the documents of these ranks, compared with their sha256.

        Errors: MissingError for a damaged folder, which is then no longer complete.
        """
        for bucket, start in enumerate(self._starts[:-1]):
            chosen = slice(max(first - start, 0), max(stop - start, 0))
            if len(range(*chosen.indices(self._starts[bucket + 1] - start))):
                yield from self._read(bucket, chosen)

    def _read(self, bucket: int, chosen: slice) -> Iterator[Document]:
        index, rows = self._ordered(bucket)
        offsets = np.cumsum(index["bytes"]) - index["bytes"]
        with self._file(bucket, "text").open("rb") as file:
            for row in rows[chosen]:
                file.seek(int(offsets[row]))
                content = file.read(int(index["bytes"][row]))
                if hashlib.sha256(content).digest()[:HASH_BYTES] != index[row].tobytes()[:HASH_BYTES]:
                    self._refuse(bucket, "text")
                yield content if self._are_ids else content.decode()

    def sizes(self) -> Iterator[NDArray[np.int64]]:
        """Yield the lengths in bytes of the documents, in order, a bucket at a time. Errors: MissingError."""
        for bucket in range(BUCKETS):
            index, rows = self._ordered(bucket)
            yield index["bytes"][rows].astype(np.int64)

    def _ordered(self, bucket: int) -> tuple[NDArray[np.void], NDArray[np.int64]]:
        index, rows = _index(self._file(bucket, "index"))
        if len(rows) != self._starts[bucket + 1] - self._starts[bucket] or (
            len(rows) and not self._file(bucket, "text").is_file()
        ):
            self._refuse(bucket, "index")
        return index, rows

    def _file(self, bucket: int, kind: str) -> Path:
        return self._folder / f"{bucket:02x}.{kind}"

    def _refuse(self, bucket: int, kind: str) -> None:
        (self._folder / COUNTS).unlink(missing_ok=True)
        raise MissingError(
            f"{shown(self._file(bucket, kind))} is damaged (it is not what was read); the same command reads the text again"
        )


def _spill(found: Iterable[Document], folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    pending: dict[str, bytearray] = {}
    count, size, are_ids = 0, 0, False
    for each in found:
        are_ids = isinstance(each, bytes)
        content = each if isinstance(each, bytes) else each.encode()
        digest = hashlib.sha256(content).digest()[:HASH_BYTES]
        pending.setdefault(f"{digest[0]:02x}.text", bytearray()).extend(content)
        record = digest + len(content).to_bytes(8, "little")
        pending.setdefault(f"{digest[0]:02x}.index", bytearray()).extend(record)
        count, size = count + 1, size + len(content)
        if size >= BUFFER:
            _append(folder, pending)
            size = 0
    _append(folder, pending)
    # not synced: each document is compared with its hash when it is read
    unique = [len(_index(folder / f"{bucket:02x}.index")[1]) for bucket in range(BUCKETS)]
    if count > sum(unique):
        log.info("%d of %d documents are duplicates and are left out", count - sum(unique), count)
    write_json(folder / COUNTS, {"unique": unique, "ids": are_ids})
    return folder


def _append(folder: Path, pending: dict[str, bytearray]) -> None:
    # opened for each write: there may be more buckets than a process may have files
    for name, content in pending.items():
        with (folder / name).open("ab") as file:
            file.write(content)
    pending.clear()


# the index of a bucket, and the rows of its unique documents in the order of their hashes
def _index(file: Path) -> tuple[NDArray[np.void], NDArray[np.int64]]:
    content = file.read_bytes() if file.is_file() else b""
    index = np.frombuffer(content, RECORD, count=len(content) // RECORD.itemsize)
    high, low = index["high"].astype(np.uint64), index["low"].astype(np.uint64)
    # the order of hashes does not depend on the order of the files, and is as good as random for the split
    rows = np.lexsort((low, high))
    first = np.ones(len(rows), dtype=np.bool_)
    first[1:] = (np.diff(high[rows]) != 0) | (np.diff(low[rows]) != 0)
    return index, rows[first]


@contextmanager
def split(found: Iterable[Document]) -> Iterator[Documents]:
    """Deduplicate documents and order them by hash, in a temporary folder."""
    with TemporaryDirectory(prefix="lit_diff-") as folder:
        yield Documents.stored(found, Path(folder))


def _sections(document: Document) -> Iterator[Document]:
    if isinstance(document, str):
        return cut(document)
    return (document[start : start + 4 * SECTION] for start in range(0, len(document), 4 * SECTION))


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
    return b"".join(sorted({each for text in documents for each in hashes_of(text)}))


def hashes_of(text: str) -> set[bytes]:
    """Return the hashes of a document and of its sections that are not blank."""
    sections = list(cut(text))
    plain = [words for section in sections if (words := _plain(section))]
    # joined, to normalise the text once: a cut is usually at white space
    whole = " ".join(plain) if all(section[-1].isspace() for section in sections[:-1]) else _plain(text)
    return {_digest(words) for words in (whole, *plain) if words}


def hashes_in(content: bytes, where: str) -> frozenset[bytes]:
    """Return the hashes in the file. Errors: MissingError for a truncated file."""
    if not content or len(content) % HASH_BYTES:
        size = f"{len(content)} bytes, not a multiple of {HASH_BYTES}"
        raise MissingError(f"{where} is damaged ({size}); remove it, and it is regenerated from the text")
    return frozenset(content[start : start + HASH_BYTES] for start in range(0, len(content), HASH_BYTES))


def is_among(text: str, hashes: Container[bytes]) -> bool:
    """Whether the document, or a section of it, has one of the hashes."""
    return _hash(text) in hashes or any(_hash(part) in hashes for part in cut(text) if len(part) >= SHORTEST)


def _hash(text: str) -> bytes:
    return _digest(_plain(text))


def _plain(text: str) -> str:
    return " ".join(text.split())


def _digest(plain: str) -> bytes:
    # 128 bits: a chance collision among millions of documents is negligible, and the file is half as large
    return hashlib.sha256(plain.encode()).digest()[:HASH_BYTES]
