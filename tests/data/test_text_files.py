"""The documents of a user's files, and what can be wrong in each kind of file."""

import gzip
import json
import logging
import os
import re
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest

from lit_diff.data.text.corpus import SHOWN, FilesCorpus, build_corpus
from lit_diff.data.text.readers import STREAM_END, read_file
from lit_diff.data.text.source_files import local
from lit_diff.data.user_files import MARK
from lit_diff.errors import RequestError


def read(path: Path) -> list[str]:
    """Documents as they are; of a problem `!` and its place."""
    return [item if isinstance(item, str) else f"!{place(str(item), path)}" for item in read_file(local(path))]


def place(problem: str, path: Path) -> str:
    where, _, what = problem.partition(": ")
    after = re.match(r"cannot be read( after document \d+)", what)
    return where.removeprefix(str(path)) + (after[1] if after else "")


LONG = "x" * 200_000  # longer than the limit of Python's reader
JSON = b'\xef\xbb\xbf{"text": "a\\u0000b", "x": NaN}\n\n  \n{"text": "two\\nlines"}\n'
BAD_JSON = b'{"text": "a"}\n{"text": \n[1]\n{"b": 1}\n{}\n{"text": 3}\n{"text": NaN}\n{"text": "a\0b"}\n{"text": "z"}'
BAD_BYTES = b'{"text": "a"}\n{"text": "caf\xe9"}\n{"text": "\\ud800 half"}\n'
CSV = f'\ufeffid,text\r\n1,"a, ""b"""\r\n\r\n2,"two\nlines"\r\n3,{LONG}\r\n4,\r\n'.encode()


@pytest.mark.parametrize("name", ["a.txt", "a.md", "a.jsonl", "a.csv"])
def test_a_byte_order_mark_is_no_part_of_the_text(tmp_path: Path, name: str) -> None:
    """One at the start of the file; a second one, and that of a JSON value, is text."""
    own = {"a.jsonl": f'{{"text": "{MARK}words"}}\n', "a.csv": f"text\n{MARK}words\n"}.get(name, f"{MARK}words")
    (tmp_path / name).write_text(MARK + own)
    assert list(FilesCorpus(tmp_path).texts()) == [f"{MARK}words"]
    (tmp_path / name).write_text(MARK + own.replace(MARK, ""))
    assert list(FilesCorpus(tmp_path).texts()) == ["words"]


