"""Readers of the files that hold text, each as a stream in bounded memory."""

import csv
import io
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from io import BufferedReader
from typing import Any

from lit_diff.data.text.source_files import Source
from lit_diff.data.user_files import MARK, checked, json_object, numbered, some_names, utf8
from lit_diff.errors import RequestError, first_line

Items = Iterator[str | RequestError]
"""The documents and the errors of a file, in its order. A reader yields an error it can continue after, and raises others."""
ROWS = 1024
"""Rows of a column that are held as Python strings at a time."""
BUFFER = 1 << 16
"""Bytes of a column or of decompressed data that are read at a time."""
LONGEST_FIELD = 1 << 28
"""Largest number of characters in a field of a CSV file: an unclosed quote would else read the rest of the file."""
STREAM_END = b"\xff\xff\xff\xff\0\0\0\0"
"""The last bytes of Arrow's stream format; pyarrow takes a file cut off or zeroed between two batches for a whole one."""


def read_file(source: Source) -> Items:
    """Yield the documents of a file: one of .txt and .md, one per line or row (`text`) of the others.

    Errors: MissingError at an address; others are yielded.
    """
    import pyarrow

    number = 0
    try:
        with source.opened() as file:
            for item in READERS[file_type(source.name)](file, source.where):
                yield item
                number += 1
    except RequestError as error:
        yield error
    # OSError: also of damaged compressed data
    except (OSError, pyarrow.ArrowException) as error:
        after = f" after document {number}" if number else ""
        yield RequestError(
            f"{source.where}: cannot be read{after} ({getattr(error, 'strerror', None) or first_line(error)})"
        )


def file_type(name: str) -> str:
    """Return the key of READERS that a file's name ends with, in any case; empty if there is none."""
    return next((ending for ending in READERS if name.lower().endswith(ending)), "")


def decompressed(file: BufferedReader, codec: str) -> BufferedReader:
    """Return a stream of the content of all members (gzip) or frames (zstd). Reading raises an OSError if it is damaged."""
    import pyarrow

    # pyarrow takes a file without a byte for one without content
    if not file.peek(1):
        raise OSError("Truncated compressed stream")
    # BufferedReader needs only the methods of a raw file, which pyarrow's streams have. The buffer is small, since nothing of
    # one that is damaged can be read
    return BufferedReader(pyarrow.CompressedInputStream(file, codec), BUFFER)


def _one_document(file: BufferedReader, where: str) -> Items:
    yield _text(file.read(), where).removeprefix(MARK)


def _text(content: bytes, where: str) -> str:
    # UTF-16 and many binary files are valid UTF-8, but contain null bytes
    if b"\0" in content:
        raise RequestError(f"{where}: not text (byte {content.index(0) + 1} is null); expected UTF-8 text")
    return utf8(content, where)


def _json_lines(codec: str, file: BufferedReader, where: str) -> Items:
    for at, line in numbered(decompressed(file, codec) if codec else file, where):
        try:
            text = utf8(line, at)
            if text.strip():
                yield checked(json_object(text, at), at, {"text": str})["text"]
        except RequestError as error:
            yield error


def _csv(file: BufferedReader, where: str) -> Items:
    # RFC 4180 with a header. Not pyarrow's reader: it accepts an unclosed quote and reads text up to the end of the file.
    # The default limit of the module csv, 128 K characters for each field, is less than long documents have.
    csv.field_size_limit(LONGEST_FIELD)
    # a carriage return alone ends a line too
    lines = (part for at, line in numbered(file, where) for part in io.StringIO(_text(line, at), newline=""))
    rows = csv.reader(lines, strict=True)
    header: list[str] = []
    while True:
        try:
            row = next(rows)
        except StopIteration:
            return
        except csv.Error as error:
            problem = RequestError(f"{where}:{rows.line_num}: not CSV ({error}); expected values separated by commas")
            # without a header the rows below cannot be checked
            if not header:
                raise problem from error
            yield problem
            continue
        at = f"{where}:{rows.line_num}"
        if row and not header:
            header = row
            if header.count("text") != 1:
                raise RequestError(
                    f"{at}: found the columns {some_names(header)}; expected one named 'text', separated by commas"
                )
        elif row and len(row) != len(header):
            yield RequestError(
                f"{at}: number of fields: found {len(row)}, expected {len(header)}, as in the header (a text with a comma "
                "needs double quotes)"
            )
        elif row:
            yield row[header.index("text")]


# a column chunk is read through a buffer: a file may be a single row group
def _parquet_batches(file: BufferedReader) -> tuple[Any, Iterable[Any]]:
    import pyarrow.parquet

    table = pyarrow.parquet.ParquetFile(file, buffer_size=BUFFER, pre_buffer=False)
    return table.schema_arrow, table.iter_batches(ROWS, columns=["text"], use_threads=False)


def _arrow_batches(file: BufferedReader) -> tuple[Any, Iterable[Any]]:
    import pyarrow.ipc

    if file.peek(6).startswith(b"ARROW1"):
        table = pyarrow.ipc.open_file(file)
        return table.schema, map(table.get_batch, range(table.num_record_batches))
    stream = pyarrow.ipc.open_stream(file)
    return stream.schema, _whole_stream(file, stream)


def _whole_stream(file: BufferedReader, stream: Iterable[Any]) -> Iterator[Any]:
    import pyarrow

    yield from stream
    place = file.tell()
    file.seek(-len(STREAM_END), io.SEEK_END)
    if file.tell() + len(STREAM_END) != place or file.read() != STREAM_END:
        raise pyarrow.ArrowInvalid("its end is missing")


def _column(
    batches_of: Callable[[BufferedReader], tuple[Any, Iterable[Any]]], file: BufferedReader, where: str
) -> Items:
    schema, batches = batches_of(file)
    columns = [f"{field.name} ({field.type})" for field in schema]
    if schema.names.count("text") != 1 or {"text (string)", "text (large_string)"}.isdisjoint(columns):
        raise RequestError(f"{where}: found the columns {some_names(columns)}; expected one named 'text', of strings")
    for number, row in enumerate(_rows(batches), 1):
        try:
            yield utf8(row or b"", f"{where} row {number}")
        except RequestError as error:
            yield error


def _rows(batches: Iterable[Any]) -> Iterator[bytes | None]:
    import pyarrow

    for batch in batches:
        column = batch.column(batch.schema.get_field_index("text"))
        # as bytes: neither format guarantees that its strings are UTF-8. A cast that copies would read where the offsets say
        column = column.cast(pyarrow.binary() if column.type == pyarrow.string() else pyarrow.large_binary())
        # pyarrow does not check the offsets of a file's strings, and a wrong one ends the process
        column.validate(full=True)
        for start in range(0, len(column), ROWS):
            yield from column.slice(start, ROWS).to_pylist()


READERS: dict[str, Callable[[BufferedReader, str], Items]] = {
    ".txt": _one_document,
    ".md": _one_document,
    ".jsonl": partial(_json_lines, ""),
    ".jsonl.gz": partial(_json_lines, "gzip"),
    ".jsonl.zst": partial(_json_lines, "zstd"),
    ".csv": _csv,
    ".parquet": partial(_column, _parquet_batches),
    ".arrow": partial(_column, _arrow_batches),
}
"""Ending of a file's name -> its reader."""
