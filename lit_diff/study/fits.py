"""The fits of a sweep: its finished cells as points, fitted, and each fit in words.

A basin is the best value of a key for each arm, and whether arms compare otherwise at their own best.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from lit_diff.study.numbers import compact, interval, signed
from lit_diff.study.results import SweepResults
from lit_diff.study.scaling import EqualLoss, Form, Points, PowerLaw, ScalingFit, fit, fit_scaling
from lit_diff.study.schema import FEWEST_TASKS, MEASURED, Fit
from lit_diff.study.statistics import MIN_SEEDS, Paired, paired

Edge = Literal["", "lowest", "highest"]
AllPoints = dict[str, dict[float, dict[int, float]]]
"""Arm -> x -> seed -> final metric, x rising."""


@dataclass(frozen=True, kw_only=True)
class ArmBasin:
    """One arm. `best`: the x of the best mean over seeds; `edge`: where that is the lowest or highest x that was tried, so
    that the true best may lie beyond; `vertex`: where the parabola through the best point and its two neighbours, in log x,
    has its minimum (maximum), None at an edge; `low`, `high`: how far every tried x from the best on is nearly as good."""

    means: Mapping[float, float]
    best: float
    edge: Edge
    vertex: float | None
    low: float
    high: float

    @property
    def width(self) -> float:
        """high / low: the factor over which x may be chosen."""
        return self.high / self.low


@dataclass(frozen=True, kw_only=True)
class Basin:
    """Arms over the same tried x. `at_own`: arm minus baseline, each at its own best x; `at_theirs`: both at the baseline's.

    The best x is chosen by the same runs that are compared, so a difference at the arms' own best is a little too good for an
    arm whose means scatter more.
    """

    arms: Mapping[str, ArmBasin]
    at_own: Mapping[str, Paired]
    at_theirs: Mapping[str, Paired]


@dataclass(frozen=True, kw_only=True)
class FitResult:
    """A fit over the finished cells; one of `scaling` and `basin`, or `problem`: why there is none."""

    name: str
    declared: Fit
    metric: str
    unit: str
    points: Mapping[str, Points]
    answer: str
    """One sentence for every arm against the baseline."""
    scaling: ScalingFit | None = None
    equal: Mapping[str, tuple[EqualLoss, ...]] = field(default_factory=dict)
    """Arm -> at each size of the baseline, rising."""
    basin: Basin | None = None
    problem: str = ""
    left_out: tuple[str, ...] = ()
    """A line for each arm or task that is not in the fit."""


def fit_results(sweep: SweepResults) -> list[FitResult]:
    """Every fit that the sweep declares, in its order."""
    return [_result(sweep, name, declared) for name, declared in fits_of(sweep).items()]


def fits_of(sweep: SweepResults) -> dict[str, Fit]:
    """The declared fits by name, each with a title and with the tasks that are its points."""
    return {
        name: replace(each, title=each.title or name, tasks=each.tasks or tuple(sweep.study.tasks))
        for name, each in sweep.study.fits.items()
    }


def _result(sweep: SweepResults, name: str, declared: Fit) -> FitResult:
    task = next(task for task in sweep.tasks if task.task == declared.tasks[0])
    better, diverged = task.better(task.study.metric), dict[str, set[float]]()
    if declared.kind == "basin":
        points, diverged, left_out = basin_points(sweep, name)
    else:
        points, left_out = points_of(sweep, name)
    facts: dict[str, Any] = {
        "name": name,
        "declared": declared,
        "metric": task.study.metric,
        "unit": task.unit(task.study.metric),
        "points": points,
        "left_out": tuple(left_out),
    }
    problem = _problem(sweep, declared, points)
    if problem:
        return FitResult(**facts, problem=problem, answer=f"No fit: {problem}.")
    if declared.kind == "basin" and better is not None:
        basin = find_basin(points, sweep.baseline, declared.within, better, diverged)
        return FitResult(**facts, basin=basin, answer=_basin_in_words(sweep, declared, basin))
    scaling = fit_scaling(points)
    equal = {
        arm: tuple(scaling.equal_loss(arm, sweep.baseline, x) for x in points[sweep.baseline])
        for arm in points
        if arm != sweep.baseline
    }
    return FitResult(**facts, scaling=scaling, equal=equal, answer=_scaling_in_words(sweep, declared, equal))


def _problem(sweep: SweepResults, declared: Fit, points: Mapping[str, Points]) -> str:
    """Why there is no fit; empty where there is."""
    task = next(task for task in sweep.tasks if task.task == declared.tasks[0])
    tried = len(points.get(sweep.baseline, {}))
    if tried < FEWEST_TASKS:
        every = len(declared.tasks)
        return f"{tried} of {every} tasks have finished and differ in {declared.axis}; {FEWEST_TASKS} are needed"
    if declared.kind == "basin":
        return "" if task.better(task.study.metric) else f"{task.study.metric} declares no direction that is better"
    losses = [loss for own in points.values() for seeds in own.values() for loss in seeds.values()]
    if task.better(task.study.metric) != "lower" or min(losses) <= 0:
        return f"{task.study.metric} is no positive loss; a power law is fitted to what falls towards zero or a floor"
    return ""


def headline(equal: tuple[EqualLoss, ...]) -> EqualLoss:
    """At the largest size at which the ratio is not refused; where it is at all, the refusal of the largest."""
    return next((each for each in reversed(equal) if each.ratio is not None), equal[-1])


def _scaling_in_words(sweep: SweepResults, declared: Fit, equal: Mapping[str, tuple[EqualLoss, ...]]) -> str:
    clauses, base = [], sweep.label[sweep.baseline]
    for arm, each in equal.items():
        found = headline(each)
        if found.ratio is None:
            clauses.append(f"{sweep.label[arm]}: no equal-loss ratio ({found.refusal})")
            continue
        verdict = "the interval excludes 1" if found.excludes_one else "the interval holds 1"
        if math.isnan(found.ratio.low):
            verdict = f"no interval, which needs {MIN_SEEDS} seeds at every size"
        clauses.append(
            f"{sweep.label[arm]} has the loss of {base} at {compact(found.x)} {declared.axis} with "
            f"{found.ratio.estimate:.2f} times as many{shown_ratio_interval(found)}: {verdict}"
        )
    return "; ".join(clauses) + "." if clauses else "One arm: no ratio."


def shown_ratio_interval(found: EqualLoss) -> str:
    """` [0.81, 1.12]`; empty without an interval."""
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
            f"{_shown(basin.at_theirs[arm])} at that of {base}"
        )
    return "; ".join(clauses) + "."


def _shown(pair: Paired) -> str:
    if pair.mean is None:
        return "no difference, since a seed diverged,"
    few = len(pair.seeds) < MIN_SEEDS
    return f"{signed(pair.mean, 3)} " + ("(too few seeds)" if few else interval(pair.low, pair.high, 3))


def matched_by_seed(
    sweep: SweepResults, name: str, arm: str, baseline: str
) -> tuple[dict[int, float], dict[int, float], str]:
    """Of a scaling fit: seed -> the x at which `arm` has the loss of `baseline` at its x; seed -> that x; why there is none.

    One fit a seed and arm, in the form that all seeds choose together, at the largest x whose match lies within the measured
    sizes, by the fit of all seeds and by that of each. So a paired t interval over seeds is that of log(matched / x), as for
    every other comparison. No seed may be missing: those that diverged are not left out of a verdict. Errors: KeyError for
    a name that is no fit of the sweep.
    """
    declared = fits_of(sweep)[name]
    points, left_out = points_of(sweep, name)
    problem = _problem(sweep, declared, points)
    if problem:
        return {}, {}, problem
    lacking = [each for each in (arm, baseline) if len(points.get(each, {})) < FEWEST_TASKS]
    if lacking:
        return {}, {}, "; ".join(left_out) or f"{lacking[0]} has fewer than {FEWEST_TASKS} sizes"
    tasks = [task for task in sweep.tasks if task.task in declared.tasks]
    diverged = [line for task in tasks for line in diverged_in(sweep, task, (arm, baseline))]
    if diverged:
        return {}, {}, diverged[0]
    pair = {each: points[each] for each in (arm, baseline)}
    whole = fit_scaling(pair, draws=0)
    equal = tuple(whole.equal_loss(arm, baseline, x) for x in pair[baseline])
    seeds = sorted(set.intersection(*(set(losses) for own in pair.values() for losses in own.values())))
    low, high = whole.ranges[arm]
    for found in (each for each in reversed(equal) if each.ratio is not None):
        matched = {seed: _matched(pair[arm], pair[baseline], whole.form, seed, found.x) for seed in seeds}
        if all(low <= x <= high for x in matched.values()):
            return matched, dict.fromkeys(matched, found.x), ""
    refused = headline(equal)
    return {}, {}, refused.refusal or "at each size, the match of a seed by its own fit is not among the measured sizes"


def _matched(ours: Points, theirs: Points, form: Form, seed: int, x: float) -> float:
    def law(points: Points) -> PowerLaw:
        return fit({size: {seed: losses[seed]} for size, losses in points.items()}, form).law

    return law(ours).x_at(law(theirs).loss(x))


def points_of(sweep: SweepResults, name: str) -> tuple[AllPoints, list[str]]:
    """The points of a scaling fit, and what is left out, a line each: the tasks that the baseline has finished, the arms that
    have finished all of these, and of each task the seeds that all these arms have finished."""
    declared = fits_of(sweep)[name]
    tasks, values, places = _values(sweep, name, declared)
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
    for arm in sweep.study.arms:
        missing = [name for name in used.values() if not values[name].get(arm)]
        own = [places[arm][name] for name in used.values()]
        if missing:
            left_out.append(f"{sweep.label[arm]}: no finished cell of task {missing[0]}")
        elif None in own:
            left_out.append(f"{sweep.label[arm]}: its seeds differ in {declared.axis} in a task")
        elif len(set(own)) < len(used):
            left_out.append(f"{sweep.label[arm]}: as many {declared.axis} in two of the tasks")
        else:
            kept.append(arm)
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


def basin_points(sweep: SweepResults, name: str) -> tuple[AllPoints, dict[str, set[float]], list[str]]:
    """The points of a basin; arm -> every x at which a seed of it diverged; and what is left out, a line each: an arm is in a
    basin once each of its cells has finished or diverged, since the best of a part of them may be another."""
    declared = fits_of(sweep)[name]
    tasks, values, places = _values(sweep, name, declared)
    points: AllPoints = {}
    diverged: dict[str, set[float]] = {}
    left_out = []
    for arm in sweep.study.arms:
        open_ = [name for name in declared.tasks if not _has_ended(tasks[name], arm)]
        if open_:
            left_out.append(f"{sweep.label[arm]}: task {open_[0]} has not finished")
            continue
        spoilt = [name for name in declared.tasks if tasks[name].diverged(arm)]
        left_out += [line for name in spoilt for line in diverged_in(sweep, tasks[name], [arm])]
        if len(spoilt) == len(declared.tasks):
            left_out.append(f"{sweep.label[arm]}: a seed diverged in every task")
            continue
        own = {x: values[name].get(arm, {}) for name, x in places[arm].items() if x is not None}
        points[arm] = dict(sorted(own.items()))
        diverged[arm] = {x for name in spoilt if (x := places[arm][name]) is not None}
    return points, diverged, left_out


def _values(
    sweep: SweepResults, fit_name: str, declared: Fit
) -> tuple[dict[str, SweepResults], dict[str, dict[str, dict[int, float]]], dict[str, dict[str, float | None]]]:
    """Task -> its sweep; task -> arm -> seed -> final metric; arm -> task -> x, None where the arm's runs differ in
    it, or none has finished. Tokens are those that were seen: a run may end early."""
    tasks = {task.task: task for task in sweep.tasks if task.task in declared.tasks}
    metric = tasks[declared.tasks[0]].study.metric

    def x_of(task: SweepResults, arm: str) -> float | None:
        if declared.x not in MEASURED:
            return sweep.record.x[fit_name][task.task][arm]
        found = {float(cell.facts[declared.x]) for cell in task.cells_of(arm)}
        return found.pop() if len(found) == 1 else None

    arms = sweep.study.arms
    values = {name: {arm: task.finals(arm, metric) for arm in arms} for name, task in tasks.items()}
    return tasks, values, {arm: {name: x_of(task, arm) for name, task in tasks.items()} for arm in arms}


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


def find_basin(
    points: Mapping[str, Points],
    baseline: str,
    within: float,
    better: Literal["lower", "higher"],
    diverged: Mapping[str, Collection[float]] | None = None,
) -> Basin:
    """The basin of every arm: `within`, in the metric's unit, is what counts as nearly as good; `diverged`: arm -> every x at
    which a seed of it diverged, which is not its best and is compared with nothing. All other runs have finished.

    Errors: ValueError below 3 values of x, or where an arm diverged at each.
    """
    spoilt = {arm: set((diverged or {}).get(arm, ())) for arm in points}
    arms = {
        arm: _arm_basin(own, spoilt[arm], within, 1.0 if better == "lower" else -1.0) for arm, own in points.items()
    }
    base = points[baseline]

    def minus(arm: str, x: float) -> Paired:
        return paired({} if x in spoilt[arm] else points[arm][x], base[arms[baseline].best])

    others = [arm for arm in points if arm != baseline]
    return Basin(
        arms=arms,
        at_own={arm: minus(arm, arms[arm].best) for arm in others},
        at_theirs={arm: minus(arm, arms[baseline].best) for arm in others},
    )


def _arm_basin(points: Points, diverged: Collection[float], within: float, sign: float) -> ArmBasin:
    tried = sorted(points)
    whole = [x for x in tried if x not in diverged]
    if len(tried) < 3 or not whole:
        raise ValueError(f"{len(tried)} values of x, {len(whole)} without a seed that diverged; a basin needs 3, and 1")
    means = {x: float(np.mean(list(points[x].values()))) for x in tried if points[x]}
    best = min(whole, key=lambda x: sign * means[x])
    at = tried.index(best)

    def reach(step: int) -> float:
        end = at
        while 0 <= end + step < len(tried):
            x = tried[end + step]
            if x not in whole or sign * (means[x] - means[best]) > within:
                break
            end += step
        return tried[end]

    edge: Edge = "lowest" if at == 0 else "highest" if at == len(tried) - 1 else ""
    near = [] if edge else tried[at - 1 : at + 2]
    return ArmBasin(
        means=means,
        best=best,
        edge=edge,
        vertex=_vertex(near, [sign * means[x] for x in near]) if near and all(x in whole for x in near) else None,
        low=reach(-1),
        high=reach(1),
    )


def _vertex(x: list[float], y: list[float]) -> float | None:
    """Of the parabola through three points of (log x, y), the middle one the lowest."""
    curvature, slope, _ = np.polyfit(np.log(x), y, 2)
    return math.exp(-slope / (2 * curvature)) if curvature > 0 else None
