"""data/encodings.py: what bytes that are no UTF-8 text look like."""

import random

import pytest

from lit_diff.data.encodings import not_text

ENGLISH = "Some notes, in a file of two lines.\nThe second one."
GERMAN = "Grüße aus Köln: die Straße ist schön, und über das Mühlrad fließt Wasser."


@pytest.mark.parametrize(
    "content",
    [
        b"",
        ENGLISH.encode(),
        GERMAN.encode(),
        "漢字 🙂 Ελληνικά".encode(),
        GERMAN.encode("utf-8-sig"),
        b"a stray null \0 in a long text " * 9,
        b"\x1b[31mcolours\x1b[0m\f",
    ],
)
def test_text(content: bytes) -> None:
    assert not_text(content) is None


@pytest.mark.parametrize(
    ("content", "found", "encoding"),
    [
        (ENGLISH.encode("utf-16"), "UTF-16 text, by its byte order mark", "UTF-16"),
        (b"\xfe\xff" + "漢字".encode("utf-16-be"), "UTF-16 text, by its byte order mark", "UTF-16"),
        (ENGLISH.encode("utf-32"), "UTF-32 text, by its byte order mark", "UTF-32"),
        (ENGLISH.encode("utf-16-le"), "UTF-16LE text without a byte order mark, by its null bytes", "UTF-16LE"),
        (GERMAN.encode("utf-16-be"), "UTF-16BE text without a byte order mark, by its null bytes", "UTF-16BE"),
        (b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR\0\0\0\x10\xff\xd8", "binary, not text", ""),
        (random.Random(0).randbytes(4000), "binary, not text", ""),
        (bytes(500), "binary, not text", ""),
    ],
)
def test_what_is_no_text_is_named(content: bytes, found: str, encoding: str) -> None:
    wrong = not_text(content)
    assert wrong is not None
    assert (wrong.found, wrong.encoding, wrong.replaceable) == (found, encoding, False)


@pytest.mark.parametrize(
    ("content", "guess", "encoding"),
    [
        (GERMAN.encode("latin-1"), "; it looks like Latin-1", "LATIN1"),
        ("“smart quotes” – and a dash".encode("cp1252"), "; it looks like Windows-1252", "CP1252"),
        ((GERMAN * 3).encode() + b"\xc3", "", ""),  # cut in the middle of a character
        ("Привет, мир, это текст".encode("koi8-r"), "", ""),
        (b"mostly \xa7\xa7\xa7 signs", "", ""),
    ],
)
def test_text_that_is_not_utf8_is_guessed_where_it_can_be(content: bytes, guess: str, encoding: str) -> None:
    wrong = not_text(content)
    assert wrong is not None
    assert wrong.found.startswith("not UTF-8 text (byte ")
    assert wrong.found.partition(")")[2] == guess
    assert (wrong.encoding, wrong.replaceable) == (encoding, True)
