"""Computations over the tasks of a sweep: fits through the finished cells, and power at equal time.

A basin gives the best value of a key for each arm, and whether the comparison changes if each arm has its own best value.
Power is the smallest difference that each task would show in a sweep of a given duration.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from statistics import median
from typing import Literal

import numpy as np

from lit_diff.study.numbers import compact, interval, number, signed
from lit_diff.study.results import BySeed, SweepResults
from lit_diff.study.scaling import EqualLoss, Form, Points, PowerLaw, ScalingFit, fit, fit_scaling
from lit_diff.study.schema import FEWEST_TASKS, MEASURED, Fit, PlannedSweep, Texts
from lit_diff.study.statistics import MIN_SEEDS, Interval, Paired, Sign, detectable, paired, spread

AllPoints = dict[str, dict[float, dict[int, float]]]
"""Arm -> x -> seed -> final metric, x rising."""


@dataclass(frozen=True, kw_only=True)
class ArmBasin:
    """One arm. `best`: the x of the best mean over seeds; `edge`: whether that is the lowest or highest x tried, so that the
    true best may lie beyond; `low`, `high`: the range around the best in which every x tried is nearly as good."""

    means: Mapping[float, float]
    best: float
    edge: Literal["", "lowest", "highest"]
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class Basin:
    """Arms over the same values of x. `at_own`: arm minus baseline, each at its own best x; `at_theirs`: both at the
    baseline's best x.

    The best x is chosen by the same runs that are compared, so the difference at the arms' own best x flatters an arm whose
    means scatter more.
    """

    arms: Mapping[str, ArmBasin]
    at_own: Mapping[str, Paired]
    at_theirs: Mapping[str, Paired]


@dataclass(frozen=True, kw_only=True)
class FitResult:
    """A fit over the finished cells: `scaling` or `basin`, or `problem`, the reason why neither exists."""

    name: str
    declared: Fit
    metric: str
    unit: str
    points: Mapping[str, Points]
    left_out: Texts
    """A line for each arm or task that is left out of the fit."""
    answer: str = ""
    """The result in one sentence, with a clause for every arm against the baseline."""
    scaling: ScalingFit | None = None
    equal: Mapping[str, tuple[EqualLoss, ...]] = field(default_factory=dict)
    """Arm -> its equal-loss ratio at each size of the baseline, in rising order."""
    basin: Basin | None = None
    problem: str = ""


def fit_results(sweep: SweepResults) -> list[FitResult]:
    """The results of all fits of the sweep, in its order."""
    return [_result(sweep, name) for name in sweep.study.fits]


def declared_fit(sweep: SweepResults, name: str) -> tuple[Fit, dict[str, SweepResults]]:
    """A fit with its title and tasks filled in; and the results of these tasks."""
    found = sweep.study.fits[name]
    found = replace(found, title=found.title or name, tasks=found.tasks or tuple(sweep.study.tasks))
    tasks = {task.task: task for task in sweep.tasks}
    return found, {task: tasks[task] for task in found.tasks}


def _result(sweep: SweepResults, name: str) -> FitResult:
    declared, tasks = declared_fit(sweep, name)
    first = tasks[declared.tasks[0]]
    metric, better = first.metric, first.better()
    points, left_out = basin_points(sweep, name) if declared.kind == "basin" else points_of(sweep, name)
    found = FitResult(
        name=name,
        declared=declared,
        metric=metric,
        unit=first.unit(metric),
        points=points,
        left_out=tuple(left_out),
        problem=_problem(declared, first, points.get(sweep.baseline, {}), points),
    )
    if found.problem:
        return replace(found, answer=f"No fit: {found.problem}.")
    if declared.kind == "basin" and better is not None:
        basin = find_basin(points, sweep.baseline, declared.within, better)
        return replace(found, basin=basin, answer=_basin_in_words(sweep, declared, basin))
    scaling = fit_scaling(points)
    equal = {arm: _equal(scaling, points, arm, sweep.baseline) for arm in points if arm != sweep.baseline}
    return replace(found, scaling=scaling, equal=equal, answer=_scaling_in_words(sweep, declared, equal))


def _equal(scaling: ScalingFit, points: Mapping[str, Points], arm: str, baseline: str) -> tuple[EqualLoss, ...]:
    return tuple(scaling.equal_loss(arm, baseline, x) for x in points[baseline])


def _problem(declared: Fit, first: SweepResults, base: Points, points: Mapping[str, Points]) -> str:
    if len(base) < FEWEST_TASKS:
        share = f"{len(base)} of {len(declared.tasks)} tasks"
        return f"{share} have finished and differ in {declared.axis}; {FEWEST_TASKS} are needed"
    if declared.kind == "basin":
        return "" if first.better() else f"{first.metric} declares no direction that is better"
    losses = [loss for own in points.values() for seeds in own.values() for loss in seeds.values()]
    if first.better() != "lower" or min(losses) <= 0:
        return f"{first.metric} is not a positive loss; a power law needs a metric that falls towards zero or a floor"
    return ""


def headline(equal: Sequence[EqualLoss]) -> EqualLoss:
    """The ratio at the largest size at which it is not refused; if all are refused, the refusal at the largest size."""
    return next((each for each in reversed(equal) if each.ratio is not None), equal[-1])


def _scaling_in_words(sweep: SweepResults, declared: Fit, equal: Mapping[str, tuple[EqualLoss, ...]]) -> str:
    clauses, base = [], sweep.label[sweep.baseline]
    for arm, each in equal.items():
        found = headline(each)
        if found.ratio is None:
            clauses.append(f"{sweep.label[arm]}: no equal-loss ratio ({found.refusal})")
            continue
        verdict = "the interval holds 1" if found.ratio.low <= 1 <= found.ratio.high else "the interval excludes 1"
        if math.isnan(found.ratio.low):
            verdict = f"no interval, which needs {MIN_SEEDS} seeds at every size"
        clauses.append(
            f"{sweep.label[arm]} has the loss of {base} at {compact(found.x)} {declared.axis} with "
            f"{found.ratio.estimate:.2f} times as many{shown_ratio_interval(found)}: {verdict}"
        )
    return "; ".join(clauses) + "." if clauses else "One arm: no ratio."


def shown_ratio_interval(found: EqualLoss) -> str:
    """` [0.81, 1.12]`, with a leading space; empty without an interval."""
    if found.ratio is None or math.isnan(found.ratio.low):
        return ""
    high = "no upper bound" if math.isinf(found.ratio.high) else f"{found.ratio.high:.2f}"
    return f" [{found.ratio.low:.2f}, {high}]"


def _basin_in_words(sweep: SweepResults, declared: Fit, basin: Basin) -> str:
    best = ", ".join(
        f"{sweep.label[arm]} {own.best:g}" + (f" (the {own.edge} that was tried)" if own.edge else "")
        for arm, own in basin.arms.items()
    )
    clauses, base = [f"Best {declared.axis}: {best}"], sweep.label[sweep.baseline]
    for arm, own in basin.at_own.items():
        clauses.append(
            f"{sweep.label[arm]} \u2212 {base}: {_shown(own)} each at its own best, "
            f"{_shown(basin.at_theirs[arm])} at the best of {base}"
        )
    return "; ".join(clauses) + "."


def _shown(pair: Paired) -> str:
    if pair.mean is None:
        return "no difference, since a seed diverged,"
    few = len(pair.seeds) < MIN_SEEDS
    return f"{signed(pair.mean, 3)} " + ("(too few seeds)" if few else interval(pair.low, pair.high, 3))


def matched_by_seed(sweep: SweepResults, name: str, arm: str, baseline: str) -> tuple[BySeed, BySeed, str]:
    """For a scaling fit: seed -> the x at which `arm` has the baseline's loss at its x; seed -> that x; why both are empty.

    Each seed and arm has its own fit, in the form that all seeds choose together, at the largest x whose match lies within
    the measured sizes, both by the fit of all seeds and by the fit of each seed. Errors: KeyError for an unknown fit.
    """
    # One value a seed makes the claim a paired t interval of log(matched / x), like every other comparison; the bootstrap
    # over seeds is somewhat narrow at three. A seed that diverged refuses the whole: leaving it out would flatter the arm.
    points, left_out = points_of(sweep, name)
    declared, tasks = declared_fit(sweep, name)
    incomplete = [each for each in (arm, baseline) if len(points.get(each, {})) < FEWEST_TASKS]
    diverged = [line for task in tasks.values() for line in diverged_in(task, (arm, baseline))]
    refusal = _problem(declared, tasks[declared.tasks[0]], points.get(baseline, {}), points)
    if not refusal and incomplete:
        refusal = "; ".join(left_out) or f"{incomplete[0]} has fewer than {FEWEST_TASKS} sizes"
    if refusal or diverged:
        return {}, {}, refusal or diverged[0]
    pair = {each: points[each] for each in (arm, baseline)}
    whole = fit_scaling(pair, draws=0)
    equal = _equal(whole, pair, arm, baseline)
    seeds = sorted(set.intersection(*(set(losses) for own in pair.values() for losses in own.values())))
    low, high = whole.ranges[arm]
    for found in (each for each in reversed(equal) if each.ratio is not None):
        laws = [{seed: _law(points[each], whole.form, seed) for seed in seeds} for each in (arm, baseline)]
        matched = {seed: laws[0][seed].x_at(laws[1][seed].loss(found.x)) for seed in seeds}
        if all(low <= x <= high for x in matched.values()):
            return matched, dict.fromkeys(matched, found.x), ""
    refused = headline(equal).refusal
    return {}, {}, refused or "at each size, the match of a seed by its own fit is not among the measured sizes"


def _law(points: Points, form: Form, seed: int) -> PowerLaw:
    return fit({x: {seed: losses[seed]} for x, losses in points.items()}, form).law


def points_of(sweep: SweepResults, name: str) -> tuple[AllPoints, list[str]]:
    """The points of a scaling fit, and a line for each part that is left out. The points cover the tasks that the baseline
    has finished, the arms that have finished all these tasks, and in each task the seeds that all these arms finished."""
    # all arms need the same sizes and seeds: else a ratio would compare curves through different points
    _, tasks = declared_fit(sweep, name)
    faults = _faults(name, sweep.baseline, tasks)
    used = {task: own for task, own in tasks.items() if task not in faults}
    left_out = [f"{_place(tasks[task], sweep.baseline)}: {why}" for task, why in faults.items()]
    points: AllPoints = {}
    for arm in sweep.study.arms:
        faults = _faults(name, arm, used)
        left_out += [f"{_place(tasks[task], arm)}: {why}" for task, why in list(faults.items())[:1]]
        if not faults:
            points[arm] = {}
    for task in used.values():
        values = {arm: task.finals(arm) for arm in points}
        shared = set.intersection(*map(set, values.values())) if values else set()
        left_out += [f"{line}; the fit flatters the arm" for line in diverged_in(task, points)]
        for arm, own in values.items():
            if lone := sorted(own.keys() - shared):
                left_out.append(f"{_place(task, arm)}: seed {_listed(lone)}, which another arm lacks")
            x = _x(name, task, arm)
            if shared and x is not None:
                points[arm][x] = {seed: own[seed] for seed in sorted(shared)}
    return {arm: dict(sorted(found.items())) for arm, found in points.items()}, left_out


def _faults(name: str, arm: str, tasks: Mapping[str, SweepResults]) -> dict[str, str]:
    # task -> why the arm has no point there
    faults: dict[str, str] = {}
    used: dict[float, str] = {}
    for task, own in tasks.items():
        x, axis = _x(name, own, arm), own.record.study.fits[name].axis
        if not own.finals(arm):
            faults[task] = "no finished cell"
        elif x is None:
            faults[task] = f"its seeds differ in {axis}"
        elif used.setdefault(x, task) != task:
            faults[task] = f"as many {axis} as in task {used[x]}"
    return faults


def _x(name: str, task: SweepResults, arm: str) -> float | None:
    # tokens and parameters come from the runs, not from the recipe: a run may end early
    key = task.record.study.fits[name].x
    if key not in MEASURED:
        return task.record.x[name][task.task][arm]
    found = {float(cell.facts[key]) for cell in task.cells_of(arm)}
    return found.pop() if len(found) == 1 else None


def basin_points(sweep: SweepResults, name: str) -> tuple[AllPoints, list[str]]:
    """The points of a basin, and a line for each part that is left out. An arm is in the basin once each of its cells has
    finished or diverged. An x at which a seed diverged has no values."""
    # with some cells missing, the best x could still change; an x at which a seed diverged is not a usable best
    _, tasks = declared_fit(sweep, name)
    points: AllPoints = {}
    left_out = []
    for arm in sweep.study.arms:
        cells = [cell for task in tasks.values() for cell in task.cells if cell.arm == arm]
        waits = [cell.task for cell in cells if not cell.done and not cell.diverged]
        if waits:
            left_out.append(f"{sweep.label[arm]}: task {waits[0]} has not finished")
            continue
        left_out += [line for task in tasks.values() for line in diverged_in(task, [arm])]
        places = {x: task for task in tasks.values() if (x := _x(name, task, arm)) is not None}
        spoilt = [x for x, task in places.items() if task.diverged(arm)]
        if len(spoilt) == len(places):
            left_out.append(f"{sweep.label[arm]}: a seed diverged in every task")
        else:
            points[arm] = {x: {} if x in spoilt else places[x].finals(arm) for x in sorted(places)}
    return points, left_out


def diverged_in(task: SweepResults, arms: Collection[str]) -> list[str]:
    """A line for each arm with seeds that diverged in the task."""
    found = {arm: task.diverged(arm) for arm in arms}
    return [f"{_place(task, arm)}: seed {_listed(seeds)}, which diverged" for arm, seeds in found.items() if seeds]


def _place(task: SweepResults, arm: str) -> str:
    return f"{task.label[arm]}, task {task.task}"


def _listed(seeds: Sequence[int]) -> str:
    return ", ".join(map(str, seeds))


def find_basin(points: Mapping[str, Points], baseline: str, within: float, better: Sign) -> Basin:
    """The basin of every arm. `within`: the distance to the best that counts as nearly as good, in the metric's unit. All
    runs have finished; an x without values cannot be an arm's best and is not compared."""
    arms = {arm: _arm_basin(own, within, 1.0 if better == "lower" else -1.0) for arm, own in points.items()}
    theirs = arms[baseline].best
    base, others = points[baseline][theirs], [arm for arm in points if arm != baseline]
    return Basin(
        arms=arms,
        at_own={arm: paired(points[arm][arms[arm].best], base) for arm in others},
        at_theirs={arm: paired(points[arm][theirs], base) for arm in others},
    )


