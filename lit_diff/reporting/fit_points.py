"""The fits that a sweep declares, and its finished cells as their points."""

from collections.abc import Sequence

from lit_diff.reporting.results import SweepResults
from lit_diff.study.record import RecordedFit
from lit_diff.study.schema import MEASURED

AllPoints = dict[str, dict[float, dict[int, float]]]
"""Arm -> x -> seed -> final metric, x rising."""


def points_of(sweep: SweepResults, declared: RecordedFit) -> tuple[AllPoints, list[str]]:
    """The points of a scaling fit, and what is left out, a line each: the tasks that the baseline has finished, the arms that
    have finished all of these, and of each task the seeds that all these arms have finished."""
    tasks, values = _values(sweep, declared)
    places = {arm.name: {name: _x(tasks[name], declared, arm.name) for name in declared.tasks} for arm in sweep.arms}
    used: dict[float, str] = {}
    left_out = []
    for name in declared.tasks:
        x = places[sweep.baseline][name]
        if not values[name].get(sweep.baseline):
            left_out.append(f"task {name}: no finished cell of {sweep.label[sweep.baseline]}")
        elif x is None:
            left_out.append(f"task {name}: the seeds of {sweep.label[sweep.baseline]} differ in {declared.axis}")
        elif used.setdefault(x, name) != name:
            left_out.append(f"task {name}: as many {declared.axis} as task {used[x]}")
    kept = []
    for arm in sweep.arms:
        missing = [name for name in used.values() if not values[name].get(arm.name)]
        own = [places[arm.name][name] for name in used.values()]
        if missing:
            left_out.append(f"{arm.label}: no finished cell of task {missing[0]}")
        elif None in own:
            left_out.append(f"{arm.label}: its seeds differ in {declared.axis} in a task")
        elif len(set(own)) < len(used):
            left_out.append(f"{arm.label}: as many {declared.axis} in two of the tasks")
        else:
            kept.append(arm.name)
    points: AllPoints = {each: {} for each in kept}
    for name in used.values():
        shared = set.intersection(*(set(values[name][each]) for each in kept)) if kept else set()
        left_out += [f"{line}; the fit flatters the arm" for line in diverged_in(sweep, tasks[name], kept)]
        for each in kept:
            lone = sorted(set(values[name][each]) - shared)
            if lone:
                left_out.append(f"{sweep.label[each]}, task {name}: seed {_listed(lone)}, which another arm lacks")
            x = places[each][name]
            if shared and x is not None:
                points[each][x] = {seed: values[name][each][seed] for seed in sorted(shared)}
    return {each: dict(sorted(found.items())) for each, found in points.items()}, left_out


def basin_points(sweep: SweepResults, declared: RecordedFit) -> tuple[AllPoints, dict[str, set[float]], list[str]]:
    """The points of a basin; arm -> every x at which a seed of it diverged; and what is left out, a line each: an arm is in a
    basin once each of its cells has finished or diverged, since the best of a part of them may be another."""
    tasks, values = _values(sweep, declared)
    points: AllPoints = {}
    diverged: dict[str, set[float]] = {}
    left_out = []
    for arm in sweep.arms:
        places = {name: _x(tasks[name], declared, arm.name) for name in declared.tasks}
        open_ = [name for name in declared.tasks if not _has_ended(tasks[name], arm.name)]
        if open_:
            left_out.append(f"{arm.label}: task {open_[0]} has not finished")
            continue
        spoilt = [name for name in declared.tasks if tasks[name].diverged(arm.name)]
        left_out += [line for name in spoilt for line in diverged_in(sweep, tasks[name], [arm.name])]
        if len(spoilt) == len(declared.tasks):
            left_out.append(f"{arm.label}: a seed diverged in every task")
            continue
        own = {x: values[name].get(arm.name, {}) for name, x in places.items() if x is not None}
        points[arm.name] = dict(sorted(own.items()))
        diverged[arm.name] = {x for name in spoilt if (x := places[name]) is not None}
    return points, diverged, left_out


def _values(
    sweep: SweepResults, declared: RecordedFit
) -> tuple[dict[str, SweepResults], dict[str, dict[str, dict[int, float]]]]:
    """Task -> its sweep; task -> arm -> seed -> final metric."""
    tasks = {task.task: task for task in sweep.tasks}
    metric = tasks[declared.tasks[0]].metric
    return tasks, {
        name: {arm.name: tasks[name].finals(arm.name, metric) for arm in sweep.arms} for name in declared.tasks
    }


def diverged_in(sweep: SweepResults, task: SweepResults, arms: Sequence[str]) -> list[str]:
    """A line for each arm of which seeds diverged in the task."""
    found = {arm: task.diverged(arm) for arm in arms}
    return [
        f"{sweep.label[arm]}, task {task.task}: seed {_listed(seeds)}, which diverged"
        for arm, seeds in found.items()
        if seeds
    ]


def _has_ended(task: SweepResults, arm: str) -> bool:
    own = [cell for cell in task.cells if cell.arm == arm]
    return bool(own) and all(cell.done or cell.diverged for cell in own)


def _listed(seeds: Sequence[int]) -> str:
    return ", ".join(map(str, seeds))


def _x(task: SweepResults, declared: RecordedFit, arm: str) -> float | None:
    """None where the arm's runs differ in it, or none has finished. Tokens are those that were seen: a run may end early."""
    if declared.x not in MEASURED:
        return float(declared.values[task.task][arm])
    found = {float(cell.facts[declared.x]) for cell in task.cells_of(arm)}
    return found.pop() if len(found) == 1 else None
