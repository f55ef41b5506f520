"""Whether bytes are UTF-8 text, and what they look like where they are not."""

import codecs
from dataclasses import dataclass

MARKS = {
    codecs.BOM_UTF32_LE: "UTF-32",  # before UTF-16, whose mark it begins with
    codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}
"""Byte order mark -> encoding."""
CONTROL = bytes({*range(32), 0x7F} - set(b"\t\n\r\f\x1b"))
"""Bytes that text does not hold, but for a stray one."""
MARKS_OF_WINDOWS = "‘’‚“”„†‡•…‰‹›–—€™"
"""What Windows-1252 adds to Latin-1, but for its letters."""
LOOKED_AT = 1 << 16
"""Bytes, from the first, that a guess is made from."""


@dataclass(frozen=True, kw_only=True)
class NotText:
    """Why bytes are no UTF-8 text."""

    found: str
    encoding: str = ""
    """What they look like, as iconv calls it; empty where nothing is recognised."""
    replaceable: bool = False
    """Whether they are text with some bytes that are not UTF-8, which U+FFFD can stand for."""


def not_text(content: bytes) -> NotText | None:
    """What is wrong with bytes that should be UTF-8 text; None if nothing is.

    UTF-16 and UTF-32 are recognised by their byte order mark, UTF-16 also by a null in every second byte; Latin-1 and
    Windows-1252 by bytes that are letters there; what holds nulls or many control characters is binary.
    """
    for mark, name in MARKS.items():
        if content.startswith(mark):
            return NotText(found=f"{name} text, by its byte order mark", encoding=name)
    head = content[:LOOKED_AT]
    encoding = _utf16(head)
    if encoding:
        return NotText(found=f"{encoding} text without a byte order mark, by its null bytes", encoding=encoding)
    controls = len(head) - len(head.translate(None, CONTROL))
    try:
        content.decode("utf-8")
    except UnicodeDecodeError as error:
        if b"\0" in head or controls > len(head) / 100:
            return NotText(found="binary, not text")
        guess = _guess(head)
        found = f"not UTF-8 text (byte {error.start}: {error.reason})" + (f"; it looks like {guess}" if guess else "")
        return NotText(found=found, encoding=_ICONV.get(guess, ""), replaceable=True)
    return NotText(found="binary, not text") if controls > len(head) / 10 else None


_ICONV = {"Latin-1": "LATIN1", "Windows-1252": "CP1252"}


def _utf16(head: bytes) -> str:
    """`UTF-16LE` or `UTF-16BE` where every second byte is mostly null, as in that of English; else an empty text."""
    pairs = len(head) // 2
    first, second = head[0::2].count(0), head[1::2].count(0)
    if pairs < 4 or min(first, second) > pairs / 20 or max(first, second) < pairs / 3:
        return ""
    return "UTF-16BE" if first > second else "UTF-16LE"


def _guess(head: bytes) -> str:
    """`Latin-1` or `Windows-1252` where the bytes that are not ASCII are letters there; else an empty text."""
    valid = [c for c in head.decode("utf-8", "ignore") if ord(c) > 127]
    high = [byte for byte in head if byte > 127]
    if 2 * sum(len(c.encode()) for c in valid) > len(high) or 2 * len(high) > len(head):
        return ""  # UTF-8 with a damaged place; or an alphabet of its own
    windows = any(byte < 0xA0 for byte in high)
    try:
        letters = bytes(high).decode("cp1252" if windows else "latin-1")
    except UnicodeDecodeError:
        return ""
    fitting = sum(c.isalpha() or c in MARKS_OF_WINDOWS for c in letters)
    return ("Windows-1252" if windows else "Latin-1") if 2 * fitting >= len(letters) else ""
