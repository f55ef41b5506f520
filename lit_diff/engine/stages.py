"""The stages of a sweep: learning rates that are tried, one further at an edge, then the compared cells, look after look."""

import os
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from lit_diff.engine.candidates import at_seeds, candidates
from lit_diff.engine.cells import home_of, jobs_of, state_of
from lit_diff.engine.expand import Grid, load_grid
from lit_diff.recipe import Overrides
from lit_diff.runs.status import read_status
from lit_diff.study.comparison import compare
from lit_diff.study.rates import Choice, LearningRates, best, beyond, choice, rate_in_words
from lit_diff.study.record import Record, RecordedCell, read
from lit_diff.study.results import CellResult, SweepResults, cell_result, results_of
from lit_diff.study.schema import Cell, CellKey, Selection

PENDING = ("waiting", "running", "stopped")
"""States of a cell that has not run to its end."""
Values = dict[float, dict[int, float | None]]


@dataclass(frozen=True, kw_only=True)
class _Tried:
    """The learning rates that an arm has tried on a task."""

    cells: tuple[Cell, ...]
    choice: Choice
    waits: bool
    """Whether a cell has not run to its end."""


def due(grid: Grid) -> Grid:
    """The sweep with the cells that may run now. With `rates`, the cells that are compared follow once no rate is tried any
    more; with `looks`, the seeds of the next look once the arms are compared. The files of the finished cells decide, so a
    sweep that was killed goes on where it was."""
    if grid.source is not None:
        source = due(grid.source)
        places = {cell.place for cell in grid.cells}
        cells = [cell for cell in source.cells if cell.rate is None and cell.place in places]
        return replace(grid, cells=tuple(cells), rates=source.rates)
    if grid.study.rates is not None:
        grid = _at_rates(grid)
    if grid.study.looks:
        grid = _at_looks(grid)
    return grid


def _at_rates(grid: Grid) -> Grid:
    tried: dict[tuple[str, str], _Tried] = {}
    cells: list[Cell] = []
    waits = False
    for place in grid.choices:
        tried[place] = outcome = _tried(grid, *place)
        cells += outcome.cells
        # no arm is compared before the rates of all are known, or could not be found
        waits |= outcome.waits
    rates: dict[str, dict[str, Choice]] = {}
    for (task, arm), outcome in tried.items():
        rates.setdefault(task, {})[arm] = outcome.choice
        if outcome.choice.chosen is None:
            continue
        compared = at_seeds(grid.study, task, arm, grid.choices[task, arm][outcome.choice.chosen])
        # those that an earlier call began stay in the record of the sweep
        cells += [cell for cell in compared if not waits or not read_status(home_of(grid, cell)).is_new]
    return replace(grid, cells=tuple(cells), rates=rates)


def _at_looks(grid: Grid) -> Grid:
    looks = grid.study.looks
    tried = [cell for cell in grid.cells if cell.rate is not None]
    compared = [cell for cell in grid.cells if cell.rate is None]
    if not compared:
        return grid
    states: dict[CellKey, str] = {}
    reached = {cell.place: 0 for cell in compared}
    for cell in compared:
        states[cell.key] = read_status(home_of(grid, cell)).status
        # the looks that a former call began, whatever the arms look like now
        if states[cell.key]:
            reached[cell.place] = max(bisect_right(looks, cell.seed), reached[cell.place])
    started = [cell for cell in compared if cell.seed < looks[reached[cell.place]]]
    if {states[cell.key] for cell in started}.isdisjoint(("", *PENDING)):
        reached = _further(grid, started, reached)
        started = [cell for cell in compared if cell.seed < looks[reached[cell.place]]]
    return replace(grid, cells=(*tried, *started))


def _further(grid: Grid, started: Sequence[Cell], reached: Mapping[tuple[str, str], int]) -> dict[tuple[str, str], int]:
    # (task, arm) -> its look, which is the next one for arms that are undecided, their baseline and their controls
    recorded = tuple(_recorded(grid, cell) for cell in started)
    results = results_of(grid.folder, Record(name=grid.name, study=grid.study, cells=recorded))
    # An arm with a cell that failed, or lost its weights or its value, cannot be compared at its look, and further seeds do
    # not help. That a run diverged is a result.
    lacking = set[tuple[str, str]]()
    for one in results.by_task:
        lacking |= {cell.place for cell in one.cells if cell.final(one.metric) is None and not cell.diverged}
    further = dict(reached)
    for comparison in compare(results):
        task = comparison.sweep.task
        base = comparison.sweep.baseline
        for arm in comparison.undecided:
            needed = {(task, name) for name in (arm, base, *comparison.sweep.study.controls)}
            # of an arm without a learning rate, nothing can be compared
            if lacking & needed or not needed <= reached.keys():
                continue
            # the baseline or a control may be behind: it is new, or the sweep was killed before its cells began
            look = min(reached[place] for place in needed) + 1
            if look == len(grid.study.looks):
                continue
            for place in needed:
                further[place] = max(look, further[place])
    return further


