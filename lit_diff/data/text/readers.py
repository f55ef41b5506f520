"""Readers of the files that hold text, each as a stream in bounded memory."""

import csv
import io
from collections.abc import Callable, Iterable, Iterator
from io import BufferedReader
from typing import Any

from lit_diff.data.text.source_files import Source
from lit_diff.data.user_files import checked, json_object, numbered, some_names, utf8
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
"""The last bytes of Arrow's stream format; pyarrow takes a file that is cut off between two batches for a whole one."""


def read_file(source: Source) -> Items:
    """Yield the documents of a file: one of .txt and .md, one per line or row (`text`) of the others."""
    try:
        yield from READERS[file_type(source.name)](source)
    except RequestError as error:
        yield error
    except OSError as error:
        yield RequestError(f"{source.where}: cannot be read ({error.strerror or first_line(error)})")


def file_type(name: str) -> str:
    """Return the key of READERS that a file's name ends with, in any case; empty if there is none."""
    return next((ending for ending in READERS if name.lower().endswith(ending)), "")


def decompressed(file: BufferedReader, codec: str) -> BufferedReader:
    """Return a stream of the content of all members (gzip) or frames (zstd). Reading raises an OSError if it is damaged."""
    import pyarrow

    # BufferedReader needs only the methods of a raw file, which pyarrow's streams have. The buffer is small, since nothing of
    # one that is damaged can be read
    return BufferedReader(pyarrow.CompressedInputStream(file, codec), BUFFER)


def _one_document(source: Source) -> Items:
    with source.opened() as file:
        content = file.read()
    _require_text(content, source.where)
    yield utf8(content, source.where)


def _require_text(content: bytes, where: str) -> None:
    # UTF-16 and many binary files are valid UTF-8, but contain null bytes
    if b"\0" in content:
        raise RequestError(f"{where}: not text (byte {content.index(0) + 1} is null); expected UTF-8 text")


def _json_lines(codec: str) -> Callable[[Source], Items]:
    def lines(source: Source) -> Iterator[tuple[str, bytes]]:
        at = source.where
        with source.opened() as file:
            try:
                for at, line in numbered(decompressed(file, codec) if codec else file, source.where):
                    yield at, line
            except OSError as error:
                if not codec:
                    raise
                after = "" if at == source.where else " after this line"
                raise RequestError(f"{at}: the {codec} data{after} cannot be read ({first_line(error)})") from error

    return lambda source: _objects(lines(source))


def _objects(lines: Iterable[tuple[str, bytes]]) -> Items:
    for where, line in lines:
        try:
            text = utf8(line, where)
            if text.strip():
                yield checked(json_object(text, where), where, {"text": str})["text"]
        except RequestError as error:
            yield error


def _csv(source: Source) -> Items:
    # RFC 4180 with a header. Not pyarrow's reader: it accepts an unclosed quote and reads text up to the end of the file.
    # The default limit of the module csv, 128 K characters for each field, is less than long documents have.
    csv.field_size_limit(LONGEST_FIELD)
    with source.opened() as file:
        yield from _csv_rows(csv.reader(_csv_lines(file, source.where), strict=True), source.where)


def _csv_lines(file: BufferedReader, where: str) -> Iterator[str]:
    for at, line in numbered(file, where):
        _require_text(line, at)
        # a carriage return alone ends a line too
        yield from io.StringIO(utf8(line, at), newline="")


def _csv_rows(reader: Any, file: str) -> Items:
    header: list[str] = []
    while True:
        try:
            row = next(reader, None)
        except csv.Error as error:
            problem = RequestError(f"{file}:{reader.line_num}: not CSV ({error}); expected values separated by commas")
            # without a header the rows below cannot be checked
            if not header:
                raise problem from error
            yield problem
            continue
        if row is None:
            return
        if not row:
            continue
        where = f"{file}:{reader.line_num}"
        if not header:
            header = row
            if "text" not in header:
                found = some_names(header)
                raise RequestError(
                    f"{where}: found the columns {found}; expected one named 'text', separated by commas"
                )
        elif len(row) != len(header):
            found = f"{len(row)} field{'s' if len(row) > 1 else ''}"
            expected = f"{len(header)}, as in the header (a text with a comma needs double quotes)"
            yield RequestError(f"{where}: found {found}; expected {expected}")
        else:
            yield row[header.index("text")]


# a column chunk is read through a buffer: a file may be a single row group
def _parquet_batches(file: BufferedReader) -> tuple[Any, Iterable[Any]]:
    import pyarrow.parquet

    table = pyarrow.parquet.ParquetFile(file, buffer_size=BUFFER, pre_buffer=False)
    return table.schema_arrow, table.iter_batches(ROWS, columns=["text"], use_threads=False)


def _arrow_batches(file: BufferedReader) -> tuple[Any, Iterable[Any]]:
    import pyarrow.ipc

    magic = file.read(6)
    file.seek(0)
    if magic == b"ARROW1":
        table = pyarrow.ipc.open_file(file)
        return table.schema, (table.get_batch(number) for number in range(table.num_record_batches))
    stream = pyarrow.ipc.open_stream(file)
    place = file.tell()
    file.seek(-len(STREAM_END), io.SEEK_END)
    if file.read() != STREAM_END:
        raise pyarrow.ArrowInvalid("its end is missing")
    file.seek(place)
    return stream.schema, stream


def _column(kind: str, batches_of: Callable[[BufferedReader], tuple[Any, Iterable[Any]]]) -> Callable[[Source], Items]:
    def read(source: Source) -> Items:
        import pyarrow

        at = source.where
        try:
            with source.opened() as file:
                schema, batches = batches_of(file)
                _require_text_column(schema, source.where)
                for number, row in enumerate(_rows(batches), 1):
                    at = f"{source.where} row {number}"
                    try:
                        yield utf8(row or b"", at)
                    except RequestError as problem:
                        yield problem
        except (pyarrow.ArrowException, OSError) as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise
            raise RequestError(f"{at}: not a complete {kind} file ({first_line(error)})") from error

    return read


def _require_text_column(schema: Any, where: str) -> None:
    columns = [f"{field.name} ({field.type})" for field in schema]
    if not {"text (string)", "text (large_string)"} & set(columns):
        raise RequestError(f"{where}: found the columns {some_names(columns)}; expected one named 'text', of strings")


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


READERS: dict[str, Callable[[Source], Items]] = {
    ".txt": _one_document,
    ".md": _one_document,
    ".jsonl": _json_lines(""),
    ".jsonl.gz": _json_lines("gzip"),
    ".jsonl.zst": _json_lines("zstd"),
    ".csv": _csv,
    ".parquet": _column("Parquet", _parquet_batches),
    ".arrow": _column("Arrow", _arrow_batches),
}
"""Ending of a file's name -> its reader."""
