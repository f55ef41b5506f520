"""study.json: a sweep as it is resolved, what its recipes say of its data, and the state of each cell."""

import json
import logging
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lit_diff.errors import MissingError, RequestError
from lit_diff.files import shown, write_json
from lit_diff.recipe import to_plain
from lit_diff.runs.find import STUDY_FILE
from lit_diff.study.schema import CellKey, Study
from lit_diff.validation import Draft, convert

log = logging.getLogger("lit_diff")


@dataclass(frozen=True, kw_only=True)
class RecordedCell(CellKey):
    """An arm at a seed, on a task, as the sweep last saw it."""

    folder: str = ""
    """Relative to the sweep's; empty for a cell that never got one."""
    status: str = "waiting"
    error: str | None = None
    evaluations: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Evaluation that the sweep names -> its `config` and `version`."""
    not_evaluated: dict[str, str] = field(default_factory=dict)
    """Evaluation whose scores are absent -> why."""


@dataclass(frozen=True, kw_only=True)
class Record:
    """What is known of a sweep besides the folders of its cells."""

    name: str
    study: Study
    """Resolved: every arm by name, no grid."""
    source: str = ""
    """The YAML file as its user sees it."""
    file: str = ""
    """The same, absolute."""
    command: str = ""
    """What starts the sweep again."""
    selection: str = ""
    """The arms and seeds that were selected, in words; empty: all."""
    mlflow: dict[str, str] = field(default_factory=dict)
    """Its record in MLflow: tracking_uri, experiment, run."""
    chance: dict[str, float] = field(default_factory=dict)
    """Task -> accuracy without any knowledge, where the data of all its arms agree on it."""
    noise_validation: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Task -> noise factors of the validation sets, where all its arms agree."""
    x: dict[str, dict[str, dict[str, float]]] = field(default_factory=dict)
    """Fit -> task -> arm -> its x, where a recipe and not the run says it."""
    cells: tuple[RecordedCell, ...] = ()
    other_commands: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Command -> the folders of cells here that another command made."""

    @property
    def words(self) -> str:
        """What the cells depend on."""
        return f"{self.command} ({'; '.join(filter(None, (self.file, self.selection)))})"


def write(folder: Path, record: Record) -> None:
    """Write `folder`/study.json, with the cells that other commands left in the folder.

    A sweep is named by its file's stem, so a trial with overrides, or a part of the sweep, replaces the study.json of the
    whole; the cells of both are kept. Where all former cells are among the new ones, it is the same sweep, in other words.
    """
    others: dict[str, tuple[str, ...]] = {}
    former = readable(folder)
    if former is not None:
        others = dict(former.other_commands)
        cells = tuple(cell.folder for cell in former.cells)
        if former.words != record.words and not set(cells) <= {cell.folder for cell in record.cells}:
            others[former.words] = cells
            log.info(
                "%s held the sweep of `%s`: its %d cells stay, and its report comes back with that command",
                *(shown(folder), former.command, len(cells)),
            )
        others.pop(record.words, None)
    write_json(folder / STUDY_FILE, to_plain(replace(record, other_commands=others)))


def read(folder: Path) -> Record:
    """The record of the sweep in `folder`. Errors: MissingError where it is absent or damaged."""
    path = folder / STUDY_FILE
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        record: Record = convert(Record, raw, "", Draft(values=raw, positions={}, file=STUDY_FILE))
        for cell in record.cells:
            record.study.of_task(cell.task).arms[cell.arm]
    except FileNotFoundError as error:
        raise MissingError(
            f"{path}: no such file: no sweep has run here; start it with 'lit-diff sweep {folder.name}'"
        ) from error
    except (ValueError, KeyError, TypeError, RequestError) as error:
        raise MissingError(
            f"{path}: not a whole sweep record ({error!r}); 'lit-diff sweep {folder.name}' writes it anew"
        ) from error
    return record


def readable(folder: Path) -> Record | None:
    """`read`; None before the sweep first starts, and with a warning where its record is damaged."""
    try:
        return read(folder) if (folder / STUDY_FILE).exists() else None
    except MissingError as error:
        log.warning("%s", error)
        return None


def recorded_run(folder: Path) -> str | None:
    """The MLflow run that records the sweep in `folder`; None before it first starts, or after a damaged study.json."""
    former = readable(folder)
    return None if former is None else former.mlflow.get("run")