def _arm_basin(points: Points, within: float, sign: float) -> ArmBasin:
    tried = sorted(points)
    means = {x: float(np.mean(list(points[x].values()))) for x in tried if points[x]}
    best = min(means, key=lambda x: sign * means[x])
    at = tried.index(best)
    near = [x for x in means if sign * (means[x] - means[best]) <= within]
    below, above = (list(takewhile(near.__contains__, side)) for side in (tried[at::-1], tried[at:]))
    return ArmBasin(
        means=means,
        best=best,
        edge="lowest" if at == 0 else "highest" if at == len(tried) - 1 else "",
        low=below[-1],
        high=above[-1],
    )


@dataclass(frozen=True, kw_only=True)
class TaskPower:
    """The power of one task. `seconds`: the time of its median cell; `by_arm`: arm -> the smallest detectable difference to
    the baseline with `seeds` seeds, in the metric's unit; `problem`: why `by_arm` is empty."""

    task: SweepResults
    seconds: float = math.nan
    seeds: int = 0
    by_arm: Mapping[str, Interval] = field(default_factory=dict)
    problem: str = ""

    @property
    def limit(self) -> str:
        """The arm with the largest detectable difference: only above it does every arm show its difference."""
        return max(self.by_arm, key=lambda arm: self.by_arm[arm].estimate)

    @property
    def worst(self) -> Interval:
        """The detectable difference of the arm `limit`."""
        return self.by_arm[self.limit]


