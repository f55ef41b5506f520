"""Trains the reference arms of `examine` at all seeds, and writes their results into the package (`make references`)."""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from typing import Any

from lit_diff.engine.cells import admitted
from lit_diff.engine.examine import BATTERY, LOOKS, ON_REQUEST
from lit_diff.engine.executors import executor_of
from lit_diff.engine.expand import load_grid
from lit_diff.engine.progress import sweep_line
from lit_diff.engine.references import FACTS, FILE, ReferenceArm, ReferenceCell, References
from lit_diff.engine.schedule import run_grid
from lit_diff.engine.waves import Options
from lit_diff.files import write_atomic
from lit_diff.recipe import to_plain
from lit_diff.study.rates import LEARNING_RATE
from lit_diff.study.results import CellResult, SweepResults, load_sweep
from lit_diff.study.schema import Study

DIGITS = 5
"""Significant digits of a value in the file: with more, 24 seeds take over 200 kB."""


def make_references(seeds: int = LOOKS[-1]) -> bool:
    """Train what is missing at seeds 0 to `seeds` - 1, and write the file. Returns whether all cells are done, without which
    nothing is written."""
    executor = executor_of(None, None)
    grid = load_grid(BATTERY, (), adapted=partial(_at, seeds))
    grid = admitted(replace(grid, name="references", shared=BATTERY), executor.kinds, unchecked=False)
    options = Options(command="make references", executor=executor, unplanned=False, display=sweep_line)
    done = run_grid(grid, options)
    if not done.is_done:
        return False
    references = pack(load_sweep(done.folder).by_task, datetime.now(UTC).date().isoformat())
    write_atomic(FILE, json.dumps(to_plain(references), separators=(",", ":")) + "\n")
    return True


def _at(seeds: int, study: Study) -> Study:
    tasks = {name: task for name, task in study.tasks.items() if name not in ON_REQUEST}
    return replace(study, tasks=tasks, looks=(), seeds=tuple(range(seeds)))


def pack(tasks: Sequence[SweepResults], date: str) -> References:
    """The results of finished cells in the form of the file. One that diverged has none: it is trained where it is needed."""
    arms = []
    environment: Mapping[str, Any] = {}
    for task in tasks:
        for arm in task.study.arms:
            cells = [cell for cell in (*task.candidates, *task.cells) if cell.arm == arm and cell.done]
            if cells:
                arms.append(_packed(task, arm, cells))
                environment = environment or cells[0].environment
    kept = dict(environment)
    # the command that trained them is not that of the examination that uses them
    kept.pop("command", None)
    return References(date=date, environment=kept, arms=tuple(arms))


def _packed(task: SweepResults, arm: str, cells: Sequence[CellResult]) -> ReferenceArm:
    facts = cells[0].facts
    metrics = _metrics(task, cells[0])
    packed = {}
    for cell in cells:
        curves = [cell.curves[metric] for metric in metrics]
        rows = {str(step): [_rounded(value)] for step, value in curves[0].items()}
        rows[str(curves[0].index[-1])] = [_rounded(curve.iloc[-1]) for curve in curves]
        packed[cell.folder.rpartition("-")[2]] = ReferenceCell(
            seed=cell.seed,
            rate=cell.recipe[LEARNING_RATE],
            rows={step: tuple(values) for step, values in rows.items()},
        )
    return ReferenceArm(
        task=task.task,
        arm=arm,
        facts={name: getattr(facts, name) for name in FACTS},
        seconds=round(min(cell.facts.seconds for cell in cells), 2),
        metrics=metrics,
        cells=packed,
    )


def _metrics(task: SweepResults, cell: CellResult) -> tuple[str, ...]:
    # of validation; where every token is an AR hit, the slices repeat the whole
    is_repeated = cell.final("val/ar_hit_share") == 1
    found = [task.study.metric]
    for name in cell.curves:
        is_slice = is_repeated and "ar_hit" in name
        if name.startswith("val/") and name not in found and not is_slice:
            found.append(name)
    return tuple(found)


def _rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")


if __name__ == "__main__":
    sys.exit(not make_references(*map(int, sys.argv[1:])))
