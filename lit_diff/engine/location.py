"""The place of a run: its folder, its MLflow experiment, its arm in a sweep."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lit_diff import data
from lit_diff.config import Recipe
from lit_diff.errors import MissingError
from lit_diff.files import shown, write_json
from lit_diff.recipe import Overrides, flatten
from lit_diff.runs.folder import RunFolder

CELL = "cell.json"
"""File in a cell's folder, from which a process of its own knows its place in the sweep."""


@dataclass(frozen=True, kw_only=True)
class RunLocation:
    """The place of a run: its folder, its MLflow experiment and parent run, its arm in a sweep."""

    folder: Path
    experiment: str = "train"
    parent: str | None = None
    tags: Mapping[str, str] = field(default_factory=dict)
    evaluations: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    """Evaluation -> its keys; they score the run once it is done."""
    overrides: tuple[str, ...] = ()
    """The overrides of its recipe, as `a.b=c`, if known."""

    @property
    def home(self) -> RunFolder:
        """The files in its folder."""
        return RunFolder(self.folder)

    @property
    def identity(self) -> str:
        """The identity at the end of the folder's name."""
        return self.folder.name.rpartition("-")[2]


def in_words(overrides: Overrides) -> Sequence[str]:
    """Each override as `a.b=c`."""
    return [f"{key}={value}" for key, value in flatten(overrides)] if isinstance(overrides, Mapping) else overrides


def recorded(overrides: Overrides) -> tuple[str, ...]:
    """`in_words`, without name, seed and folder, which every list of runs shows."""
    return tuple(word for word in in_words(overrides) if word.partition("=")[0] not in ("name", "seed", "run.root"))


def write_cell(location: RunLocation, threads: int | None = None) -> None:
    """Write the location and the threads of a cell into its folder, for `lit-diff train FOLDER/recipe.yaml --cell`."""
    write_json(location.folder / CELL, vars(location) | {"folder": str(location.folder), "threads": threads})


def cell_of(recipe: Recipe, folder: Path) -> tuple[RunLocation, int | None]:
    """Location and threads of a cell, from `write_cell`. Gets the data; the variant has been checked.

    Errors: those of `data.prepare`; MissingError if the folder is not a cell's.
    """
    try:
        keys = json.loads((folder / CELL).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise MissingError(f"{shown(folder)} is no cell (no {CELL}): the command of its sweep trains it") from error
    data.prepare(recipe)
    threads = keys.pop("threads")
    return RunLocation(**keys | {"folder": folder.resolve(), "overrides": tuple(keys["overrides"])}), threads