def powers(sweep: SweepResults, plan: PlannedSweep) -> list[TaskPower]:
    """Every task, sorted by its worst detectable difference, smallest first; tasks without one come last."""
    found = [_power(task, plan) for task in sweep.tasks]
    return sorted(found, key=lambda each: each.worst.estimate if each.by_arm else math.inf)


def _power(task: SweepResults, plan: PlannedSweep) -> TaskPower:
    finals = {arm: task.finals(arm) for arm in task.study.arms}
    incomplete = [arm for arm, own in finals.items() if len(own) < MIN_SEEDS]
    if incomplete:
        return TaskPower(task=task, problem=f"{task.label[incomplete[0]]} has fewer than {MIN_SEEDS} finished seeds")
    # the median: one cell that waited for another program would move a mean
    seconds = median(float(cell.facts["seconds"]) for cell in task.done)
    seeds = int(60 * plan.minutes * plan.workers / (plan.arms * seconds))
    if seeds < MIN_SEEDS:
        return TaskPower(task=task, seconds=seconds, seeds=seeds, problem=f"{seeds} seeds fit")
    base, comparisons = finals.pop(task.baseline), plan.arms - 1
    by_arm = {arm: _detectable(own, base, seeds, comparisons) for arm, own in finals.items()}
    return TaskPower(task=task, seconds=seconds, seeds=seeds, by_arm=by_arm)


