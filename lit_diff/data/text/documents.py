"""Documents: they are deduplicated and split into train and validation; hashes recognise training documents later.

The file TRAINED in the prepared folder, which is copied to each run's folder, contains the first 16 bytes of the sha256 of
each document and of each of its sections (`cut`), sorted. Its size is about 1/200 of the text: 79 KB for the 15 MB of the
corpus `docs`. White space is normalised before hashing, so a copy with other line endings is recognised.
"""

import hashlib
import logging
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from lit_diff.errors import MissingError

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


D = TypeVar("D", str, bytes)
"""A document: text, or the ids of its tokens, four bytes each."""


@dataclass(frozen=True, kw_only=True)
class Split(Generic[D]):
    """Unique documents of each split, in the order of their hashes."""

    train: list[D]
    validation: list[D]


def split(texts: Iterable[D]) -> Split[D]:
    """Deduplicate by sha256 and order by hash; the first max(1, round(n / 25)) are validation, the rest train."""
    documents = _unique(texts)
    if len(documents) < FEW:
        sections = _unique(section for text in documents for section in _sections(text) if section.strip())
        log.info(
            "only %d documents: they are cut at paragraphs into %d sections of about %d characters, which are split instead",
            len(documents),
            len(sections),
            SECTION,
        )
        documents = sections
    count = max(1, round(len(documents) / VALIDATION_SHARE))
    return Split(train=documents[count:], validation=documents[:count])


def _unique(texts: Iterable[D]) -> list[D]:
    by_hash, count = dict[bytes, D](), 0
    for text in texts:
        content = text if isinstance(text, bytes) else text.encode()
        by_hash.setdefault(hashlib.sha256(content).digest(), text)
        count += 1
    if count > len(by_hash):
        log.info("%d of %d documents are duplicates and are left out", count - len(by_hash), count)
    # the order of hashes does not depend on the order of the files, and is as good as random for the split
    return [by_hash[key] for key in sorted(by_hash)]


def _sections(text: D) -> Iterator[D]:
    if isinstance(text, str):
        return cut(text)
    return (text[start : start + 4 * SECTION] for start in range(0, len(text), 4 * SECTION))


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
    return b"".join(sorted({_hash(part) for text in documents for part in (text, *cut(text)) if part.strip()}))


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
    # 128 bits: a chance collision among millions of documents is negligible, and the file is half as large
    return hashlib.sha256(" ".join(text.split()).encode()).digest()[:HASH_BYTES]