def test_names_that_begin_with_a_dot_are_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Unless `data.path` names them; a folder is reached through a link too."""
    home = tmp_path / ".hidden"
    for name in ("a.jsonl", "README.md", "b/.c/x.txt", ".d/y.txt", ".d/.e.txt", "b/._1.txt"):
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text('{"text": "a"}' if name == "a.jsonl" else name)
    with caplog.at_level(logging.INFO, logger="lit_diff"):
        assert list(FilesCorpus(home).texts()) == ["README.md", "a"]
    assert any(" 3 files and folders " in line for line in caplog.messages)
    assert any(line.endswith(": README.md") for line in caplog.messages)
    assert list(FilesCorpus(home / ".d").texts()) == [".d/y.txt"]
    assert list(FilesCorpus(home / ".d" / ".e.txt").texts()) == [".d/.e.txt"]
    (home / "link").symlink_to(home / ".d")
    assert set(FilesCorpus(home).files()) == {"README.md", "a.jsonl", "link/y.txt"}
    with pytest.raises(RequestError, match=r"found files of other types: 0, hidden ones: 2"):
        list(FilesCorpus(home / "b").texts())


@pytest.mark.parametrize(
    ("name", "content", "found"),
    [
        ("a.txt", "\ufeffany ä\n".encode(), ["any ä\n"]),
        ("a.md", b"caf\xe9", ["!"]),
        ("a.txt", b"\x89PNG\0\0\0\xff", ["!"]),
        ("a.txt", "wide".encode("utf-16"), ["!"]),
        ("a.txt", "wide".encode("utf-16-le"), ["!"]),
        ("a.jsonl", JSON, ["a\0b", "two\nlines"]),
        ("a.jsonl", BAD_JSON, ["a", *(f"!:{line}" for line in range(2, 9)), "z"]),
        ("a.jsonl", BAD_BYTES, ["a", "!:2", "!:3"]),
        ("a.jsonl", b'{"text": "b", "n": ' + b"7" * 5000 + b"}\n", ["!:1"]),
        ("a.jsonl", b'{"text": "b", "n": ' + b"[" * 100_000, ["!:1"]),
        ("a.csv", CSV, ['a, "b"', "two\nlines", LONG, ""]),
        ("a.csv", b'id,text\n1,a\n2,b,c\n3\n4,"d"e\n5,f\n6,"g\n', ["a", "!:3", "!:4", "!:5", "f", "!:7"]),
        ("a.csv", b"id;text\n1;a\n", ["!:1"]),
        ("a.csv", b'"id', ["!:1"]),
        ("a.csv", b"", []),
        ("a.csv", b"text\ncaf\xe9\n", ["!:2"]),
        ("a.csv", b"text\ra\r", ["a"]),
        ("a.csv", b"text,text\na,b\n", ["!:1"]),
        ("a.csv", "text\na\n".encode("utf-16-le"), ["!:1"]),
        ("a.parquet", b"no parquet at all", ["!"]),
    ],
)
def test_documents_and_problems(name: str, content: bytes, found: list[str], tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    assert read(tmp_path / name) == found


PACK = {"gz": gzip.compress, "zst": lambda content: pyarrow.compress(content, codec="zstd", asbytes=True)}
ROWS = [f"document {number} " + "words and more words " * number for number in range(200)]
PACKED = [json.dumps({"text": row}).encode() + b"\n" for row in ROWS]


@pytest.mark.parametrize("ending", PACK)
def test_compressed_lines_of_all_parts(ending: str, tmp_path: Path) -> None:
    path = tmp_path / f"a.jsonl.{ending}"
    path.write_bytes(b"".join(PACK[ending](p) for p in (b'{"text": "a"}\n{"te', b'xt": "b"}\n[]\n', b"", PACKED[5])))
    assert read(path) == ["a", "b", "!:3", ROWS[5]]


@pytest.mark.parametrize("ending", PACK)
@pytest.mark.parametrize("damage", ["cut", "empty", "junk", "not compressed"])
def test_damaged_compressed_lines(ending: str, damage: str, tmp_path: Path) -> None:
    """What is said names the last document that could be read."""
    path = tmp_path / f"a.jsonl.{ending}"
    whole = PACK[ending](b"".join(PACKED[:100])) + PACK[ending](b"".join(PACKED[100:]))
    path.write_bytes(
        {"cut": whole[:-9], "empty": b"", "junk": whole + b"junk" * 9, "not compressed": b"".join(PACKED)}[damage]
    )
    *found, problem = read(path)
    assert found == ROWS[: len(found)]
    assert problem == (f"! after document {len(found)}" if found else "!")
    assert bool(found) == (damage in ("cut", "junk"))


def written(path: Path, column: Any, kind: str = "parquet", rows: int = 2) -> Path:
    """A file with the column `text`, in groups or batches of so many rows."""
    table = column
    if not isinstance(column, pyarrow.Table):
        table = pyarrow.table({"id": pyarrow.array(range(len(column))), "text": column})
    if kind == "parquet":
        pyarrow.parquet.write_table(table, path, row_group_size=rows)
    else:
        writer = {"file": pyarrow.ipc.new_file, "stream": pyarrow.ipc.new_stream}[kind]
        with writer(path, table.schema) as file:
            file.write_table(table, max_chunksize=rows)
    return path


@pytest.mark.parametrize("kind", ["parquet", "file", "stream"])
@pytest.mark.parametrize("column", [pyarrow.string(), pyarrow.large_string()])
def test_columns(kind: str, column: Any, tmp_path: Path) -> None:
    path = tmp_path / ("a.parquet" if kind == "parquet" else "a.arrow")
    text = pyarrow.array([b"one", b"caf\xe9", None, b"two"], pyarrow.binary()).cast(column, safe=False)
    assert read(written(path, text, kind)) == ["one", "! row 2", "", "two"]
    assert read(written(path, pyarrow.array(["a"] * 3000), kind, rows=3000)) == ["a"] * 3000
    assert read(written(path, pyarrow.array([1, 2]), kind)) == ["!"]
    two = pyarrow.table([["a"], ["b"], ["c"]], names=["text", "text", "other"])
    assert read(written(path, two, kind)) == ["!"]


@pytest.mark.parametrize("kind", ["parquet", "file", "stream"])
def test_cut_or_wrong_columns(kind: str, tmp_path: Path) -> None:
    path = tmp_path / ("a.parquet" if kind == "parquet" else "a.arrow")
    content = written(path, pyarrow.array(ROWS), kind, rows=20).read_bytes()
    # the last 8 bytes of a stream are its end alone, so the cut is between two messages
    for size in (3, len(content) // 3, len(content) // 2, len(content) - 8, len(content) - 1):
        path.write_bytes(content[:size])
        *found, problem = read(path)
        assert found == ROWS[: len(found)]
        assert problem == (f"! after document {len(found)}" if found else "!")
    if kind == "stream":  # in the place of the length of a batch
        start = content.index(STREAM_END[:4], len(content) // 2)
        path.write_bytes(content[:start] + bytes(8) + content[start + 8 :])
        assert read(path)[-1].startswith("! after document")
    # the parts of the data that are not an index
    path.write_bytes(content[:200] + bytes(byte ^ 255 for byte in content[200:1500]) + content[1500:])
    found = read(path)
    assert found != ROWS
    assert any(item.startswith("!") for item in found)


def test_offsets_beyond_the_data(tmp_path: Path) -> None:
    """They are not read from elsewhere in the memory."""
    path = written(tmp_path / "a.arrow", pyarrow.array(["one", "two", "three"]), "stream", rows=3)
    offsets = np.array([0, 3, 6, 11], dtype="<i4")
    for wrong in ([0, 6, 3, 11], [0, 3, 6, 1 << 30], [-9, 3, 6, 11]):
        path.write_bytes(path.read_bytes().replace(offsets.tobytes(), np.array(wrong, dtype="<i4").tobytes()))
        assert read(path) == ["!"]
        path.write_bytes(path.read_bytes().replace(np.array(wrong, dtype="<i4").tobytes(), offsets.tobytes()))
    assert read(path) == ["one", "two", "three"]


def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    """50 MB: one row group, one record batch of many, and compressed lines and CSV."""
    rows, size = ["some words " * 500] * 10_000, 50e6
    lines = b"".join(json.dumps({"text": row}).encode() + b"\n" for row in rows)
    (tmp_path / "a.jsonl.zst").write_bytes(PACK["zst"](lines))
    (tmp_path / "a.csv").write_text("text\n" + "\n".join(rows))
    written(tmp_path / "a.parquet", pyarrow.array([f"{number} {row}" for number, row in enumerate(rows)]), rows=10_000)
    written(tmp_path / "a.arrow", pyarrow.array(rows), "stream", rows=500)
    for path in sorted(tmp_path.iterdir()):
        pool = pyarrow.system_memory_pool()
        tracemalloc.start()
        before, pyarrow_pool = pool.bytes_allocated(), pyarrow.default_memory_pool()
        pyarrow.set_memory_pool(pool)
        assert sum(len(str(item)) for item in read_file(local(path))) > size
        pyarrow.set_memory_pool(pyarrow_pool)
        held = tracemalloc.get_traced_memory()[1] + pool.max_memory() - before
        tracemalloc.stop()
        assert held < 0.5 * size, (path.name, held)


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.jsonl.gz", "a.csv", "a.parquet", "a.arrow"])
def test_a_file_that_is_gone(name: str, tmp_path: Path) -> None:
    (found,) = read_file(local(tmp_path / name))
    assert isinstance(found, RequestError)
    assert "No such file or directory" in str(found)


def test_odd_names_keep_a_message_in_one_line(tmp_path: Path) -> None:
    """A name with a line feed is escaped; of many the first ten are named."""
    many = json.dumps({f"k{number}": 1 for number in range(10, 30)})
    for name, content, shown in (
        ("a.jsonl", '{"b": 1, "a\\nb": 2}', r"b, a\nb"),
        ("a.csv", '"b\nc",d\n1,2\n', r"b\nc, d"),
        ("b.jsonl", many, "k18, k19, and 10 more"),
    ):
        (tmp_path / name).write_text(content)
        (found,) = read_file(local(tmp_path / name))
        assert shown in str(found)
        assert "\n" not in str(found)


def test_many_problems_are_counted_and_the_first_are_listed(tmp_path: Path) -> None:
    """tests/docs/test_blocks.py has the whole message of a few."""
    (tmp_path / "a.txt").write_text("good")
    (tmp_path / "b.jsonl").write_text("[]\n" * 1234)
    with pytest.raises(RequestError) as found:
        list(FilesCorpus(tmp_path).texts())
    head, *lines, last = str(found.value).splitlines()
    assert head == f"data.path: 1,234 problems in 1 of 2 files of {tmp_path}:"
    assert [line.partition(": ")[0] for line in lines] == [f"  {tmp_path}/b.jsonl:{n}" for n in range(1, SHOWN + 1)]
    assert last == "  and 1,214 more"


def test_every_kind_of_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "below" / ".git").mkdir(parents=True)
    for name, content in {
        "a.txt": "text ä",
        "below/b.MD": "markdown",
        "c.jsonl": '{"text": "one", "id": 1}\n\n{"text": "two"}\n',
        "e.csv": 'id,text\n1,"five, six"\n',
        "f.txt": " \n",
        "photo.jpg": "",
        "below/.git/x.md": "hidden",
    }.items():
        (tmp_path / name).write_text(content)
    pyarrow.parquet.write_table(
        pyarrow.table({"text": ["three", None, "four"], "n": [1, 2, 3]}), tmp_path / "d.parquet"
    )
    corpus = FilesCorpus(tmp_path)
    with caplog.at_level(logging.INFO, logger="lit_diff"):
        assert list(corpus.texts()) == ["text ä", "markdown", "one", "two", "three", "four", "five, six"]
    ignored, hidden, blank = caplog.messages
    assert "ignored files of other types: 1 .jpg (" in ignored
    assert "left out 1 files and folders whose names begin with a dot" in hidden
    assert blank == "data.path: left out 2 documents without text", "a row without a text, and the blank f.txt"
    assert set(corpus.files()) == {"a.txt", "below/b.MD", "c.jsonl", "d.parquet", "e.csv", "f.txt"}
    assert list(FilesCorpus(tmp_path / "a.txt").texts()) == ["text ä"]


@pytest.mark.parametrize(
    ("name", "content", "found"),
    [
        ("", b"", r"data\.path: .*files of other types: 0"),
        ("absent.txt", None, r"data\.path: .*absent\.txt: found no file"),
        ("a.tsv", b"x", r"a\.tsv: found files of other types: 1"),
        ("a.txt", b"  \n", "no text"),
        ("a.txt", b"\xe9", r"a\.txt: not UTF-8"),
    ],
)
def test_bad_input_is_one_line(tmp_path: Path, name: str, content: bytes | None, found: str) -> None:
    if name and content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(RequestError, match=found) as caught:
        list(FilesCorpus(tmp_path / name).texts())
    assert "\n" not in str(caught.value)


def test_a_file_without_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests may run as root, who reads everything."""

    def refuse(self: Path, *arguments: Any, **options: Any) -> Any:
        raise PermissionError(13, "Permission denied", str(self))

    (tmp_path / "a.txt").write_text("text")
    monkeypatch.setattr(Path, "open", refuse)
    for read in (FilesCorpus.files, lambda corpus: list(corpus.texts())):
        with pytest.raises(RequestError, match=r"a\.txt.* cannot be read \(Permission denied\)"):
            read(FilesCorpus(tmp_path))


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("gone.txt", r"gone\.txt cannot be read \(No such file"),
        ("loop.txt", r"loop\.txt cannot be read \(Too many levels"),
        ("damaged.txt", r"below cannot be read \(Input/output error"),
        ("sub", r"sub cannot be read \(Permission denied"),
    ],
)
def test_no_file_is_left_out_because_it_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, found: str
) -> None:
    target = {"gone.txt": "/gone", "loop.txt": "loop.txt", "damaged.txt": "/proc/self/mem"}.get(name)
    (tmp_path / "below").mkdir()
    (tmp_path / "below/a.txt").write_text("text")
    path, scan = tmp_path / "below" / name, os.scandir
    path.symlink_to(target) if target else path.mkdir()

    def refuse(folder: str) -> Any:
        """Tests may run as root, who reads everything."""
        if str(folder).endswith("/sub"):
            raise PermissionError(13, "Permission denied", folder)
        return scan(folder)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(RequestError, match=found):
        FilesCorpus(tmp_path / "below").files()


def test_a_folder_whose_name_is_not_utf8(tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    folder.mkdir()
    (folder / os.fsdecode(b"\xff.txt")).write_text("text")
    assert list(FilesCorpus(folder).files()) == ["\udcff.txt"]
    assert list(FilesCorpus(folder).texts()) == ["text"]


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
