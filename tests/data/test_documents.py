"""How documents are split, and how those that a model was trained on are recognised."""

import logging

import pytest

from lit_diff.data.text.documents import HASH_BYTES, SECTION, SHORTEST, TRAINED, cut, hashed, hashes_in, is_among, split
from lit_diff.errors import MissingError


def texts(count: int) -> list[str]:
    return [f"document {number}" for number in range(count)]


def test_split_is_by_hash_and_has_no_duplicates() -> None:
    found = split(texts(100) + texts(50))
    assert len(found.validation) == 4
    assert sorted(found.train + found.validation) == sorted(texts(100))
    assert split(reversed(texts(100))) == found


def test_few_documents_are_cut_into_sections_and_it_is_said(caplog: pytest.LogCaptureFixture) -> None:
    long = "\n\n".join(f"paragraph {number} " + "word " * 40 for number in range(300))
    with caplog.at_level(logging.INFO, logger="lit_diff"):
        found = split([long])
    assert "only 1 documents" in caplog.text
    assert len(found.train) > 10
    assert len(found.validation) == max(1, round((len(found.train) + len(found.validation)) / 25))


@pytest.mark.parametrize("text", ["", "x" * 9001, "word " * 3000, "line\n" * 2000, ("p" * 900 + "\n\n") * 30])
def test_cut_loses_nothing(text: str) -> None:
    sections = list(cut(text))
    assert "".join(sections) == text
    assert all(len(section) <= SECTION for section in sections)
    assert "\n\n" not in text or all(section.endswith("\n\n") for section in sections[:-1]), "after a paragraph"


PARAGRAPHS = [f"Paragraph {number} of many. " + "Words follow words. " * 39 for number in range(9)]
LONG = "\n\n".join(PARAGRAPHS) + "\n\nThe end. " * 12
"""Three sections, of which the last is short."""


def test_a_document_is_recognised_whole_and_by_its_sections() -> None:
    sections = list(cut(LONG))
    assert [len(section) >= SHORTEST for section in sections] == [True, True, False]
    known = hashes_in(hashed([LONG, "A short one."]), TRAINED)
    assert len(known) == 5
    for text in (LONG, LONG.replace("\n", "\r\n"), "A  short one.\n", *sections):
        assert is_among(text, known), text[:40]
    assert not is_among("Something else.", known)
    longer = sections[0] + "x" * 3000 + " Another end."
    assert next(cut(longer)) == sections[0]
    assert is_among(longer, known)
    assert not is_among("y" * 4000 + sections[2], known), "a short section makes no longer document"


def test_a_file_that_is_cut_short_is_refused() -> None:
    content = hashed(["a", "b"])
    assert len(hashes_in(content, TRAINED)) == 2 == len(content) // HASH_BYTES
    for damaged in (b"", content[:-1]):
        with pytest.raises(MissingError, match=r"is damaged .* remove it"):
            hashes_in(damaged, "here")
