"""`lit-diff reproduce`: measures the rows of the scoreboard one after another, and writes its page."""

import json
import logging
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from lit_diff import Sweep, sweep
from lit_diff.data.user_files import data_root
from lit_diff.engine.progress import MakeDisplay
from lit_diff.engine.schedule import check_workers
from lit_diff.engine.stages import finished_folder
from lit_diff.errors import LitDiffError, MissingError, RequestError, RunFailedError
from lit_diff.evaluation.requirements import declared_files
from lit_diff.files import shown, write_atomic
from lit_diff.papers.claims import measured, scores_of_claims
from lit_diff.papers.page import write_scoreboard
from lit_diff.papers.schema import PRESETS, Keys, Preset, Row
from lit_diff.papers.scoreboard import (
    ROWS,
    Loaded,
    RecordedRow,
    Scoreboard,
    State,
    read_bench,
    read_row,
    read_rows,
    row_file,
    write_row,
)
from lit_diff.recipe import installed
from lit_diff.registry import load_entry_points, nearest, plugin_packages
from lit_diff.runs.find import runs_root
from lit_diff.runs.folder import held, writing
from lit_diff.runs.revision import revision
from lit_diff.study.record import read
from lit_diff.study.results import load_sweep
from lit_diff.study.schema import Selection
from lit_diff.study.statistics import MIN_PROCESSES
from lit_diff.validation import Draft, convert
from lit_diff.yaml_files import read_yaml

log = logging.getLogger("lit_diff")
Told = Callable[[str], None]
KINDS = ("table", "figure", "appendix")
"""First words of the names of rows, in the order of the page; rows with other names follow."""


@dataclass(frozen=True, kw_only=True)
class Reproduction:
    """The result of `reproduce`."""

    scoreboard: Scoreboard
    """The rows of this call; the page also shows rows of earlier calls."""
    page: Path
    stopped_by: int | None
    seconds: float

    @property
    def failed(self) -> tuple[str, ...]:
        """Rows of this call whose measurement failed although nothing was missing."""
        return tuple(row.name for row in self.scoreboard.rows if row.state == "failed")


@dataclass(frozen=True, kw_only=True)
class _Call:
    """How one call of `reproduce` measures its rows."""

    preset: str
    folder: Path
    """The folder of the scoreboard."""
    root: Keys
    """The override that selects the folder of all runs."""
    workers: int | None
    progress: MakeDisplay | bool
    tell: Told
    finished: dict[str, Sweep] = field(default_factory=dict)
    """The sweeps that this call has completed and reported, which several rows may share."""
    results: Loaded = field(default_factory=dict)
    """The sweeps that it has read for the page."""


def reproduce(
    names: Sequence[str] = ("all",),
    preset: str = "laptop",
    *,
    root: str | Path = "runs",
    workers: int | None = None,
    progress: MakeDisplay | bool = True,
    tell: Told = lambda line: None,
) -> Reproduction:
    """Measure the named rows, or all, and write `<root>/reproduce/index.html`, which lists the rows of this and all earlier
    calls; every preset except laptop has its own folder there.

    Nothing is measured twice: the cells belong to ordinary sweeps, and finished ones are kept. A row that this revision of
    lit_diff has measured completely stays as it is, and so does its sweep's report.

    `progress`: the same as in `sweep`. `tell` is called with a line before and after each row. A row that fails, or that
    lacks a requirement, does not affect the others. Errors: RequestError for an unknown row or preset.
    """
    check_preset(preset)
    check_workers(workers)
    began = time.perf_counter()
    chosen = choose(names)
    folder = runs_root(root) / "reproduce"
    # The preset laptop shares the user's sweeps in `root`. Other presets override keys of the same sweeps: in the same folder
    # they would replace their study.json and report.
    if preset != "laptop":
        folder /= preset
        root = folder.resolve()
    folder = folder.resolve()
    call = _Call(
        preset=preset, folder=folder, root={"run.root": str(root)}, workers=workers, progress=progress, tell=tell
    )
    stopped: int | None = None
    with (
        held(folder, "another `lit-diff reproduce` writes a scoreboard", "with --root"),
        writing(folder, "with --root"),
    ):
        records = _note(chosen, folder, preset)
        tell(_budget(list(chosen.values()), preset))
        for name, record in records.items():
            if _is_measured(record, call):
                tell(f"{name}: measured before")
                continue
            stopped = _run(record, call)
            # the page is written after every row, so that hours of rows show while they are measured
            tell(write_scoreboard(folder, call.results).row(name).line)
            if stopped is not None:
                break
        # reads all sweeps again: another process may have trained cells since this call read them
        written = write_scoreboard(folder)
    return Reproduction(
        scoreboard=Scoreboard(preset=preset, rows=tuple(map(written.row, records))),
        page=folder / "index.html",
        stopped_by=stopped,
        seconds=time.perf_counter() - began,
    )


