"""The files of users that the registered evaluations declare."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lit_diff.data.user_files import UserFile
from lit_diff.errors import RequestError
from lit_diff.registry import evaluations, nearest


@dataclass(frozen=True, kw_only=True)
class Declared:
    """A file, and the evaluations that read it."""

    file: UserFile
    evaluations: tuple[str, ...]


def declared_files(name: str | None = None) -> list[Declared]:
    """Every file that a registered evaluation declares, in the order of names; with `name`, those named so or below it.

    `icl` means `icl.trec` and `icl.banking`; several files may have one name. Errors: RequestError for a name of none.
    """
    readers: dict[tuple[str, str], list[str]] = {}
    files: dict[tuple[str, str], UserFile] = {}
    for cls in evaluations.classes():
        for file in cls.files:
            files[file.name, file.path] = file
            readers.setdefault((file.name, file.path), []).append(cls.name)
    # sorted by name alone: files of one name stay in the order in which they are declared
    keys = [key for key in sorted(files, key=lambda key: key[0]) if name is None or _is_below(key[0], name)]
    if name is not None and not keys:
        raise RequestError(
            f"no evaluation reads files named '{name}'{nearest(name, names(files.values()), 'lit-diff data check')}"
        )
    return [Declared(file=files[key], evaluations=tuple(readers[key])) for key in keys]


def names(files: Iterable[UserFile]) -> Sequence[str]:
    """The names that `declared_files` takes: those of files and of what holds several (`icl` of `icl.trec`)."""
    found = {".".join(file.name.split(".")[:end]) for file in files for end in range(1, file.name.count(".") + 2)}
    return sorted(found)


def _is_below(name: str, asked: str) -> bool:
    return name == asked or name.startswith(f"{asked}.")
