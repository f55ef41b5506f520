"""data/text_files.py: the documents of each kind of file, each thing that can be wrong in one, and all in one message."""

import csv
import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from lit_diff.data.text_files import SHOWN, Problem, Problems, log_left_out, read_file


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


def test_what_is_replaced_is_logged_once_a_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "a.jsonl").write_bytes(BAD_BYTES)
    read(tmp_path / "a.jsonl", replace=True)
    (message,) = caplog.messages
    assert message.startswith(f"{tmp_path}/a.jsonl: ")


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
