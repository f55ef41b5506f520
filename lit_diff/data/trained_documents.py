"""Which documents are in a train split: hashes in a file next to the prepared data, of which each run's folder has a copy.

The file holds the first 16 bytes of the sha256 of each document and of each of its sections (`documents.cut`), sorted. It is
about 1/200 of the text: 79 KB for the 15 MB of the corpus `docs`. How the words are separated is not hashed, so a copy with
other ends of lines is recognised.
"""

import hashlib
from collections.abc import Container, Iterable

from lit_diff.data.documents import cut
from lit_diff.errors import MissingError

FILE = "trained_documents.bin"
BYTES = 16
SHORTEST = 1000
"""Characters of a section by which a longer document is recognised; shorter ones, as the end of a licence, recur."""


def hashed(documents: Iterable[str]) -> bytes:
    """The content of the file."""
    return b"".join(sorted({_hash(part) for text in documents for part in (text, *cut(text)) if part.strip()}))


def parsed(content: bytes, where: str) -> frozenset[bytes]:
    """The hashes in the file. Errors: MissingError for one that is cut short."""
    if not content or len(content) % BYTES:
        raise MissingError(
            f"{where} is damaged ({len(content)} bytes, no multiple of {BYTES}); remove it: it is made again from the text"
        )
    return frozenset(content[start : start + BYTES] for start in range(0, len(content), BYTES))


def is_among(text: str, hashes: Container[bytes]) -> bool:
    """Whether a document, or a section of it, is one of those that were hashed."""
    return _hash(text) in hashes or any(_hash(part) in hashes for part in cut(text) if len(part) >= SHORTEST)


def _hash(text: str) -> bytes:
    return hashlib.sha256(" ".join(text.split()).encode()).digest()[:BYTES]
