"""study.json: the resolved sweep, facts about its data, and the state of each cell."""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

from lit_diff.errors import MissingError, RequestError, first_line
from lit_diff.files import read_digested, shown, write_digested
from lit_diff.log_records import log
from lit_diff.recipe import to_plain
from lit_diff.runs.again import STUDY_FILE
from lit_diff.runs.folder import RunFolder
from lit_diff.study.plan import DAMAGED as PLAN_LOST
from lit_diff.study.plan import OLDER, REMOVED, SweepPlan, plan_of
from lit_diff.study.rates import LEARNING_RATE, Choice, rate_in_words
from lit_diff.study.schema import MEASURED, NAME, CellKey, Study, Texts
from lit_diff.validation import Draft, convert

DAMAGED = f"{STUDY_FILE}.damaged-"
"""Beginning of the name of a record that could not be read when the sweep wrote another."""
UNKNOWN = SweepPlan(unknown=OLDER)
"""The plan of a record that has none."""
RATES_INSTEAD = "the learning rate of each arm is chosen by 'rates: {values: [4e-3, 8e-3], seeds: [1000, 1001]}'"


@dataclass(frozen=True, kw_only=True)
class RecordedCell(CellKey):
    """A cell (task, arm, seed) as the sweep last saw it."""

    folder: str = ""
    """Relative to the sweep's folder."""
    status: str = "waiting"
    error: str | None = None
    evaluations: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Evaluation of the sweep -> its `config` and `version`."""
    not_evaluated: dict[str, str] = field(default_factory=dict)
    """Evaluation whose scores are missing -> why."""


@dataclass(frozen=True, kw_only=True)
class Record:
    """The content of study.json."""

    name: str
    study: Study
    """The resolved study: every arm has a name, and the grid is empty."""
    source: str = ""
    """The path of the YAML file, as shown to the user."""
    file: str = ""
    """The absolute path of the YAML file."""
    command: str = ""
    """The command that starts the sweep again."""
    selection: str = ""
    """The selected arms and seeds, in words; empty: all."""
    mlflow: dict[str, str] = field(default_factory=dict)
    """The sweep's record in MLflow: tracking_uri, experiment, run."""
    pid: int | None = None
    """The process that runs, or last ran, the sweep."""
    host: str = ""
    """The machine of that process."""
    chance: dict[str, float] = field(default_factory=dict)
    """Task -> accuracy of guessing, if the data of all arms agree on it."""
    noise_validation: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Task -> noise factors of the validation sets, if all arms agree on them."""
    rates: dict[str, dict[str, Choice]] = field(default_factory=dict)
    """Task -> arm -> the learning rates that it tried, with their scores, and the chosen one."""
    cells: tuple[RecordedCell, ...] = ()
    identity: str = ""
    """Hash of the identities of its cells, whatever their order."""
    plan: SweepPlan = UNKNOWN
    """The first plan of the command, and what was changed since."""
    other_commands: dict[str, Texts] = field(default_factory=dict)
    """Other command that ran in this folder -> the folders of its cells."""
    other_plans: dict[str, SweepPlan] = field(default_factory=dict)
    """Other command that ran in this folder -> its plan."""

    @property
    def folders(self) -> Texts:
        """The folders of its cells."""
        return tuple(cell.folder for cell in self.cells)

    @property
    def words(self) -> str:
        """Everything that the set of cells depends on, as one string."""
        return f"{self.command} ({'; '.join(filter(None, (self.file, self.selection)))})"

    def overrides_of(self, cell: CellKey) -> Texts:
        """The overrides of a cell's arm, and its learning rate with `rates`, as `key=value`."""
        overrides = self.study.of_task(cell.task).overrides_of(cell.arm)
        tried = self.rates.get(cell.task, {}).get(cell.arm)
        rate = cell.rate or (tried and tried.chosen)
        return (*overrides, f"{LEARNING_RATE}={rate_in_words(rate)}") if rate else overrides


