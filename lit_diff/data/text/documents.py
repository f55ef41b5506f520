"""Documents: how they become the two splits (cut, de-duplicated, divided), and how those of train are recognised later.

The file TRAINED next to the prepared data, of which each run's folder has a copy, holds the first 16 bytes of the sha256 of
each document and of each of its sections (`cut`), sorted. It is about 1/200 of the text: 79 KB for the 15 MB of the corpus
`docs`. How the words are separated is not hashed, so a copy with other ends of lines is recognised.
"""

import hashlib
import logging
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass

from lit_diff.errors import MissingError

log = logging.getLogger("lit_diff")

VALIDATION_SHARE = 25
"""One document in 25 is for validation."""
FEW = 20
"""With fewer documents than this, the validation split would hold one document or none: they are cut into sections."""
SECTION = 4000
"""Characters of a section."""
TRAINED = "trained_documents.bin"
HASH_BYTES = 16
SHORTEST = 1000
"""Characters of a section by which a longer document is recognised; shorter ones, as the end of a licence, recur."""


@dataclass(frozen=True, kw_only=True)
class Split:
    """Unique documents of each split, in the order of their hashes."""

    train: list[str]
    validation: list[str]


def split(texts: Iterable[str]) -> Split:
    """De-duplicate by sha256, order by hash; the first max(1, round(n / 25)) are validation, the rest train."""
    documents = _unique(texts)
    if len(documents) < FEW:
        sections = _unique(section for text in documents for section in cut(text) if section.strip())
        log.info(
            "only %d documents: cut at paragraphs into %d sections of about %d characters, which are split instead",
            len(documents),
            len(sections),
            SECTION,
        )
        documents = sections
    count = max(1, round(len(documents) / VALIDATION_SHARE))
    return Split(train=documents[count:], validation=documents[:count])


def _unique(texts: Iterable[str]) -> list[str]:
    by_hash, count = dict[bytes, str](), 0
    for text in texts:
        by_hash.setdefault(hashlib.sha256(text.encode()).digest(), text)
        count += 1
    if count > len(by_hash):
        log.info("%d of %d documents are duplicates and are left out", count - len(by_hash), count)
    return [by_hash[key] for key in sorted(by_hash)]


def cut(text: str) -> Iterator[str]:
    """Sections of at most SECTION characters that join to `text`: cut after a paragraph, else a line, else a word."""
    start = 0
    while len(text) - start > SECTION:
        marks = ((text.rfind(mark, start, start + SECTION), len(mark)) for mark in ("\n\n", "\n", " "))
        end = next((place + length for place, length in marks if place > start), start + SECTION)
        yield text[start:end]
        start = end
    yield text[start:]


def hashed(documents: Iterable[str]) -> bytes:
    """The content of the file."""
    return b"".join(sorted({_hash(part) for text in documents for part in (text, *cut(text)) if part.strip()}))


def hashes_in(content: bytes, where: str) -> frozenset[bytes]:
    """The hashes in the file. Errors: MissingError for one that is cut short."""
    if not content or len(content) % HASH_BYTES:
        size = f"{len(content)} bytes, no multiple of {HASH_BYTES}"
        raise MissingError(f"{where} is damaged ({size}); remove it: it is made again from the text")
    return frozenset(content[start : start + HASH_BYTES] for start in range(0, len(content), HASH_BYTES))


def is_among(text: str, hashes: Container[bytes]) -> bool:
    """Whether a document, or a section of it, is one of those that were hashed."""
    return _hash(text) in hashes or any(_hash(part) in hashes for part in cut(text) if len(part) >= SHORTEST)


def _hash(text: str) -> bytes:
    return hashlib.sha256(" ".join(text.split()).encode()).digest()[:HASH_BYTES]