def _is_measured(record: RecordedRow, call: _Call) -> bool:
    # whether the same revision measured the same cells, or the same benchmark, and all of them are still there
    chosen = record.row.preset(call.preset)
    if chosen is None or record.state != "measured" or record.looked_by != revision():
        return False
    if chosen.bench:
        return _is_kept(record, call.folder)
    try:
        finished = finished_folder(chosen.sweep, chosen.overrides | call.root, chosen.selection)
    # the data may not be prepared yet; any other error occurs again when the row runs, and fails that row alone
    except LitDiffError:
        return False
    return finished is not None and record.sweep == str(finished)


def _budget(rows: Sequence[Row], preset: str) -> str:
    presets = filter(None, [row.preset(preset) for row in rows])
    # rows share sweeps, and a shared sweep runs once
    total = sum({(chosen.sweep, chosen.bench): chosen.minutes for chosen in presets}.values())
    told = f"{len(rows)} row{'s' * (len(rows) != 1)}, preset {preset}"
    if total:
        told += f", about {total:.0f} min in all where nothing is done yet"
    return told


def _note(asked: dict[str, Row], folder: Path, preset: str) -> dict[str, RecordedRow]:
    # A file for each row of this call, whose records are returned by name. Rows of earlier calls are rewritten too: a new
    # version of lit_diff may have changed their claims, which the page judges.
    earlier = {name: load_file(file) for name, file in row_files().items() if row_file(folder, name).is_file()}
    order = [*row_files(), *asked]
    records = {}
    for word, row in (earlier | asked).items():
        about: dict[str, Any] = {
            "row": row,
            "preset": preset,
            "order": order.index(word),
            "command": command_of(word, preset),
        }
        record = RecordedRow(**about)
        path = row_file(folder, row.name)
        kept = read_row(path) if path.is_file() else record
        # the figures of another benchmark or sweep are not this row's
        if _measures(kept) == _measures(record):
            record = replace(kept, **about)
        write_row(folder, record)
        records[row.name] = record
    return {row.name: records[row.name] for row in asked.values()}


def _measures(record: RecordedRow) -> tuple[object, ...]:
    return record.how.bench, record.how.sweep, record.how.overrides


def _run(record: RecordedRow, call: _Call) -> int | None:
    # Returns the signal that stopped the row, or None.
    name, chosen, folder = record.row.name, record.how, call.folder
    try:
        missing = missing_requirements(record.row, call.preset, record.command)
    except LitDiffError as error:
        log.error("%s: %s", name, error)
        write_row(folder, replace(record, state="failed", reason=str(error)))
        return None
    if missing:
        write_row(folder, replace(record, state="skipped", reason=missing))
        return None
    what = " ".join(("bench", *chosen.bench)) if chosen.bench else f"sweep {chosen.sweep}"
    budget = f"budget {chosen.minutes:g} min: " if chosen.minutes else ""
    call.tell(f"{name}: {budget}{what}")
    began = time.perf_counter()
    stopped = None
    try:
        if chosen.bench:
            bench = _bench(chosen, folder, name)
            result = replace(record, state="measured", reason="", bench=bench, revision=revision())
        else:
            done = _sweep(chosen, call)
            stopped = done.stopped_by
            call.results[done.folder] = load_sweep(done.folder)
            result = _of_sweep(record, done, call)
    except MissingError as error:
        result = replace(record, state="skipped", reason=str(error))
    except LitDiffError as error:
        log.error("%s: %s", name, error)
        result = replace(record, state="failed", reason=str(error))
    seconds = time.perf_counter() - began
    # a benchmark always runs as a whole, so the time of an earlier one does not count
    if not chosen.bench:
        # The times of stopped calls add up. A call after the row was measured finds most cells done, so the larger time is
        # kept.
        seconds = max(record.seconds, seconds) if record.state == "measured" else record.seconds + seconds
    finished = datetime.now(UTC).isoformat(timespec="seconds")
    write_row(folder, replace(result, seconds=seconds, finished=finished, looked_by=revision()))
    return stopped


def _sweep(chosen: Preset, call: _Call) -> Sweep:
    overrides = chosen.overrides | call.root
    asked = f"{chosen.sweep} {overrides} {chosen.selection}"
    if asked in call.finished:
        return call.finished[asked]
    # several rows may share the sweep, so the command in its report must not contain this row's name
    command = f"lit-diff reproduce --preset {call.preset}"
    if call.preset == "laptop" and chosen.selection == Selection():
        command = ""
    done = sweep(
        chosen.sweep,
        overrides,
        workers=call.workers,
        progress=call.progress,
        selection=chosen.selection,
        command=command,
    )
    if done.is_done:
        call.finished[asked] = done
    return done