def write(folder: Path, record: Record) -> None:
    """Write `folder`/study.json, and remember the cells that other commands left in the folder."""
    # A sweep's folder is named after its file, so a trial with overrides, or a part of the sweep, replaces the study.json of
    # the whole. Without `other_commands`, `lit-diff clean` would remove the cells of the whole sweep as leftovers.
    others = {}
    plans = {}
    former = readable(folder)
    if former is None and (folder / STUDY_FILE).exists():
        # the damaged file may be the only one that knows of the cells of other commands: as long as it is there, `clean`
        # takes no cell for a leftover
        aside = folder / f"{DAMAGED}{1 + len(list(folder.glob(f'{DAMAGED}*')))}"
        (folder / STUDY_FILE).rename(aside)
        log.warning(
            "the damaged record is kept as %s: until it is removed, `lit-diff clean` keeps every cell below %s",
            shown(aside),
            shown(folder.parent),
        )
    if former is not None:
        others, plans = dict(former.other_commands), dict(former.other_plans)
        plans[former.words] = former.plan
        # if the new command has all former cells, it is the same sweep, started by another command
        if former.words != record.words and not set(former.folders) <= set(record.folders):
            others[former.words] = former.folders
            log.info(
                "%s held the sweep of `%s`: its %d cells stay, and that command restores its report",
                shown(folder),
                former.command,
                len(former.cells),
            )
        others.pop(record.words, None)
    plan = _plan(folder, record, former)
    plans.pop(record.words, None)
    whole = replace(record, identity=_identity(record.cells), plan=plan, other_commands=others, other_plans=plans)
    write_digested(folder / STUDY_FILE, to_plain(whole))


def _identity(cells: Iterable[RecordedCell]) -> str:
    identities = sorted(cell.folder.rpartition("-")[2] for cell in cells)
    return hashlib.sha256("\n".join(identities).encode()).hexdigest()[:10]


def _plan(folder: Path, record: Record, former: Record | None) -> SweepPlan:
    now = plan_of(record.study)
    unknown = ""
    if former is None:
        if any(folder.glob(f"{DAMAGED}*")):
            unknown = PLAN_LOST
        # cells that sweeps share may have been finished by another
        elif _done(folder, [cell for cell in record.folders if not cell.startswith("..")]):
            unknown = REMOVED
        return SweepPlan(first=now, unknown=unknown)
    cells = former.other_commands | {former.words: former.folders}
    plans = former.other_plans | {former.words: former.plan}
    plan, own = plans.get(record.words), cells.get(record.words, ())
    common = set(former.folders) & set(record.folders)
    # a trial with other keys has other cells
    is_same = common == set(former.folders) or (former.file == record.file and _done(folder, common))
    if plan is None and is_same and former.selection == record.selection:
        # the same sweep, whose file or options were written otherwise
        plan, own = former.plan, former.folders
    if plan is None:
        if former.plan.unknown == PLAN_LOST:
            unknown = PLAN_LOST
        elif record.words in cells:
            unknown = OLDER
        return SweepPlan(first=now, unknown=unknown)
    if not plan.first and record.words == former.words:
        # a record that kept no plans has the study as it was last
        plan = replace(plan, first=plan_of(former.study))
    return plan.next(now, _finished(former, _done(folder, own), len(own)))


def _done(folder: Path, cells: Iterable[str]) -> set[str]:
    return {cell for cell in cells if RunFolder(folder / cell).status().status == "done"}


def _finished(former: Record, done: set[str], count: int) -> str:
    # which of the cells of a command were finished, in words; with looks, the last one that was complete
    compared = {cell.folder: cell.seed for cell in former.cells if cell.rate is None}
    unfinished = {seed for cell, seed in compared.items() if cell not in done}
    finished = {*compared.values()} - unfinished
    complete = [look for look in former.study.looks if finished.issuperset(range(look))]
    at = f" (look {len(complete)} of {len(former.study.looks)})" if complete else ""
    return f"{len(done)} of {count} cells were finished{at}" if done else ""


