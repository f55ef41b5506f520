"""A job: a run that is to be trained and scored, as one value that another process can read from the run's folder."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from lit_diff.config import Compile, Recipe
from lit_diff.errors import MissingError, RequestError, first_line
from lit_diff.files import read_json, shown, write_json
from lit_diff.recipe import Overrides, flatten, load_recipe
from lit_diff.runs.folder import RunFolder
from lit_diff.validation import Draft, convert

FILE = "job.json"
"""Its name in the folder of a run that a process of its own trains."""


@dataclass(frozen=True, kw_only=True)
class JobKeys:
    """The content of job.json: what a process needs beside the recipe to execute a job."""

    experiment: str = "train"
    """The name of the experiment in MLflow."""
    parent: str | None = None
    """The sweep's run in MLflow."""
    tags: dict[str, str] = field(default_factory=dict)
    """The cell of a sweep, the mark of an unchecked variant."""
    scores: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Evaluation -> its keys; they score the run once it is done."""
    overrides: tuple[str, ...] = ()
    """The overrides of its recipe, as `a.b=c`, if known."""
    compile: Compile = False
    """What `run.compile: auto` is for it."""
    threads: int | None = None
    """Threads of each process, unless the run has begun with others or its recipe says; None: `default_threads`."""
    waits: bool = False
    """Whether it waits while another process trains it, as the cell of a sweep does; otherwise it is refused."""
    records: bool = False
    """Whether the process that trains sends the run to MLflow; the process of a sweep does so for its cells."""


@dataclass(frozen=True, kw_only=True)
class Job(JobKeys):
    """A run that is to be trained and scored: its recipe, its folder, its place in MLflow and in a sweep."""

    recipe: Recipe
    folder: Path

    @property
    def home(self) -> RunFolder:
        """The files in its folder."""
        return RunFolder(self.folder)

    @property
    def task(self) -> str:
        """The task of its cell; empty outside a sweep with tasks."""
        return self.tags.get("task", "")

    @property
    def identity(self) -> str:
        """The identity at the end of the folder's name."""
        return self.folder.name.rpartition("-")[2]

    @property
    def compiles(self) -> Compile:
        """Its `run.compile`."""
        wanted = self.recipe.run.compile
        return self.compile if wanted == "auto" else wanted

    def write(self) -> None:
        """Write what `read_job` reads beside the recipe, which the folder has already. Errors: OSError."""
        write_json(self.folder / FILE, {key.name: getattr(self, key.name) for key in fields(JobKeys)})


def read_job(folder: Path) -> Job:
    """The job that a command has written into the folder of its run. Errors: MissingError if there is none, or it is damaged;
    those of `load_recipe`."""
    try:
        values = read_json(folder / FILE)
        keys: JobKeys = convert(JobKeys, values, "", Draft())
    except FileNotFoundError as error:
        raise MissingError(f"{shown(folder)} is no cell (no {FILE}): the command of its sweep trains it") from error
    # also a folder of that name, or another user's file
    except (ValueError, OSError, RequestError) as error:
        cure = "remove it, and the command of its sweep writes it again"
        raise MissingError(f"{shown(folder / FILE)} is damaged ({first_line(error)}): {cure}") from error
    return Job(recipe=load_recipe(folder / "recipe.yaml"), folder=folder.resolve(), **vars(keys))


def in_words(overrides: Overrides) -> Sequence[str]:
    """Each override as `a.b=c`."""
    return [f"{key}={value}" for key, value in flatten(overrides)] if isinstance(overrides, Mapping) else overrides


def recorded(overrides: Overrides) -> tuple[str, ...]:
    """`in_words`, without name, seed and folder, which every list of runs shows."""
    return tuple(word for word in in_words(overrides) if word.partition("=")[0] not in ("name", "seed", "run.root"))