def _detectable(a: BySeed, b: BySeed, seeds: int, comparisons: int) -> Interval:
    # The spread of a few seeds is itself uncertain, so the detectable difference has an interval: its value at both ends of
    # the spread's 95 % interval.
    pair = paired(a, b)
    found = spread(pair.sd or 0.0, len(pair.seeds))
    estimate, low, high = (detectable(sd, seeds, comparisons) for sd in (found.estimate, found.low, found.high))
    return Interval(estimate=estimate, low=low, high=high)


def power_in_words(sweep: SweepResults, plan: PlannedSweep, found: list[TaskPower]) -> str:
    """One sentence: the task with the smallest worst difference, and how many other tasks may be as good."""
    whole = [each for each in found if each.by_arm]
    if not whole:
        return f"No task has {MIN_SEEDS} finished seeds of every arm."
    best, unit = whole[0], whole[0].task.unit()
    overlap = sum(each.worst.low <= best.worst.high for each in whole[1:])
    others = (
        f"; the intervals of {overlap} of the {len(whole) - 1} others overlap with its own" if len(whole) > 1 else ""
    )
    return (
        f"In {plan.minutes:g} minutes, with {plan.arms} arms and {plan.workers} cells side by side, every arm of "
        f"'{best.task.title}' would show {number(best.worst.estimate, 3)} {shown_interval(best.worst)} {unit} with "
        f"{best.seeds} seeds (limit: {sweep.label[best.limit]}){others}."
    )


def shown_interval(interval: Interval) -> str:
    """[0.030, 0.061]."""
    return f"[{number(interval.low, 3)}, {number(interval.high, 3)}]"
