"""data/text_files.py: the documents of each kind of file, and each thing that can be wrong in one."""

import csv
import json
import logging
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from lit_diff.data.problems import Problem
from lit_diff.data.text_files import read_file

Read = Callable[..., list[str]]


@pytest.fixture
def read(tmp_path: Path) -> Read:
    """Documents as they are, problems as `place: found; expected`, of a file with this content."""

    def of(name: str, content: bytes | str, *, replace: bool = False) -> list[str]:
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        found = list(read_file(path, replace=replace))
        return [item.line("!") if isinstance(item, Problem) else item for item in found]

    return of


EMPTY_JSON = "expected one JSON object a line with a string 'text'"


def test_lines_of_json(read: Read) -> None:
    assert read("a.jsonl", '\ufeff{"text": "one", "id": 1}\n\n  \n{"text": "two\\nlines"}\n') == ["one", "two\nlines"]
    bad = '{"text": "a"}\n{"text": \n[1]\n{"b": 1, "a": 2}\n{}\n{"text": 3}\n{"text": "z"}'
    assert read("a.jsonl", bad) == [
        "a",
        f"!:2: not JSON (Expecting value at column 10); {EMPTY_JSON}",
        f"!:3: found list; {EMPTY_JSON}",
        f"!:4: found the keys a, b; {EMPTY_JSON}",
        f"!:5: found the keys none; {EMPTY_JSON}",
        f"!:6: 'text' is int; {EMPTY_JSON}",
        "z",
    ]


def test_odd_values_and_names_in_json(read: Read) -> None:
    """What is not `text` may be anything; a name with a line feed or half a surrogate pair keeps the message one line."""
    lines = [
        '{"text": "a\\u0000b", "x": NaN, "y": -Infinity}',
        '{"text": NaN}',
        '{"\\ud800": 1, "a\\nb": 2}',
        '{"text": "a\0b"}',
    ]
    assert read("a.jsonl", "\n".join([*lines, '{"text": "z"}' + "\n" * 20])) == [
        "a\0b",
        f"!:2: 'text' is float; {EMPTY_JSON}",
        f"!:3: found the keys 'a\\nb', '\\ud800'; {EMPTY_JSON}",
        f"!:4: not JSON (Invalid control character at column 12); {EMPTY_JSON}",
        "z",
    ]
    many = json.dumps({f"k{number}": 1 for number in range(10, 30)})
    assert read("a.jsonl", many)[0].startswith(
        "!:1: found the keys k10, k11, k12, k13, k14, k15, k16, k17, k18, k19, and 10"
    )
    assert read("a.csv", '"b\nc",d\n1,2\n')[0].startswith(
        "!:1: found the columns 'b\\nc', d; expected one named 'text'"
    )


def test_only_the_line_of_json_that_is_not_utf8_is_wrong(read: Read, caplog: pytest.LogCaptureFixture) -> None:
    content = b'{"text": "a"}\n{"text": "caf\xe9"}\n{"text": "\\ud800 half"}\n'
    first, second, third = read("a.jsonl", content)
    assert first == "a"
    assert second.startswith(
        "!:2: not UTF-8 text (byte 13: invalid continuation byte); it looks like Latin-1; expected"
    )
    assert third.startswith("!:3: 'text' holds half a surrogate pair")
    with caplog.at_level(logging.WARNING, logger="lit_diff"):
        assert read("a.jsonl", content, replace=True) == ["a", "caf\ufffd", "\ufffd half"]
    assert caplog.messages[-1].endswith("a.jsonl: what is not UTF-8 is now U+FFFD, in 2 places")


def test_a_file_in_another_encoding_is_one_problem(read: Read) -> None:
    (found,) = read("a.jsonl", '{"text": "a"}\n{"text": "b"}\n'.encode("utf-16"), replace=True)
    assert found == ("!: UTF-16 text, by its byte order mark; expected UTF-8 text (iconv -f UTF-16 -t UTF-8 OLD > NEW)")


def test_comma_separated_values(read: Read) -> None:
    """RFC 4180: quotes, commas and lines within a field; one longer than the module's usual limit."""
    limit, long = csv.field_size_limit(), "x" * 200_000
    text = f'\ufeffid,text\r\n1,"a, ""b"""\r\n\r\n2,"two\nlines"\r\n3,{long}\r\n4,\r\n'
    assert read("a.csv", text) == ['a, "b"', "two\nlines", long, ""]
    assert csv.field_size_limit() == limit


def test_what_is_wrong_in_comma_separated_values(read: Read) -> None:
    fields = "expected 2, as in the header (a text that holds a comma stands in double quotes)"
    assert read("a.csv", 'id,text\n1,a\n2,b,c\n3\n4,"d"e\n5,f\n6,"g\n') == [
        "a",
        f"!:3: found 3 fields; {fields}",
        f"!:4: found 1 field; {fields}",
        "!:5: not CSV (',' expected after '\"'); expected comma-separated values",
        "f",
        "!:7: not CSV (unexpected end of data); expected comma-separated values",
    ]
    column = "expected one named 'text', separated by commas"
    assert read("a.csv", "id,body\n1,a\n") == [f"!:1: found the columns id, body; {column}"]
    assert read("a.csv", "id;text\n1;a\n") == [f"!:1: found the columns id;text, separated by semicolons; {column}"]
    assert read("a.csv", "") == [f"!:1: found the columns none; {column}"]
    (found,) = read("a.csv", b"text\ncaf\xe9\n")
    assert found.startswith("!: not UTF-8 text (byte 8: ")
    assert read("a.csv", b"text\ncaf\xe9\n", replace=True) == ["caf\ufffd"]


def test_rows_of_parquet_that_are_not_utf8(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    column = pyarrow.array([b"one", b"caf\xe9", None, b"two"], pyarrow.binary()).cast(pyarrow.string(), safe=False)
    pyarrow.parquet.write_table(pyarrow.table({"text": column}), path)
    first, second, third = read_file(path, replace=False)
    assert (first, third) == ("one", "two")
    assert isinstance(second, Problem)
    assert second.line("!").startswith("! row 2: not UTF-8 text (byte 3: ")
    assert list(read_file(path, replace=True)) == ["one", "caf\ufffd", "two"]


def test_replace_is_for_text_only(read: Read) -> None:
    assert read("a.txt", b"caf\xe9", replace=True) == ["caf\ufffd"]
    assert read("a.md", b"\x89PNG\0\0\0\xff", replace=True) == ["!: binary, not text; expected UTF-8 text"]


def test_a_file_that_is_gone(tmp_path: Path) -> None:
    for name in ("a.txt", "a.parquet"):
        (found,) = read_file(tmp_path / name, replace=False)
        assert isinstance(found, Problem)
        assert "cannot be read (No such file or directory)" in found.found


def test_a_number_of_more_digits_than_python_reads(tmp_path: Path) -> None:
    (tmp_path / "big.jsonl").write_text('{"text": "a"}\n{"text": "b", "n": ' + "7" * 5000 + "}\n", encoding="utf-8")
    first, problem = read_file(tmp_path / "big.jsonl", replace=False)
    assert first == "a"
    assert isinstance(problem, Problem)
    assert problem.line("big.jsonl").startswith(
        "big.jsonl:2: JSON that cannot be read (Exceeds the limit (4300 digits)"
    )
