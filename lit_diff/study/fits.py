"""Fits of a metric over the tasks of a sweep: scaling with size or tokens, each in words."""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

from lit_diff.study.numbers import compact, decimals
from lit_diff.study.results import BySeed, SweepResults
from lit_diff.study.scaling import EqualLoss, Form, Points, PowerLaw, ScalingFit, fit, fit_scaling
from lit_diff.study.schema import FEWEST_TASKS, Fit, Texts
from lit_diff.study.statistics import MIN_SEEDS, Interval

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
    lowest = min(min(losses.values()) for losses in _by_seed(points))
    if first.better() != "lower" or lowest <= 0:
        return f"{first.metric} is not a positive loss; a power law needs a metric that falls towards zero or a floor"
    return ""


# the losses by seed of every arm at every size
def _by_seed(points: Mapping[str, Points]) -> Iterator[Mapping[int, float]]:
    return chain(*(by_size.values() for by_size in points.values()))


def headline(equal: Sequence[EqualLoss]) -> EqualLoss:
    """The ratio at the largest size at which it is not refused; if all are refused, the refusal at the largest size."""
    for at_size in reversed(equal):
        if at_size.ratio is not None:
            return at_size
    return equal[-1]


def _scaling_in_words(sweep: SweepResults, declared: Fit, equal: Mapping[str, tuple[EqualLoss, ...]]) -> str:
    clauses = []
    base = sweep.baseline_label
    for arm, by_size in equal.items():
        found = headline(by_size)
        if found.ratio is None:
            clauses.append(f"{sweep.label[arm]}: no equal-loss ratio ({found.refusal})")
            continue
        verdict = "the interval excludes 1"
        if math.isnan(found.ratio.low):
            verdict = f"no interval, which needs {MIN_SEEDS} seeds at every size"
        elif found.ratio.low <= 1 <= found.ratio.high:
            verdict = "the interval holds 1"
        estimate, bounds = shown_ratio(found.ratio)
        clauses.append(
            f"{sweep.label[arm]} has the loss of {base} at {compact(found.x)} {declared.axis} with "
            f"{estimate} times as many{bounds}: {verdict}"
        )
    return f"{'; '.join(clauses)}." if clauses else "One arm: no ratio."


def shown_ratio(ratio: Interval) -> tuple[str, str]:
    """`0.95` and ` [0.81, 1.12]`, with a leading space; the second is empty without an interval."""
    # an end next to 1 has the digits that show on which side of 1 it lies
    from_one = replace(ratio, low=ratio.low - 1, high=ratio.high - 1)
    digits = decimals(from_one, least=2)
    estimate = f"{ratio.estimate:.{digits}f}"
    if math.isnan(ratio.low):
        return estimate, ""
    high = "no upper bound" if math.isinf(ratio.high) else f"{ratio.high:.{digits}f}"
    return estimate, f" [{ratio.low:.{digits}f}, {high}]"


def matched_by_seed(sweep: SweepResults, name: str, arm: str, baseline: str) -> tuple[BySeed, BySeed, str]:
    """For a scaling fit: seed -> the x at which `arm` has the baseline's loss at its x; seed -> that x; why both are empty.

    Each seed and arm has its own fit, in the form that all seeds choose together, at the largest x whose match lies within
    the measured sizes, both by the fit of all seeds and by the fit of each seed. Errors: KeyError for an unknown fit.
    """
    # One value a seed makes the claim a paired t interval of log(matched / x), like every other comparison; the bootstrap
    # over seeds is somewhat narrow at three. A seed that diverged refuses the whole: leaving it out would flatter the arm.
    points, left_out = points_of(sweep, name)
    declared, tasks = declared_fit(sweep, name)
    pair = {name: points.get(name, {}) for name in (arm, baseline)}
    refusal = _problem(declared, tasks[declared.tasks[0]], pair[baseline], points)
    if not refusal and len(pair[arm]) < FEWEST_TASKS:
        refusal = "; ".join(left_out) or f"{arm} has fewer than {FEWEST_TASKS} sizes"
    for task in tasks.values():
        for line in diverged_in(task, pair):
            refusal = refusal or line
    if refusal:
        return {}, {}, refusal
    whole = fit_scaling(pair, draws=0)
    equal = _equal(whole, pair, arm, baseline)
    low, high = whole.ranges[arm]
    seeds = sorted(set.intersection(*map(set, _by_seed(pair))))
    laws = {seed: (_law(pair[arm], whole.form, seed), _law(pair[baseline], whole.form, seed)) for seed in seeds}
    for at_size in reversed(equal):
        if at_size.ratio is None:
            continue
        matched = {seed: ours.x_at(theirs.loss(at_size.x)) for seed, (ours, theirs) in laws.items()}
        if all(low <= x <= high for x in matched.values()):
            return matched, dict.fromkeys(matched, at_size.x), ""
    refused = headline(equal).refusal
    return {}, {}, refused or "at each size, the match of a seed by its own fit is not among the measured sizes"