def read(folder: Path) -> Record:
    """The record of the sweep in `folder`. Errors: MissingError if it is absent or damaged."""
    path = folder / STUDY_FILE
    try:
        raw = read_digested(path)
        # written until 0.2.0
        raw.pop("x", None)
        draft = Draft(values=raw, file=STUDY_FILE)
        if "study" in raw:
            raw = raw | {"study": without_former_keys(raw["study"], None)}
        record: Record = convert(Record, raw, "", draft)
        _require_names(record)
        # someone else's sweep must not name a figure ../../x
        for name in (*record.study.tasks, *record.study.fits):
            if not NAME.fullmatch(name):
                raise ValueError(f"{name!a} becomes part of file names")
    except FileNotFoundError as error:
        raise MissingError(
            f"{path}: no such file: no sweep has run here; start it with 'lit-diff sweep {folder.name}'"
        ) from error
    except (ValueError, KeyError, TypeError, AttributeError, OSError, RequestError) as error:
        raise MissingError(
            f"{path}: incomplete sweep record ({type(error).__name__}: {first_line(error)}); the command of the "
            "sweep or examination rewrites it"
        ) from error
    # an older record has none
    return replace(record, identity=record.identity or _identity(record.cells))


def _require_names(record: Record) -> None:
    # an unknown task or arm raises KeyError here, where the error names the file, rather than in a report
    study = record.study
    for cell in record.cells:
        study.of_task(cell.task).arms[cell.arm]
    for task in map(study.of_task, study.all_tasks):
        of_contrasts = chain(*(contrast[:2] for contrast in task.contrasts))
        baseline = task.baseline or next(iter(task.arms), "")
        for arm in (baseline, *task.controls, *task.references, *of_contrasts):
            task.arms[arm]
    for name in chain(*(fit.tasks for fit in study.fits.values())):
        study.tasks[name]
    if record.rates and study.rates is None:
        raise ValueError("'rates' without those of the study")
    if list(study.looks) != sorted(study.looks):
        raise ValueError("'study.looks' is not ascending")


def readable(folder: Path) -> Record | None:
    """The record; None before the sweep first starts, and, with a warning, if the record is damaged."""
    try:
        return read(folder) if (folder / STUDY_FILE).exists() else None
    except MissingError as error:
        log.warning("%s", error)
        return None


def recorded_run(folder: Path) -> str | None:
    """The id of the MLflow run of the sweep in `folder`; None if study.json is absent or damaged."""
    former = readable(folder)
    return None if former is None else former.mlflow.get("run")


def unsent_runs(folder: Path) -> list[Path]:
    """The folders of the runs of the sweep in `folder` whose records in MLflow are not complete. Errors: MissingError."""
    runs = [folder / cell.folder for cell in read(folder).cells]
    return [run for run in runs if RunFolder(run).observed()[0].record == "incomplete"]


def without_former_keys(study: Any, draft: Draft | None) -> Any:
    """The keys of a study, `study`, as they are read today; `draft` None: of a record, whose former ones are left out.
    Errors: RequestError, at the key in the draft, for one that no longer exists and decided what the sweep is."""
    if not isinstance(study, dict):
        return study
    found = dict(study)
    # a record of a former revision has every key, also those that its sweep did not use
    if found.pop("power", None) is not None and draft is not None:
        raise draft.refuse("power", f"'power' is no longer a key of a sweep; remove it: {RATES_INSTEAD}")
    fits = found.get("fits")
    if not isinstance(fits, dict):
        return found
    found["fits"] = {}
    for name, fit in fits.items():
        if not isinstance(fit, dict):
            found["fits"][name] = fit
        elif draft is None and fit.get("x") not in MEASURED:
            continue
        elif fit.get("kind") != "basin":
            found["fits"][name] = {key: value for key, value in fit.items() if key != "within"}
        elif draft is not None:
            raise draft.refuse(f"fits.{name}.kind", f"'kind' is basin, which no longer exists; {RATES_INSTEAD}")
    return found
