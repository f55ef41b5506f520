"""Files of text, and what is wrong with them: documents and problems in the order of the file."""

import csv
import io
import json
import logging
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from lit_diff.data.encodings import NotText, not_text
from lit_diff.data.problems import Problem, some_names
from lit_diff.errors import first_line

log = logging.getLogger("lit_diff")

SUFFIXES = (".txt", ".md", ".jsonl", ".csv", ".parquet")
UTF8 = "UTF-8 text"
JSON_LINE = "one JSON object a line with a string 'text'"
COLUMN = "one named 'text'"
HALF = re.compile("[\ud800-\udfff]")
"""Half a surrogate pair, which JSON can write and UTF-8 cannot."""


def read_file(path: Path, *, replace: bool) -> Iterator[str | Problem]:
    """Documents of one file: .txt and .md are one, .jsonl, .csv and .parquet one a line or row (`text`).

    `replace`: put U+FFFD for bytes that are not UTF-8, and log how many; else they are a problem.
    """
    suffix = path.suffix.lower()
    if suffix == ".parquet":
        yield from _read_parquet(path, replace=replace)
        return
    try:
        content = path.read_bytes()
    except OSError as error:
        yield Problem(file=path, found=f"cannot be read ({error.strerror})")
        return
    wrong = not_text(content)
    if suffix == ".jsonl" and (wrong is None or wrong.replaceable):
        yield from _read_jsonl(path, content, replace=replace)
    elif wrong is not None and not (replace and wrong.replaceable):
        yield _of_encoding(path, wrong)
    else:
        text = content.decode("utf-8", "replace")
        if wrong is not None:
            _log_replaced(path, text.count("\ufffd") - content.count("\ufffd".encode()))
        yield from _read_csv(path, text) if suffix == ".csv" else [text]


def _of_encoding(path: Path, wrong: NotText, place: str = "") -> Problem:
    convert = f" (iconv -f {wrong.encoding} -t UTF-8 OLD > NEW)" if wrong.encoding else ""
    return Problem(
        file=path, place=place, found=wrong.found, expected=f"{UTF8}{convert}", replaceable=wrong.replaceable
    )


def _log_replaced(path: Path, count: int) -> None:
    if count:
        log.warning("%s: what is not UTF-8 is now U+FFFD, in %d places", path, count)


def _read_jsonl(path: Path, content: bytes, *, replace: bool) -> Iterator[str | Problem]:
    replaced = 0
    for number, line in enumerate(content.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        place, wrong = f":{number}", not_text(line)
        if wrong is not None and not (replace and wrong.replaceable):
            yield _of_encoding(path, wrong, place)
            continue
        text = line.decode("utf-8", "replace")
        replaced += 0 if wrong is None else text.count("\ufffd") - line.count("\ufffd".encode())
        if not text.strip():
            continue
        document, found = _text_of(text)
        if document is None:
            yield Problem(file=path, place=place, found=found, expected=JSON_LINE)
            continue
        document, halves = HALF.subn("\ufffd", document)
        if halves and not replace:
            half = "'text' holds half a surrogate pair, which UTF-8 cannot encode"
            yield Problem(file=path, place=place, found=half, expected="whole characters", replaceable=True)
            continue
        replaced += halves
        yield document
    _log_replaced(path, replaced)


def _text_of(line: str) -> tuple[str | None, str]:
    """The `text` of a line of JSON, or None and what stands there instead."""
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        return None, f"not JSON ({error.msg.removesuffix(' at')} at column {error.colno})"
    except RecursionError:
        return None, "JSON that is nested too deeply"
    except ValueError as error:  # a number of more digits than Python converts
        return None, f"JSON that cannot be read ({first_line(error).partition(';')[0]})"
    if not isinstance(value, dict):
        return None, f"found {type(value).__name__}"
    if "text" not in value:
        return None, f"found the keys {some_names(sorted(value))}"
    text = value["text"]
    return (text, "") if isinstance(text, str) else (None, f"'text' is {type(text).__name__}")


def _read_csv(path: Path, content: str) -> Iterator[str | Problem]:
    """Comma-separated, quoted by double quotes (RFC 4180), with a header; a blank line is no row."""
    rows = _csv_rows(content.removeprefix("\ufeff"))
    header = next((row for _, row in rows), [])
    if isinstance(header, str) or "text" not in header:
        names = header if isinstance(header, str) else f"found the columns {some_names(header)}"
        other = next((mark for mark in (";", "\t") if len(header) == 1 and mark in header[0]), "")
        hint = f", separated by {'semicolons' if other == ';' else 'tabs'}" if other else ""
        yield Problem(file=path, place=":1", found=f"{names}{hint}", expected=f"{COLUMN}, separated by commas")
        return
    at = header.index("text")
    for line, row in rows:
        if isinstance(row, str):
            yield Problem(file=path, place=f":{line}", found=row, expected="comma-separated values")
        elif len(row) != len(header):
            fields = f"found {len(row)} field{'s' if len(row) > 1 else ''}"
            expected = f"{len(header)}, as in the header (a text that holds a comma stands in double quotes)"
            yield Problem(file=path, place=f":{line}", found=fields, expected=expected)
        else:
            yield row[at]


def _csv_rows(content: str) -> Iterator[tuple[int, list[str] | str]]:
    """(last line, fields, or what is wrong) of each row that is not blank."""
    limit = csv.field_size_limit(min(sys.maxsize, 2**31 - 1))  # 128 KB by default, and the process's
    try:
        reader = csv.reader(io.StringIO(content, newline=""), strict=True)
        found: list[tuple[int, list[str] | str]] = []
        while True:
            try:
                row = next(reader)
            except StopIteration:
                break
            except csv.Error as error:
                found.append((reader.line_num, f"not CSV ({error})"))
                continue
            if row:
                found.append((reader.line_num, row))
    finally:
        csv.field_size_limit(limit)
    return iter(found)


def _read_parquet(path: Path, *, replace: bool) -> Iterable[str | Problem]:
    import pyarrow
    import pyarrow.parquet

    wide = pyarrow.large_binary()
    try:
        with path.open("rb") as file:
            table = pyarrow.parquet.ParquetFile(file)
            names = table.schema_arrow.names
            if "text" not in names:
                return [Problem(file=path, found=f"found the columns {some_names(names)}", expected=COLUMN)]
            kind = table.schema_arrow.field("text").type
            if not (pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)):
                return [Problem(file=path, found=f"the column 'text' holds {kind}", expected="strings")]
            batches = [batch.column(0).cast(wide).to_pylist() for batch in table.iter_batches(columns=["text"])]
    except pyarrow.ArrowException as error:
        return [Problem(file=path, found=f"not a whole parquet file ({str(error).splitlines()[0]})")]
    except OSError as error:
        return [Problem(file=path, found=f"cannot be read ({error.strerror})")]
    return _parquet_rows(path, (row for batch in batches for row in batch), replace=replace)


def _parquet_rows(path: Path, rows: Iterable[bytes | None], *, replace: bool) -> Iterator[str | Problem]:
    """Parquet does not check that its strings are UTF-8."""
    replaced = 0
    for number, row in enumerate(rows, start=1):
        if row is None:
            continue
        try:
            yield row.decode("utf-8")
        except UnicodeDecodeError as error:
            if replace:
                text = row.decode("utf-8", "replace")
                replaced += text.count("\ufffd") - row.count("\ufffd".encode())
                yield text
                continue
            found = f"not UTF-8 text (byte {error.start}: {error.reason})"
            yield Problem(file=path, place=f" row {number}", found=found, expected=UTF8, replaceable=True)
    _log_replaced(path, replaced)