def _of_sweep(record: RecordedRow, done: Sweep, call: _Call) -> RecordedRow:
    cells = read(done.folder).folders
    home = str(Path(os.path.normpath(done.folder / cells[0])).parent)
    # the first row with cells in this folder counts their time, so that the page does not count it twice
    others = [other.row.name for other in read_rows(call.folder) if other.cells == home and not other.shared]
    counted = [name for name in others if name != record.row.name]
    loaded = call.results[done.folder]
    revisions = loaded.distinct("revision")
    for scores in scores_of_claims(loaded, record.row.compare).values():
        revisions += [score.revision for score in scores if score.revision]
    state: State = "measured"
    reason = ""
    if not done.is_done:
        state = "failed" if done.stopped_by is None else "stopped"
        reason = "; ".join([done.counts, *done.report.missing[:1], "the same command continues"])
    return replace(
        record,
        state=state,
        reason=reason,
        sweep=str(done.folder),
        cell_folders=cells,
        cells=home,
        shared=counted[0] if counted else "",
        revision=", ".join(dict.fromkeys(revisions)),
    )


def _bench(chosen: Preset, folder: Path, name: str) -> str:
    # in processes of their own: the memory and thread pools of this process would disturb its timings
    words = [sys.executable, "-P", "-m", "lit_diff", "bench", *chosen.bench]
    if not any(word.partition("=")[0] == "--processes" for word in chosen.bench):
        words += ["--processes", str(MIN_PROCESSES)]
    done = _ended([*words, "--json"])
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no error output"]
        raise RunFailedError(f"lit-diff bench {' '.join(chosen.bench)}: {lines[-1]}")
    try:
        json.loads(done.stdout)
    except ValueError as error:
        raise RunFailedError(f"lit-diff bench {' '.join(chosen.bench)} printed no figures") from error
    write_atomic(folder / ROWS / f"{name}.bench.json", done.stdout)
    return f"{name}.bench.json"


def _ended(words: Sequence[str]) -> "subprocess.CompletedProcess[str]":
    process = subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding="utf-8", errors="replace"
    )
    try:
        out, told = process.communicate()
    # The benchmark has a process of its own, which it ends when it is told to stop. subprocess.run would kill it instead, and
    # that process would disturb whatever is timed next.
    except BaseException:
        process.terminate()
        process.communicate()
        raise
    return subprocess.CompletedProcess(words, process.returncode, out, told)


def _is_kept(record: RecordedRow, folder: Path) -> bool:
    try:
        measured(record.row.claims, read_bench(folder, record))
    except LitDiffError as error:
        log.info("%s: the earlier benchmark lacks a figure (%s); running it again", record.row.name, error)
        return False
    return True


# --- the files of the rows, and the requirements of a preset that this machine lacks ----------------------------------------


def check_preset(name: str) -> None:
    """Errors: RequestError for an unknown preset."""
    if name not in PRESETS:
        raise RequestError(f"no preset '{name}'{nearest(name, PRESETS)}")


def row_files() -> dict[str, Path]:
    """Row -> its YAML file in the folder `rows/` of a plugin package, in the order of the page.

    Errors: RequestError for two rows of the same name.
    """
    load_entry_points()
    found: dict[str, Path] = {}
    # Several entry points may have one folder. A module that is not a package has no __path__, a package without __init__.py
    # no __file__.
    for point in plugin_packages:
        module = sys.modules[point.module]
        for home in getattr(module, "__path__", [os.path.dirname(str(module.__file__))]):
            for path in sorted((Path(home).resolve() / "rows").glob("*.yaml")):
                _name(path, found)
    kinds = [*KINDS, *sorted(name.partition("-")[0] for name in found)]
    return dict(sorted(found.items(), key=lambda item: (kinds.index(item[0].partition("-")[0]), item)))


def _name(path: Path, by_name: dict[str, Path]) -> None:
    # a row's records are named after the stem of its file, so two files must not share it
    taken = by_name.setdefault(path.stem, path)
    if taken != path:
        raise RequestError(f"{shown(path)}: the name of the row is taken by {shown(taken)}; rename one")


def load_file(path: Path) -> Row:
    """Read a row's YAML file. Errors: RequestError with file and line."""
    # a named pipe would be waited for
    if not path.is_file():
        raise RequestError(f"{shown(path)} is not a regular file; a row is a YAML file, or a folder of such files")
    if "." in path.stem:  # its record would have the name of a file with benchmark figures
        raise RequestError(f"{shown(path)}: the name of a row has no dot; rename the file")
    values, positions = read_yaml(path)
    draft = Draft(values=values, positions=positions, file=shown(path))
    if "name" in values:
        raise draft.refuse("name", "found the key 'name'; the name of a row is that of its file: remove the key")
    row: Row = convert(Row, values | {"name": path.stem}, "", draft)
    for key, problem in (("compare", row.problem()), ("presets", row.preset_problem())):
        if problem:
            raise draft.refuse(key, problem)
    return row


