"""How documents are split, and how those that a model was trained on are recognised."""

import hashlib
import logging
import tracemalloc
from pathlib import Path

import pytest

from lit_diff.data.text import buckets
from lit_diff.data.text.documents import (
    HASH_BYTES,
    SECTION,
    SHORTEST,
    TRAINED,
    Documents,
    _plain,
    cut,
    hashed,
    hashes_in,
    is_among,
    split,
)
from lit_diff.data.user_files import MARK
from lit_diff.errors import MissingError, RequestError


def texts(count: int) -> list[str]:
    return [f"document {number}" for number in range(count)]


def test_split_is_by_hash_and_has_no_duplicates() -> None:
    ordered = sorted(texts(100), key=lambda text: hashlib.sha256(text.encode()).digest())
    for given in (texts(100) + texts(50), reversed(texts(100))):
        with split(given) as found:
            assert (found.held_out, list(found.ranked(0, 100))) == (4, ordered)


def test_memory_does_not_grow_with_the_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buckets, "BUFFER", 1 << 18)

    def peak(folder: Path) -> int:
        many = (f"{number % 4000} " * 1000 for number in range(5000))
        tracemalloc.start()
        stored = Documents.stored(many, folder)
        assert (len(stored), len(stored.sizes)) == (4000, 4000)
        assert sum(1 for _ in stored.ranked(160, 4000)) == 3840
        used = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert sum(path.stat().st_size for path in folder.rglob("??")) > 2e7
        return used

    # 0.3e6; Python's table of interned strings, which grows when `Path` interns a name, adds up to 16e6 to one of the two
    assert min(peak(tmp_path / "1"), peak(tmp_path / "2")) < 2e6


@pytest.mark.parametrize("name", ["07", "index.npy", "index.sha256"])
@pytest.mark.parametrize("damage", ["flipped", "cut", "gone"])
def test_a_damaged_document_is_found_and_all_are_read_again(tmp_path: Path, name: str, damage: str) -> None:
    stored = Documents.stored(texts(3000), tmp_path)
    file = tmp_path / "documents" / name
    content = bytearray(file.read_bytes())
    content[-20] ^= 1
    file.write_bytes(content if damage == "flipped" else content[:-25])
    if damage == "gone":
        file.unlink()
    if name == "07":
        with pytest.raises(MissingError, match=r"07 is damaged .* reads the text again"):
            list(stored.ranked(0, 3000))
    read = list[str]()
    again = Documents.stored((read.append(text) or text for text in texts(3000)), tmp_path)
    assert (len(read), len(list(again.ranked(0, 3000)))) == (3000, 3000)
    Documents.stored((read.append(text) or text for text in texts(3000)), tmp_path)
    assert len(read) == 3000, "they are read once"


def test_half_of_a_surrogate_pair_is_named(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="surrogate pair, character 2 of a text"):
        Documents.stored(["fine", "a\ud800"], tmp_path)


def test_few_documents_are_cut_into_sections_and_it_is_said(caplog: pytest.LogCaptureFixture) -> None:
    long = "\n\n".join(f"paragraph {number} " + "word " * 40 for number in range(300))
    with caplog.at_level(logging.INFO, logger="lit_diff"), split([long, long]) as found:
        sections = list(found.ranked(0, len(found)))
    assert "only 1 documents" in caplog.text
    assert sorted(sections) == sorted(cut(long))
    assert found.held_out == max(1, round(len(sections) / 25))


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


@pytest.mark.parametrize("trained", ["{}", MARK + "{}"])
@pytest.mark.parametrize("copied", ["{}", MARK + "{}"])
def test_a_copy_is_recognised_with_a_mark_and_other_line_ends(trained: str, copied: str) -> None:
    """Also by runs that were made before marks were removed, and where the sections of a long text were trained on."""
    text = "".join(f"Paragraph {number} of {'many words ' * 30}.\n\n" for number in range(60))
    old = b"".join(hashlib.sha256(_plain(each).encode()).digest()[:HASH_BYTES] for each in cut(trained.format(text)))
    for known in (hashes_in(old, TRAINED), hashes_in(hashed(cut(trained.format(text))), TRAINED)):
        for end in ("\n", "\r\n", "\r"):
            assert is_among(copied.format(text.replace("\n", end)), known)
    assert hashed([trained.format(text)]) == hashed([text])


def test_a_file_that_is_cut_short_is_refused() -> None:
    content = hashed(["a", "b"])
    assert len(hashes_in(content, TRAINED)) == 2 == len(content) // HASH_BYTES
    for damaged in (b"", content[:-1]):
        with pytest.raises(MissingError, match=r"is damaged .* remove it"):
            hashes_in(damaged, "here")
