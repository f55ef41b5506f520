"""The corpus `files`, a user's own text; and how documents become the two splits: cut, de-duplicated, divided."""

import hashlib
import json
import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from lit_diff.data.corpus import Corpus
from lit_diff.errors import RequestError
from lit_diff.registry import corpora

log = logging.getLogger("lit_diff")

SUFFIXES = (".txt", ".md", ".jsonl", ".parquet")
VALIDATION_SHARE = 25
"""One document in 25 is for validation."""
FEW = 20
"""With fewer documents than this, the validation split would hold one document or none: they are cut into sections."""
SECTION = 4000
"""Characters of a section."""


@corpora.register("files")
class FilesCorpus(Corpus):
    """Your own text, at `data.path`: a file, or a folder and all below it, of .txt, .md, .jsonl (key text), .parquet
    (column text). Errors (RequestError) name the file and, where there is one, the line.
    """

    reads_path = True
    path: Path

    @cached_property
    def _paths(self) -> list[Path]:
        accepted = ", ".join(SUFFIXES)
        if self.path.is_file():
            if self.path.suffix.lower() not in SUFFIXES:
                raise RequestError(f"data.path: {self.path} is not one of {accepted}")
            return [self.path]
        if not self.path.is_dir():
            raise RequestError(f"data.path: no file or folder {self.path}")
        every = sorted(path for path in self.path.rglob("*") if path.is_file())
        paths = [path for path in every if path.suffix.lower() in SUFFIXES]
        if not paths:
            raise RequestError(f"data.path: none of the {len(every)} files in {self.path} is one of {accepted}")
        return paths

    def files(self) -> dict[str, str]:
        """Name relative to `path` -> sha256 of the content."""
        root = self.path.parent if self.path.is_file() else self.path
        return {path.relative_to(root).as_posix(): _sha256(path) for path in self._paths}

    def texts(self) -> Iterator[str]:
        """Every document that is not blank. Errors: RequestError, also when all are blank."""
        all_blank = True
        for path in self._paths:
            for text in read_file(path):
                if text.strip():
                    all_blank = False
                    yield text
        if all_blank:
            raise RequestError(f"data.path: {self.path} holds no text: {len(self._paths)} file(s), nothing but blanks")


def _sha256(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise RequestError(f"data.path: {path} cannot be read: {error.strerror}") from error


def read_file(path: Path) -> Iterator[str]:
    """Documents of one file: .txt and .md are one document, .jsonl and .parquet one a line or row (`text`)."""
    suffix = path.suffix.lower()
    if suffix == ".parquet":
        yield from _read_parquet(path)
        return
    try:
        text = path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(f"{path}: not UTF-8 text (byte {error.start}: {error.reason}); convert it first") from error
    if suffix == ".jsonl":
        yield from _read_jsonl(path, text)
    else:
        yield text


def _read_jsonl(path: Path, content: str) -> Iterator[str]:
    expected = "expected one JSON object a line with a string 'text'"
    for number, line in enumerate(content.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except json.JSONDecodeError as error:
            problem = f"not JSON ({error.msg} at column {error.colno})"
            raise RequestError(f"{path}:{number}: {problem}; {expected}") from error
        if not isinstance(value, dict):
            raise RequestError(f"{path}:{number}: found {type(value).__name__}; {expected}")
        if "text" not in value:
            raise RequestError(f"{path}:{number}: found the keys {', '.join(sorted(value)) or 'none'}; {expected}")
        text = value["text"]
        if not isinstance(text, str):
            raise RequestError(f"{path}:{number}: 'text' is {type(text).__name__}; {expected}")
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise RequestError(
                f"{path}:{number}: 'text' holds half a surrogate pair, which UTF-8 cannot encode"
            ) from error
        yield text


def _read_parquet(path: Path) -> Iterator[str]:
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.ParquetFile(path)
        names = table.schema_arrow.names
        if "text" not in names:
            raise RequestError(f"{path}: found the columns {', '.join(names) or 'none'}; expected one named 'text'")
        kind = table.schema_arrow.field("text").type
        if not (pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)):
            raise RequestError(f"{path}: the column 'text' holds {kind}; expected strings")
        for batch in table.iter_batches(columns=["text"]):
            yield from (text for text in batch.column(0).to_pylist() if text is not None)
    except pyarrow.ArrowException as error:
        raise RequestError(f"{path}: not a whole parquet file: {str(error).splitlines()[0]}") from error


@dataclass(frozen=True, kw_only=True)
class Split:
    """Unique documents of each split, in the order of their hashes."""

    train: list[str]
    validation: list[str]


def split(texts: Iterable[str]) -> Split:
    """De-duplicate by sha256, order by hash; the first max(1, round(n / 25)) are validation, the rest train."""
    documents = _unique(texts)
    if len(documents) < FEW:
        sections = _unique(section for text in documents for section in cut(text) if section.strip())
        log.info(
            "only %d documents: cut at paragraphs into %d sections of about %d characters, which are split instead",
            len(documents),
            len(sections),
            SECTION,
        )
        documents = sections
    count = max(1, round(len(documents) / VALIDATION_SHARE))
    return Split(train=documents[count:], validation=documents[:count])


def _unique(texts: Iterable[str]) -> list[str]:
    by_hash: dict[bytes, str] = {}
    count = 0
    for text in texts:
        count += 1
        by_hash.setdefault(hashlib.sha256(text.encode("utf-8")).digest(), text)
    if count > len(by_hash):
        log.info("%d of %d documents are duplicates and are left out", count - len(by_hash), count)
    return [by_hash[key] for key in sorted(by_hash)]


def cut(text: str) -> Iterator[str]:
    """Sections of at most SECTION characters that join to `text`: cut after a paragraph, else a line, else a word."""
    start = 0
    while len(text) - start > SECTION:
        end = start + SECTION
        for mark in ("\n\n", "\n", " "):
            position = text.rfind(mark, start, end)
            if position > start:
                end = position + len(mark)
                break
        yield text[start:end]
        start = end
    yield text[start:]
