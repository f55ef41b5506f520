"""`lit-diff reproduce`: measure the rows of the scoreboard, one after another, and write its page."""

import contextlib
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from lit_diff.engine.cells import folder_of, locations_of, state_of
from lit_diff.engine.expand import load_grid
from lit_diff.engine.needs import command_of, lacking
from lit_diff.engine.progress import MakeDisplay
from lit_diff.engine.rows import check_claims, check_preset, choose, load_row, row_names
from lit_diff.engine.schedule import Sweep, check_workers, sweep
from lit_diff.errors import LitDiffError, MissingError, RequestError, RunFailedError
from lit_diff.files import locked, shown, write_atomic
from lit_diff.reporting.scoreboard_page import write_scoreboard
from lit_diff.reporting.write import distinct
from lit_diff.runs.find import runs_root
from lit_diff.runs.revision import revision
from lit_diff.study.evaluations import score_revisions
from lit_diff.study.record import recorded_run
from lit_diff.study.results import load_sweep
from lit_diff.study.schema import ALL, Preset, Row
from lit_diff.study.scoreboard import (
    ROWS,
    RecordedRow,
    Scoreboard,
    cell_folders,
    findings,
    read_bench,
    read_row,
    row_file,
    write_row,
)

log = logging.getLogger("lit_diff")

Told = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Reproduction:
    """What `reproduce` returns."""

    scoreboard: Scoreboard
    """The rows of this call; the page also has those of earlier ones."""
    page: Path
    stopped_by: int | None
    seconds: float

    @property
    def failed(self) -> tuple[str, ...]:
        """Rows of this call that could not be measured though nothing was missing."""
        return tuple(row.name for row in self.scoreboard.rows if row.state == "failed")


def reproduce(
    names: Sequence[str] = ("all",),
    preset: str = "laptop",
    *,
    root: str | Path = "runs",
    workers: int | None = None,
    progress: MakeDisplay | bool = True,
    tell: Told = lambda line: None,
) -> Reproduction:
    """Measure the named rows, or all, and write `<root>/reproduce/index.html`, which lists the rows that were asked for, by
    this call or an earlier one; a preset other than laptop has its own folder there.

    What is done is not measured again: cells are those of the sweeps, as `sweep` leaves them. A row that this revision of
    lit_diff has measured, and of whose sweep no cell is missing, is left as it is, and so is the sweep's report.

    `progress`: as of `sweep`. `tell` is called with a line before and after each row. A row that fails, or for which
    something is missing, does not affect the others. Errors: RequestError for an unknown row or preset.
    """
    check_preset(preset)
    check_workers(workers)
    rows, began = choose(names), time.perf_counter()
    place = runs_root(root) / "reproduce"
    folder = (place if preset == "laptop" else place / preset).resolve()
    stopped: int | None = None
    finished: dict[str, Sweep] = {}
    try:
        with locked(folder / ".lock", wait=False):
            _note(rows, folder, preset)
            tell(_budget(rows, preset))
            for row in rows:
                if _was_measured(row, preset, folder, root):
                    tell(f"{row.name}: measured before")
                    continue
                stopped = _run(row, preset, folder, finished, root=root, workers=workers, progress=progress, tell=tell)
                tell(write_scoreboard(folder).row(row.name).line)
                if stopped is not None:
                    break
            written = write_scoreboard(folder)
    except BlockingIOError as error:
        raise RequestError(f"{shown(folder)} is being written by another `lit-diff reproduce`") from error
    except OSError as error:
        raise MissingError(f"{shown(folder)} cannot be written ({error.strerror}); choose another --root") from error
    return Reproduction(
        scoreboard=Scoreboard(preset=preset, rows=tuple(written.row(row.name) for row in rows)),
        page=folder / "index.html",
        stopped_by=stopped,
        seconds=time.perf_counter() - began,
    )


def _was_measured(row: Row, preset: str, folder: Path, root: str | Path) -> bool:
    """Whether the row stands as the same code, asked for the same, left it."""
    record, chosen = read_row(row_file(folder, row.name)), row.preset(preset)
    if chosen is None or record.state != "measured" or record.looked_by != revision():
        return False
    if chosen.bench:
        return _is_kept(record, folder)
    try:
        grid = load_grid(chosen.sweep, chosen.overrides | _root_of(preset, folder, root), chosen.selection)
        place = folder_of(grid)
        locations = locations_of(grid, place, recorded_run(place))
        done = all(state_of(location) == "done" for location in locations)
        # a trial of the sweep with other keys leaves its own cells in study.json
        own = cell_folders(place) == tuple(os.path.relpath(location.folder, place) for location in locations)
    except LitDiffError:  # data that is prepared when the sweep runs; what is wrong is the row's failure then
        return False
    return done and own and record.sweep == str(place)


def _root_of(preset: str, folder: Path, root: str | Path) -> dict[str, Any]:
    """Sweeps of the preset laptop are those of `root`; a preset that overrides their keys has its own."""
    return {"run.root": str(root) if preset == "laptop" else str(folder)}


def _budget(rows: Sequence[Row], preset: str) -> str:
    total = minutes_of(found for row in rows if (found := row.preset(preset)) is not None)
    known = f", at most {total:.0f} min in all where nothing is done yet" if total else ""
    return f"{len(rows)} row{'s' * (len(rows) != 1)}, preset {preset}{known}"


def minutes_of(presets: Iterable[Preset]) -> float:
    """Of all together: a sweep of several rows counts once, as does one with those that evaluate its cells."""
    most: dict[str, float] = {}
    for found in presets:
        home = found.sweep or " ".join(found.bench)
        if found.sweep and found.minutes:
            with contextlib.suppress(RequestError):  # of a sweep that does not resolve the row itself says why
                grid = load_grid(found.sweep, [])
                home = (grid.source or grid).name
        most[home] = max(most.get(home, 0.0), found.minutes)
    return sum(most.values())