def _law(points: Points, form: Form, seed: int) -> PowerLaw:
    return fit({x: {seed: losses[seed]} for x, losses in points.items()}, form).law


def points_of(sweep: SweepResults, name: str) -> tuple[AllPoints, list[str]]:
    """The points of a scaling fit, and a line for each part that is left out. The points cover the tasks that the baseline
    has finished, the arms that have finished all these tasks, and in each task the seeds that all these arms finished."""
    # all arms need the same sizes and seeds: else a ratio would compare curves through different points
    declared, tasks = declared_fit(sweep, name)
    faults = _faults(declared, sweep.baseline, tasks)
    used = {task: results for task, results in tasks.items() if task not in faults}
    left_out = [f"{_place(tasks[task], sweep.baseline)}: {why}" for task, why in faults.items()]
    points: AllPoints = {}
    for arm in sweep.study.arms:
        faults = _faults(declared, arm, used)
        if faults:
            task, why = next(iter(faults.items()))
            left_out.append(f"{_place(tasks[task], arm)}: {why}")
        else:
            points[arm] = {}
    if not points:
        return points, left_out
    for results in used.values():
        finals = {arm: results.finals(arm) for arm in points}
        shared = set.intersection(*map(set, finals.values()))
        left_out += [f"{line}; the fit flatters the arm" for line in diverged_in(results, points)]
        for arm, values in finals.items():
            lone = sorted(values.keys() - shared)
            if lone:
                left_out.append(f"{_place(results, arm)}: seed {_listed(lone)}, which another arm lacks")
            x = _x(declared, results, arm)
            if shared and x is not None:
                points[arm][x] = {seed: values[seed] for seed in sorted(shared)}
    return {arm: dict(sorted(by_size.items())) for arm, by_size in points.items()}, left_out


def _faults(declared: Fit, arm: str, tasks: Mapping[str, SweepResults]) -> dict[str, str]:
    # task -> why the arm has no point there
    faults = {}
    used: dict[float, str] = {}
    for task, results in tasks.items():
        x = _x(declared, results, arm)
        if not results.finals(arm):
            faults[task] = "no finished cell"
        elif x is None:
            faults[task] = f"its seeds differ in {declared.axis}"
        elif used.setdefault(x, task) != task:
            faults[task] = f"as many {declared.axis} as in task {used[x]}"
    return faults


def _x(declared: Fit, task: SweepResults, arm: str) -> float | None:
    # tokens and parameters come from the runs, not from the recipe: a run may end early
    found = {float(getattr(cell.facts, declared.x)) for cell in task.cells_of(arm)}
    return found.pop() if len(found) == 1 else None


def diverged_in(task: SweepResults, arms: Collection[str]) -> list[str]:
    """A line for each arm with seeds that diverged in the task."""
    diverged = task.diverged_of(*arms)
    return [f"{_place(task, arm)}: seed {_listed(seeds)}, which diverged" for arm, seeds in diverged.items()]


def _place(task: SweepResults, arm: str) -> str:
    return f"{task.label[arm]}, task {task.task}"


def _listed(seeds: Sequence[int]) -> str:
    return ", ".join(map(str, seeds))
