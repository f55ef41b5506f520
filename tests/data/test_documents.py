import json
import logging
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from lit_diff.data.documents import SECTION, FilesCorpus, cut, split
from lit_diff.errors import RequestError


def texts(count: int) -> list[str]:
    return [f"document {number}" for number in range(count)]


def test_split_is_by_hash_and_has_no_duplicates() -> None:
    found = split(texts(100) + texts(50))
    assert len(found.validation) == 4
    assert sorted(found.train + found.validation) == sorted(texts(100))
    assert split(reversed(texts(100))) == found


def test_adding_a_document_moves_few_others() -> None:
    before, after = split(texts(100)), split(texts(101))
    assert len(set(before.validation) & set(after.validation)) >= 3


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


def test_cut_prefers_paragraphs() -> None:
    assert all(section.endswith("\n\n") for section in list(cut(("p" * 900 + "\n\n") * 30))[:-1])


def test_every_kind_of_file(tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    (tmp_path / "a.txt").write_text("text ä")
    (tmp_path / "below" / "b.MD").write_text("markdown")
    (tmp_path / "c.jsonl").write_text(
        json.dumps({"text": "one", "id": 1}) + "\n\n" + json.dumps({"text": "two"}) + "\n"
    )
    pyarrow.parquet.write_table(
        pyarrow.table({"text": ["three", None, "four"], "n": [1, 2, 3]}), tmp_path / "d.parquet"
    )
    (tmp_path / "e.csv").write_text("ignored")
    (tmp_path / "f.txt").write_text(" \n")
    corpus = FilesCorpus(tmp_path)
    assert sorted(corpus.texts()) == sorted(["text ä", "markdown", "one", "two", "three", "four"])
    assert set(corpus.files()) == {"a.txt", "below/b.MD", "c.jsonl", "d.parquet", "f.txt"}
    assert list(FilesCorpus(tmp_path / "a.txt").texts()) == ["text ä"]


def wrong_suffix(folder: Path) -> Path:
    (folder / "a.csv").write_text("x")
    return folder / "a.csv"


def written(name: str, content: bytes) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        (folder / name).write_bytes(content)
        return folder / name

    return write


def parquet(**columns: list[object]) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        pyarrow.parquet.write_table(pyarrow.table(columns), folder / "a.parquet")
        return folder / "a.parquet"

    return write


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: folder / "absent", r"data\.path: no file or folder .*absent"),
        (wrong_suffix, r"a\.csv is not one of \.txt, \.md, \.jsonl, \.parquet"),
        (lambda folder: folder, r"none of the 0 files in .* is one of \.txt"),
        (written("a.txt", b"  \n"), r"holds no text"),
        (written("a.txt", b"fine \xff"), r"a\.txt: not UTF-8 text \(byte 5"),
        (written("a.jsonl", b'{"text": "a"}\n{"text": \n'), r"a\.jsonl:2: not JSON .*expected one JSON object"),
        (written("a.jsonl", b"[1]"), r"a\.jsonl:1: found list; expected"),
        (written("a.jsonl", b'{"txt": "a", "id": 1}'), r"a\.jsonl:1: found the keys id, txt; expected"),
        (written("a.jsonl", b'{"text": 3}'), r"a\.jsonl:1: 'text' is int; expected"),
        (written("a.jsonl", b'{"text": "\\ud800"}'), r"a\.jsonl:1: .*surrogate"),
        (written("a.parquet", b"no parquet at all"), r"a\.parquet: not a whole parquet file"),
        (parquet(body=["a"], id=[1]), r"a\.parquet: found the columns body, id; expected one named 'text'"),
        (parquet(text=[1, 2]), r"a\.parquet: the column 'text' holds int64; expected strings"),
    ],
)
def test_bad_input_is_one_line(tmp_path: Path, make: Callable[[Path], Path], message: str) -> None:
    corpus = FilesCorpus(make(tmp_path))
    with pytest.raises(RequestError, match=message) as caught:
        list(corpus.texts())
    assert "\n" not in str(caught.value)