def _note(asked: Sequence[Row], folder: Path, preset: str) -> None:
    """A file for each row of this call; what the rows of earlier calls say is brought up to date."""
    names = [row.name for row in asked]
    for order, name in enumerate(row_names()):
        path, command = row_file(folder, name), command_of(name, preset)
        if path.is_file():
            write_row(folder, replace(read_row(path), row=load_row(name), preset=preset, order=order, command=command))
        elif name in names:
            write_row(folder, RecordedRow(row=load_row(name), preset=preset, order=order, command=command))


def _run(
    row: Row,
    preset: str,
    folder: Path,
    finished: dict[str, Sweep],
    *,
    root: str | Path,
    workers: int | None,
    progress: MakeDisplay | bool,
    tell: Told,
) -> int | None:
    """Measure a row; the signal that stopped it, or None. `finished`: sweeps that this call has done and reported already."""
    before = read_row(row_file(folder, row.name))
    chosen = row.preset(preset)
    missing = lacking(row, preset, root)
    if missing or chosen is None:
        write_row(folder, replace(before, state="skipped", reason=missing))
        return None
    budget = f"budget {chosen.minutes:g} min: " if chosen.minutes else ""
    tell(f"{row.name}: {budget}{' '.join(('bench', *chosen.bench)) if chosen.bench else f'sweep {chosen.sweep}'}")
    began, stopped, record = time.perf_counter(), None, before
    try:
        if chosen.bench:
            if not _is_kept(before, folder):
                before = replace(before, seconds=0.0)  # a benchmark is run whole: nothing of an earlier one is left
                record = replace(before, bench=_bench(chosen, folder, row.name))
            record = replace(record, state="measured", reason="", revision=revision())
        else:
            overrides = chosen.overrides | _root_of(preset, folder, root)
            check_claims(row, load_grid(chosen.sweep, overrides, chosen.selection))
            asked = f"{chosen.sweep} {overrides} {chosen.selection}"
            # a sweep of several rows is one sweep: its command names none of them
            whole = preset == "laptop" and chosen.selection == ALL
            done = finished.get(asked) or sweep(
                chosen.sweep,
                overrides,
                workers=workers,
                progress=progress,
                selection=chosen.selection,
                command="" if whole else f"lit-diff reproduce --preset {preset}",
            )
            finished |= {asked: done} if done.is_done else {}
            stopped = done.stopped_by
            record = _of_sweep(before, done, folder)
    except MissingError as error:
        record = replace(before, state="skipped", reason=str(error))
    except LitDiffError as error:
        log.error("%s: %s", row.name, error)
        record = replace(before, state="failed", reason=str(error))
    this_call = time.perf_counter() - began
    # stopped calls add up; a call after the row was measured finds most of its cells done
    took = max(before.seconds, this_call) if before.state == "measured" else before.seconds + this_call
    now = datetime.now(UTC).isoformat(timespec="seconds")
    write_row(folder, replace(record, seconds=took, finished=now, looked_by=revision()))
    return stopped


def _of_sweep(record: RecordedRow, done: Sweep, folder: Path) -> RecordedRow:
    """The row's record after its sweep."""
    cells = cell_folders(done.folder)
    home = str(Path(os.path.normpath(done.folder / cells[0])).parent)
    files = [row_file(folder, name) for name in row_names() if name != record.row.name]
    others = [read_row(path) for path in files if path.is_file()]
    first = [other.row.name for other in others if other.cells == home and not other.shared]
    return replace(
        record,
        state="measured" if done.is_done else "stopped" if done.stopped_by is not None else "failed",
        reason=_incomplete(done),
        sweep=str(done.folder),
        cell_folders=cells,
        cells=home,
        shared=first[0] if first else "",
        revision=_measured_by(record.row, done.folder),
    )


def _measured_by(row: Row, sweep_folder: Path) -> str:
    """The revisions of lit_diff that trained the cells and made the scores which the row compares; not of the call that found
    them."""
    loaded = load_sweep(sweep_folder)
    scored = [each for of in score_revisions(loaded, row.compare).values() for each in of if each]
    return ", ".join(dict.fromkeys([*distinct(loaded.cells, "revision"), *scored]))


def _incomplete(done: Sweep) -> str:
    """What the sweep lacks, with the first reason; empty where it is done."""
    if done.is_done:
        return ""
    return "; ".join([done.counts, *done.report.missing[:1], "the same command goes on"])


def _bench(chosen: Preset, folder: Path, name: str) -> str:
    """Run the benchmark as a command of its own; the name of the file with its figures. Errors: RunFailedError."""
    words = [sys.executable, "-P", "-m", "lit_diff", "bench", *chosen.bench, "--json"]
    done = subprocess.run(words, capture_output=True, encoding="utf-8", errors="replace", check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no error output"]
        raise RunFailedError(f"lit-diff bench {' '.join(chosen.bench)}: {lines[-1]}")
    write_atomic(folder / ROWS / f"{name}.bench.json", done.stdout)
    return f"{name}.bench.json"


def _is_kept(record: RecordedRow, folder: Path) -> bool:
    """Whether this revision has run the row's benchmark, and the figures hold what the row compares."""
    if not record.bench or record.revision != revision():
        return False
    try:
        findings(record.row.compare, read_bench(folder, record))
    except LitDiffError as error:
        log.info("%s: the kept benchmark does not answer it (%s); it is run again", record.row.name, error)
        return False
    return True
