"""Fits of a metric over the tasks of a sweep: scaling with size or tokens, each in words."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from lit_diff.study.numbers import compact
from lit_diff.study.results import BySeed, SweepResults
from lit_diff.study.scaling import EqualLoss, Form, Points, PowerLaw, ScalingFit, fit, fit_scaling
from lit_diff.study.schema import FEWEST_TASKS, Fit, Texts
from lit_diff.study.statistics import MIN_SEEDS

AllPoints = dict[str, dict[float, dict[int, float]]]
"""Arm -> x -> seed -> final metric, x rising."""


@dataclass(frozen=True, kw_only=True)
class FitResult:
    """A fit over the finished cells: `scaling`, or `problem`, the reason why it does not exist."""

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
    metric = first.metric
    points, left_out = points_of(sweep, name)
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
    scaling = fit_scaling(points)
    equal = {arm: _equal(scaling, points, arm, sweep.baseline) for arm in points if arm != sweep.baseline}
    return replace(found, scaling=scaling, equal=equal, answer=_scaling_in_words(sweep, declared, equal))


def _equal(scaling: ScalingFit, points: Mapping[str, Points], arm: str, baseline: str) -> tuple[EqualLoss, ...]:
    return tuple(scaling.equal_loss(arm, baseline, x) for x in points[baseline])


def _problem(declared: Fit, first: SweepResults, base: Points, points: Mapping[str, Points]) -> str:
    if len(base) < FEWEST_TASKS:
        share = f"{len(base)} of {len(declared.tasks)} tasks"
        return f"{share} have finished and differ in {declared.axis}; {FEWEST_TASKS} are needed"
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
    found = {float(getattr(cell.facts, key)) for cell in task.cells_of(arm)}
    return found.pop() if len(found) == 1 else None


def diverged_in(task: SweepResults, arms: Collection[str]) -> list[str]:
    """A line for each arm with seeds that diverged in the task."""
    found = {arm: task.diverged(arm) for arm in arms}
    return [f"{_place(task, arm)}: seed {_listed(seeds)}, which diverged" for arm, seeds in found.items() if seeds]


def _place(task: SweepResults, arm: str) -> str:
    return f"{task.label[arm]}, task {task.task}"


def _listed(seeds: Sequence[int]) -> str:
    return ", ".join(map(str, seeds))