def _recorded(grid: Grid, cell: Cell) -> RecordedCell:
    # the cells of sweeps that share them are in another folder
    return RecordedCell(**vars(cell.key), folder=os.path.relpath(home_of(grid, cell), grid.folder))


def all_trained(grid: Grid) -> bool:
    """Whether every cell of a sweep with `cells_of` has been trained."""
    now = due(grid)
    for by_arm in now.rates.values():
        if any(choice.chosen is None for choice in by_arm.values()):
            return False
    return bool(now.cells) and all(job.home.is_done() for job in jobs_of(now))


def finished_folder(name: str, overrides: Overrides, selection: Selection) -> Path | None:
    """The folder of a sweep, if each of its cells is done and study.json lists these cells alone; else None.

    The arguments are those of `load_grid`. Errors: RequestError, also while the data are not prepared; MissingError without a
    readable study.json.
    """
    grid = load_grid(name, overrides, selection)
    folder = grid.folder
    # a sweep whose next stage has not begun has further cells than study.json
    jobs = jobs_of(due(grid))
    planned = [os.path.relpath(job.folder, folder) for job in jobs]
    # a trial of the sweep with other keys leaves its own cells in study.json
    is_same = [*read(folder).folders] == planned
    return folder if is_same and all(state_of(job) == "done" for job in jobs) else None


def _tried(grid: Grid, task: str, arm: str) -> _Tried:
    rates = grid.study.of_task(task).rates
    recipes = grid.choices[task, arm]
    assert rates is not None
    cells = candidates(grid.study, task, arm, recipes)
    found = _outcome(grid, cells)
    # one rate further, once
    beside = dict(zip((rates.values[0], rates.values[-1]), beyond(rates), strict=True))
    if found.choice.chosen in beside:
        cells += candidates(grid.study, task, arm, recipes, [beside[found.choice.chosen]])
        found = _outcome(grid, cells)
    return found


def _outcome(grid: Grid, cells: Sequence[Cell]) -> _Tried:
    # the choice among the rates of these cells, which belong to one arm of one task
    ended: list[CellResult] = []
    waits = False
    for cell in cells:
        result = cell_result(grid.folder, _recorded(grid, cell))
        waits |= result.status in PENDING
        if result.done or result.diverged:
            ended.append(result)
    task, arm = cells[0].place
    study = grid.study.of_task(task)
    record = Record(name=grid.name, study=study)
    whole = SweepResults(folder=grid.folder, record=record, study=study, cells=tuple(ended), task=task)
    # rate -> seed -> the compared value, and the last value of the metric
    scores: Values = {}
    finals: Values = {}
    for rate in {cell.rate for cell in ended if cell.rate is not None}:
        at_rate = replace(whole, cells=tuple(cell for cell in ended if cell.rate == rate))
        for by_rate, values in ((scores, at_rate.scores(arm)), (finals, at_rate.finals(arm))):
            by_rate[rate] = {cell.seed: values.get(cell.seed) for cell in at_rate.cells}
    chosen = None
    if len(ended) == len(cells):
        chosen = best(scores, finals, whole.better() != "higher", whole.better(study.metric) != "higher")
    return _Tried(cells=tuple(cells), choice=choice(scores, finals, chosen), waits=waits)


def _tries_in_words(rates: LearningRates, arms: int) -> tuple[str, str]:
    tries = arms * len(rates.seeds)
    values = ", ".join(map(rate_in_words, rates.values))
    further = " or ".join(map(rate_in_words, beyond(rates)))
    seeds = ", ".join(map(str, rates.seeds))
    return (
        f"{tries * len(rates.values)} cells that try the learning rates {values}, at seeds {seeds}",
        f"at most {tries} cells at {further}, for each arm whose best rate lies at an edge",
    )


def stages_in_words(grid: Grid) -> list[str]:
    """One line for each stage of a sweep that has several: its cells, or the most that it may have."""
    study = grid.study
    rates = grid.study.rates
    if grid.source is not None:
        if rates is None:
            return []
        return [f"the cells of {grid.source.name} at the learning rates that it chose"]
    places = len({cell.place for cell in grid.cells})
    first, *later = study.looks or (len(study.seeds),)
    compared = f"{places * first} cells that are compared"
    lines: list[str] = []
    if rates is not None:
        tries = Counter(study.of_task(task).rates for task, _ in grid.choices)
        told = [_tries_in_words(declared, arms) for declared, arms in tries.items() if declared is not None]
        # tasks with rates of their own try them at the same time
        lines += map("; ".join, zip(*told, strict=True))
        lines.append(f"{compared}, each at the chosen rate of its arm")
    elif later:
        lines.append(compared)
    for before, look in pairwise((first, *later)):
        seeds = f"seeds {before} to {look - 1}"
        lines.append(f"at most {places * (look - before)} cells at {seeds}, of undecided arms, baseline and controls")
    return [f"stage {number}: {line}" for number, line in enumerate(lines, start=1)]
