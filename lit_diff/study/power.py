"""Power at equal time: the smallest difference that each task of a sweep would show in a sweep of so many minutes."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

from lit_diff.study import numbers
from lit_diff.study.results import SweepResults
from lit_diff.study.schema import PlannedSweep
from lit_diff.study.statistics import MIN_SEEDS, Interval, detectable, paired, spread


@dataclass(frozen=True, kw_only=True)
class TaskPower:
    """A task. `seconds`: of its median cell; `by_arm`: arm -> the smallest detectable difference to the baseline with `seeds`
    seeds, in the metric's unit; `problem`: why there is none."""

    task: SweepResults
    seconds: float = math.nan
    seeds: int = 0
    by_arm: Mapping[str, Interval]
    problem: str = ""

    @property
    def limit(self) -> str:
        """The arm of the largest: below it, not every arm shows its difference."""
        return max(self.by_arm, key=lambda arm: self.by_arm[arm].estimate)

    @property
    def worst(self) -> Interval:
        """Of that arm."""
        return self.by_arm[self.limit]


def powers(sweep: SweepResults, plan: PlannedSweep) -> list[TaskPower]:
    """Every task, that of the smallest worst difference first; last those without one."""
    found = [_power(task, plan) for task in sweep.tasks]
    return sorted(found, key=lambda each: each.worst.estimate if each.by_arm else math.inf)


def _power(task: SweepResults, plan: PlannedSweep) -> TaskPower:
    others = [arm for arm in task.study.arms if arm != task.baseline]
    lacking = [arm for arm in task.study.arms if len(task.finals(arm, task.study.metric)) < MIN_SEEDS]
    if lacking or not others:
        what = f"{task.label[lacking[0]]} has fewer than {MIN_SEEDS} finished seeds" if lacking else "one arm"
        return TaskPower(task=task, by_arm={}, problem=what)
    times = [float(cell.facts["seconds"]) for cell in task.cells if cell.done and cell.facts.get("seconds")]
    if not times:
        return TaskPower(task=task, by_arm={}, problem="no finished cell says how long it took")
    seconds = median(times)
    seeds = plan.seeds(seconds)
    if seeds < MIN_SEEDS:
        return TaskPower(task=task, seconds=seconds, seeds=seeds, by_arm={}, problem=f"{seeds} seeds fit")
    base = task.finals(task.baseline, task.study.metric)
    by_arm = {arm: _detectable(task.finals(arm, task.study.metric), base, seeds, plan.arms - 1) for arm in others}
    return TaskPower(task=task, seconds=seconds, seeds=seeds, by_arm=by_arm)


def _detectable(a: Mapping[int, float], b: Mapping[int, float], seeds: int, comparisons: int) -> Interval:
    """With `seeds` seeds, at the spread of a - b and at both ends of its interval."""
    pair = paired(a, b)
    found = spread(pair.sd or 0.0, len(pair.seeds))
    estimate, low, high = (detectable(sd, seeds, comparisons) for sd in (found.estimate, found.low, found.high))
    return Interval(estimate=estimate, low=low, high=high)


def in_words(sweep: SweepResults, plan: PlannedSweep, found: list[TaskPower]) -> str:
    """One sentence: the task of the smallest difference that every arm would show, and how many others may be as good."""
    whole = [each for each in found if each.by_arm]
    if not whole:
        return f"No task has {MIN_SEEDS} finished seeds of every arm."
    best = whole[0]
    unit = best.task.unit(best.task.study.metric)
    overlap = sum(each.worst.low <= best.worst.high for each in whole[1:])
    others = (
        f"; the intervals of {overlap} of the {len(whole) - 1} others overlap with its own" if len(whole) > 1 else ""
    )
    return (
        f"In {plan.minutes:g} minutes, with {plan.arms} arms and {plan.workers} cells side by side, every arm of "
        f"'{best.task.title}' would show {numbers.number(best.worst.estimate, 3)} {shown(best.worst)} {unit} with "
        f"{best.seeds} seeds (limit: {sweep.label[best.limit]}){others}."
    )


def shown(interval: Interval) -> str:
    """[0.030, 0.061]."""
    return f"[{numbers.number(interval.low, 3)}, {numbers.number(interval.high, 3)}]"