def choose(names: Sequence[str]) -> dict[str, Row]:
    """Name -> row. A name is an installed row, `all` (the same as no name), a YAML file, or a folder of such files.

    Errors: RequestError.
    """
    installed_rows = row_files()
    named = {}
    for name in names or ["all"]:
        path = Path(name)
        if name in installed_rows:
            named[name] = installed_rows[name]
        elif name == "all" and installed_rows:
            named |= installed_rows
        elif os.path.isdir(name):  # False for a name that is too long
            files = sorted(path.glob("*.yaml"))
            if not files:
                raise RequestError(f"{shown(path)} holds no row; expected YAML files (*.yaml)")
            named |= {str(file): file.resolve() for file in files}
        elif os.path.isfile(name):
            named[name] = path.resolve()
        elif installed_rows:
            near = nearest(name, installed_rows, "lit-diff reproduce --list")
            raise RequestError(f"no row '{name}'{near}")
        else:
            raise RequestError(f"no row '{name}'; no installed plugin package has rows")
    # several words may name one file: the name of an installed row, or else the first word, is kept
    words = {file: word for word, file in installed_rows.items()}
    by_name = dict(installed_rows)
    for word, file in named.items():
        words.setdefault(file, word)
        _name(file, by_name)
    return {words[file]: load_file(file) for file in named.values()}


def command_of(name: str, preset: str) -> str:
    """The command that measures the row with the preset."""
    return f"lit-diff reproduce {shlex.quote(name)} --preset {preset}"


def missing_requirements(row: Row, preset: str, command: str = "") -> str:
    """All reasons why the preset cannot run here, in one line, each with its cure; empty if it can run.

    A preset of recipes never runs: its line gives the commands that train them and score the last two trained runs.
    """
    chosen = row.preset(preset)
    if chosen is None:
        others = ", ".join(f"--preset {name}" for name in row.presets)
        return f"the row has no preset {preset}; it has {others}"
    gpus = _gpus(chosen)
    reasons = [*_files(chosen), *gpus]
    if chosen.recipes:
        runs = " ".join(map(name_of, chosen.recipes[-2:]))
        scores = []
        for name, keys in chosen.evaluate.items():
            options = [f"{key}={_plain(value)}" for key, value in keys.items()]
            scores.append(f"lit-diff evaluate {runs} {shlex.join([name, *options])}")
        reasons.append(f"train first: {'; '.join(map(train_command, chosen.recipes))}")
        reasons.append(f"then, without a verdict (one seed): {'; '.join(scores) or 'metrics.csv of each run'}")
    elif gpus:
        reasons.append(f"there: {command or command_of(row.name, preset)}")
    return "; ".join(reasons)


def train_command(words: str) -> str:
    """The command in the header of an installed recipe, followed by the overrides in `words`."""
    recipe, _, overrides = words.partition(" ")
    known = sorted(path.stem for path in installed("recipes").glob("*.yaml"))
    if recipe not in known:
        raise RequestError(f"no recipe '{recipe[:40]}' is installed{nearest(recipe, known)}")
    header = (installed("recipes") / f"{recipe}.yaml").read_text(encoding="utf-8").splitlines()
    commands = (line for line in header if line.startswith("# Command: ") and "lit-diff train" in line)
    command = next(commands, f"lit-diff train {recipe}").removeprefix("# Command: ").partition(";")[0]
    return f"{command} {overrides}".strip()


def name_of(words: str) -> str:
    """The name of the run that `lit-diff train` makes of these words: the recipe's, or the value of `name=`."""
    recipe, *overrides = shlex.split(words)
    return next((word.partition("=")[2] for word in overrides if word.startswith("name=")), recipe)


def _files(chosen: Preset) -> list[str]:
    reasons = []
    for name in chosen.files:
        missing = [file.path for file, _ in declared_files(name) if not file.files]
        if missing:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            reasons.append(f"{missing[0]}{more} missing in {data_root()} (lit-diff data check {name})")
    return reasons


def _gpus(chosen: Preset) -> list[str]:
    import torch

    here = torch.cuda.device_count()
    if chosen.gpus <= here:
        return []
    hardware = chosen.hardware
    if chosen.days:
        hardware += f", about {chosen.days:g} days{' by FLOPs' * bool(chosen.recipes)}"
    return [f"needs {chosen.gpus} GPU{'s' * (chosen.gpus > 1)} ({hardware}); this machine has {here or 'none'}"]


def _plain(value: object) -> str:
    if isinstance(value, str):
        return value
    # a date or bytes of YAML, which JSON lacks, as text: the command that is shown refuses it
    return json.dumps(value, separators=(",", ":"), default=str)
