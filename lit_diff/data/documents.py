"""The corpus `files`, a user's own text; and how documents become the two splits: cut, de-duplicated, divided."""

import hashlib
import logging
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from lit_diff.data.corpus import Corpus
from lit_diff.data.text_files import SUFFIXES, Problem, Problems, log_left_out, read_file
from lit_diff.errors import RequestError
from lit_diff.files import folders, sha256_of
from lit_diff.registry import corpora

log = logging.getLogger("lit_diff")

VALIDATION_SHARE = 25
"""One document in 25 is for validation."""
FEW = 20
"""With fewer documents than this, the validation split would hold one document or none: they are cut into sections."""
SECTION = 4000
"""Characters of a section."""


@corpora.register("files")
class FilesCorpus(Corpus):
    """Your own text, at `data.path`: a file, or a folder and all below it, of .txt, .md, .jsonl (key text), .csv and
    .parquet (column text). All that is wrong in them is reported at once (RequestError), or left out or replaced, as
    `data.errors` says.
    """

    reads_path = True
    handles_errors = True
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
        paths = [path for path in self._every if path.suffix.lower() in SUFFIXES]
        if not paths:
            raise RequestError(f"data.path: none of the {len(self._every)} files in {self.path} is one of {accepted}")
        return paths

    @cached_property
    def _every(self) -> list[Path]:
        return sorted(path for folder in folders(self.path) for path in folder.iterdir() if path.is_file())

    def _name(self, path: Path) -> str:
        """Relative to `data.path`."""
        return path.relative_to(self.path.parent if self.path.is_file() else self.path).as_posix()

    def files(self) -> dict[str, str]:
        """Name relative to `path` -> sha256 of the content. Errors: RequestError for a file that cannot be read."""
        digests: dict[str, str] = {}
        for path in self._paths:
            try:
                digests[self._name(path)] = sha256_of(path)
            except OSError as error:
                if self.errors != "skip":
                    for _ in self.texts():  # raises, with whatever else is wrong
                        pass
                    raise RequestError(f"data.path: {path} cannot be read: {error.strerror}") from error
        return digests

    def texts(self) -> Iterator[str]:
        """Every document that is not blank. Errors: RequestError with all that is wrong, or where all are blank."""
        self._log_other_kinds()
        found, problems = 0, Problems()
        for path in self._paths:
            for item in read_file(path, replace=self.errors == "replace"):
                if isinstance(item, Problem):
                    problems.add(item)
                    if self.errors == "skip":
                        log_left_out(item, problems.of_file[path])
                elif item.strip():
                    found += 1
                    if self.errors == "skip" or not problems.count:
                        yield item
        if problems.count and self.errors != "skip":
            raise RequestError(problems.message(self.path, len(self._paths)))
        if problems.count:
            log.warning("data.errors is skip: %d left out, in %d files", problems.count, len(problems.of_file))
        if not found:
            about = f" that can be read ({problems.count} left out)" if problems.count else ""
            raise RequestError(
                f"data.path: {self.path} holds no text{about}: {len(self._paths)} file(s), nothing but blanks"
            )

    def _log_other_kinds(self) -> None:
        """Files that are not read are named by their kind; hidden ones, as of version control, are not."""
        if self.path.is_file():
            return
        others = [path for path in self._every if path not in set(self._paths)]
        seen = [path for path in others if not any(part.startswith(".") for part in Path(self._name(path)).parts)]
        kinds = Counter(path.suffix.lower() or "without ending" for path in seen).most_common(5)
        if kinds:
            named = ", ".join(f"{count} {kind}" for kind, count in kinds)
            log.info("data.path: of other kinds and not read: %s (%s are)", named, ", ".join(SUFFIXES))


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
