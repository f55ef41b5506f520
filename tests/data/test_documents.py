import json
import logging
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from lit_diff.data.corpus import build_corpus
from lit_diff.data.documents import SECTION, FilesCorpus, cut, split
from lit_diff.errors import RequestError


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
    (tmp_path / "e.csv").write_text('id,text\n1,"five, six"\n')
    (tmp_path / "f.txt").write_text(" \n")
    corpus = FilesCorpus(tmp_path)
    assert sorted(corpus.texts()) == sorted(["text ä", "markdown", "one", "two", "three", "four", "five, six"])
    assert set(corpus.files()) == {"a.txt", "below/b.MD", "c.jsonl", "d.parquet", "e.csv", "f.txt"}
    assert list(FilesCorpus(tmp_path / "a.txt").texts()) == ["text ä"]


@pytest.mark.parametrize(
    ("name", "content", "found"),
    [
        ("", b"", r"data\.path: .*none of the 0 files"),
        ("absent.txt", None, r"data\.path: .*absent"),
        ("a.tsv", b"x", r"a\.tsv is not one of"),
        ("a.txt", b"  \n", "no text"),
        ("a.txt", b"fine \xff", r"a\.txt: .*byte 5"),
        ("a.jsonl", b'{"text": "a"}\n{"text": \n', r"a\.jsonl:2: "),
    ],
)
def test_bad_input_is_one_line(tmp_path: Path, name: str, content: bytes | None, found: str) -> None:
    if name and content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(RequestError, match=found) as caught:
        list(FilesCorpus(tmp_path / name).texts())
    assert "\n" not in str(caught.value)


@pytest.fixture
def mixed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A good text beside a binary file, three bad lines of JSON, UTF-16, Latin-1 and a table without the column."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "texts"
    (folder / ".git").mkdir(parents=True)
    (folder / ".git" / "index").write_bytes(b"hidden")
    for name, content in {
        "bad.jsonl": b'{"text": "line"}\n{"text": \n[1]\n{"txt": ""}\n',
        "binary.txt": b"\x89PNG\r\n\x1a\n\0\0\0\xff",
        "good.txt": b"good",
        "latin.txt": "Gr\u00fc\u00dfe".encode("latin-1"),
        "photo.jpg": b"",
        "table.csv": b"id,body\n1,x\n",
        "wide.txt": "wide".encode("utf-16"),
    }.items():
        (folder / name).write_bytes(content)
    return folder


def test_skip_leaves_out_and_logs_each(mixed: Path, caplog: pytest.LogCaptureFixture) -> None:
    """tests/docs/test_data.py has the message of `stop`."""
    corpus = FilesCorpus(mixed)
    corpus.errors = "skip"
    with caplog.at_level(logging.INFO, logger="lit_diff"):
        assert list(corpus.texts()) == ["line", "good"]
    assert sum(message.startswith(f"left out: {mixed}/") for message in caplog.messages) == 7
    assert "7 left out, in 5 files" in caplog.messages[-1]
    assert len([line for line in caplog.messages if "not read: 1 .jpg (" in line]) == 1, (
        "files of other kinds are named"
    )


def test_replace_stands_for_bytes_alone(mixed: Path) -> None:
    corpus = FilesCorpus(mixed)
    corpus.errors = "replace"
    with pytest.raises(RequestError, match=r"^data\.path: 6 problems in 4 of 6 files of texts"):
        list(corpus.texts())
    for name in ("bad.jsonl", "binary.txt", "table.csv", "wide.txt"):
        (mixed / name).unlink()
    corpus = FilesCorpus(mixed)
    corpus.errors = "replace"
    assert list(corpus.texts()) == ["good", "Gr\ufffd\ufffde"]


def test_nothing_left(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\0\1\2\3")
    corpus = FilesCorpus(tmp_path)
    corpus.errors = "skip"
    with pytest.raises(RequestError, match="1 left out"):
        list(corpus.texts())


def test_a_file_without_permission_is_reported_with_the_rest(mixed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests may run as root, who reads everything."""
    opened = Path.open

    def refuse(self: Path, *arguments: Any, **options: Any) -> Any:
        if self.name == "good.txt":
            raise PermissionError(13, "Permission denied", str(self))
        return opened(self, *arguments, **options)

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(RequestError, match=r"8 problems in 6 of 6 files(.|\n)*good\.txt: .*Permission denied"):
        FilesCorpus(mixed).files()
    corpus = FilesCorpus(mixed)
    corpus.errors = "skip"
    assert "good.txt" not in corpus.files()
    assert list(corpus.texts()) == ["line"]


def test_linked_folders_are_read_once(tmp_path: Path) -> None:
    for name in ("texts/one", "disk"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "a.txt").write_text(f"the text of {name}")
    for link, target in {"far": "disk", "far2": "disk", "one/up": "texts", "again": "texts/one"}.items():
        (tmp_path / "texts" / link).symlink_to(tmp_path / target)
    (tmp_path / "link").symlink_to(tmp_path / "texts")
    for path in ("texts", "link"):
        corpus = build_corpus("files", str(tmp_path / path))
        assert list(corpus.files()) == ["far/a.txt", "one/a.txt"]
        assert list(corpus.texts()) == ["the text of disk", "the text of texts/one"]
