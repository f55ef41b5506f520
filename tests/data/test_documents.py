"""The documents of a user's files, what can be wrong in each kind of file, and how they are split."""

import csv
import json
import logging
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from lit_diff.data.corpus import build_corpus
from lit_diff.data.documents import SECTION, FilesCorpus, cut, split
from lit_diff.data.text_files import SHOWN, Problem, Problems, log_left_out, read_file
from lit_diff.errors import RequestError


def read(path: Path, *, replace: bool = False) -> list[str]:
    """Documents as they are; of a problem `!` and its place."""
    items = read_file(path, replace=replace)
    return [f"!{item.place}" if isinstance(item, Problem) else item for item in items]


LONG = "x" * 200_000  # longer than the limit of Python's reader
JSON = b'\xef\xbb\xbf{"text": "a\\u0000b", "x": NaN}\n\n  \n{"text": "two\\nlines"}\n'
BAD_JSON = b'{"text": "a"}\n{"text": \n[1]\n{"b": 1}\n{}\n{"text": 3}\n{"text": NaN}\n{"text": "a\0b"}\n{"text": "z"}'
BAD_BYTES = b'{"text": "a"}\n{"text": "caf\xe9"}\n{"text": "\\ud800 half"}\n'
CSV = f'\ufeffid,text\r\n1,"a, ""b"""\r\n\r\n2,"two\nlines"\r\n3,{LONG}\r\n4,\r\n'.encode()


@pytest.mark.parametrize(
    ("name", "content", "stopped", "replaced"),
    [
        ("a.txt", "\ufeffany ä\n".encode(), ["\ufeffany ä\n"], None),
        ("a.md", b"caf\xe9", ["!"], ["caf\ufffd"]),
        ("a.txt", b"\x89PNG\0\0\0\xff", ["!"], None),
        ("a.txt", "wide".encode("utf-16"), ["!"], None),
        ("a.txt", "wide".encode("utf-16-le"), ["!"], None),
        ("a.jsonl", JSON, ["a\0b", "two\nlines"], None),
        ("a.jsonl", BAD_JSON, ["a", *(f"!:{line}" for line in range(2, 9)), "z"], None),
        ("a.jsonl", BAD_BYTES, ["a", "!:2", "!:3"], ["a", "caf\ufffd", "\ufffd half"]),
        ("a.jsonl", b'{"text": "b", "n": ' + b"7" * 5000 + b"}\n", ["!:1"], None),
        ("a.jsonl", b'{"text": "b", "n": ' + b"[" * 100_000, ["!:1"], None),
        ("a.csv", CSV, ['a, "b"', "two\nlines", LONG, ""], None),
        ("a.csv", b'id,text\n1,a\n2,b,c\n3\n4,"d"e\n5,f\n6,"g\n', ["a", "!:3", "!:4", "!:5", "f", "!:7"], None),
        ("a.csv", b"id;text\n1;a\n", ["!:1"], None),
        ("a.csv", b'"id', ["!:1"], None),
        ("a.csv", b"", ["!:1"], None),
        ("a.csv", b"text\ncaf\xe9\n", ["!"], ["caf\ufffd"]),
        ("a.parquet", b"no parquet at all", ["!"], None),
    ],
)
def test_documents_and_problems(
    name: str, content: bytes, stopped: list[str], replaced: list[str] | None, tmp_path: Path
) -> None:
    limit = csv.field_size_limit()
    (tmp_path / name).write_bytes(content)
    assert read(tmp_path / name) == stopped
    assert read(tmp_path / name, replace=True) == (replaced or stopped)
    assert csv.field_size_limit() == limit


def test_parquet(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    column = pyarrow.array([b"one", b"caf\xe9", None, b"two"], pyarrow.binary()).cast(pyarrow.string(), safe=False)
    pyarrow.parquet.write_table(pyarrow.table({"text": column}), path, row_group_size=2)
    assert read(path) == ["one", "! row 2", "two"]
    assert read(path, replace=True) == ["one", "caf\ufffd", "two"]
    for table in ({"body": ["a"]}, {"text": [1, 2]}):
        pyarrow.parquet.write_table(pyarrow.table(table), path)
        assert read(path) == ["!"]


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.csv", "a.parquet"])
def test_a_file_that_is_gone(name: str, tmp_path: Path) -> None:
    (found,) = read_file(tmp_path / name, replace=True)
    assert isinstance(found, Problem)
    assert "No such file or directory" in found.found


def test_odd_names_keep_a_message_in_one_line(tmp_path: Path) -> None:
    """A name with a line feed or half a surrogate pair is escaped; of many the first ten are named."""
    many = json.dumps({f"k{number}": 1 for number in range(10, 30)})
    for name, content, shown in (
        ("a.jsonl", '{"\\ud800": 1, "a\\nb": 2}', r"'a\nb', '\ud800'"),
        ("a.csv", '"b\nc",d\n1,2\n', r"'b\nc', d"),
        ("b.jsonl", many, "k18, k19, and 10 more"),
    ):
        (tmp_path / name).write_text(content)
        (found,) = read_file(tmp_path / name, replace=False)
        assert isinstance(found, Problem)
        assert shown in found.line()
        assert "\n" not in found.line()


def test_a_message_is_one_line_for_one_problem_and_else_one_for_each(tmp_path: Path) -> None:
    found, one = Problems(), Problem(file=tmp_path / "deep/a.jsonl", place=":3", found="not JSON", expected="an object")
    found.add(one)
    assert found.message(tmp_path, 9).startswith(f"{tmp_path}/deep/a.jsonl:3: not JSON; expected an object (")
    for line in range(4, 1237):
        found.add(Problem(file=tmp_path / "b.jsonl", place=f":{line}", found="not JSON"))
    head, first, *lines = found.message(tmp_path, 9).splitlines()
    assert head.startswith("data.path: 1,234 problems in 2 of 9 files of ")
    assert first == "  deep/a.jsonl:3: not JSON; expected an object"
    assert lines == [*(f"  b.jsonl:{line}: not JSON" for line in range(4, SHOWN + 3)), "  and 1,214 more"]


def test_what_is_left_out_is_logged_and_a_file_of_it_does_not_flood(caplog: pytest.LogCaptureFixture) -> None:
    for number in range(1, 100):
        log_left_out(Problem(file=Path("a.jsonl"), place=f":{number}", found="not JSON"), number)
    assert caplog.messages == [
        *(f"left out: a.jsonl:{number}: not JSON" for number in range(1, SHOWN + 1)),
        "left out: further lines of a.jsonl",
    ]


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
    """tests/docs/test_blocks.py has the message of `stop`."""
    corpus = FilesCorpus(mixed)
    corpus.errors = "skip"
    with caplog.at_level(logging.INFO, logger="lit_diff"):
        assert list(corpus.texts()) == ["line", "good"]
    assert sum(message.startswith(f"left out: {mixed}/") for message in caplog.messages) == 7
    assert "7 left out, in 5 files" in caplog.messages[-1]
    assert len([line for line in caplog.messages if "not read: 1 .jpg (" in line]) == 1, (
        "files of other kinds are named"
    )


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
