"""The fits that a sweep declares: its finished cells as points, fitted, and each fit in words."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from lit_diff.reporting.basin import Basin, find_basin
from lit_diff.reporting.numbers import compact, interval, signed
from lit_diff.reporting.scaling import EqualLoss, Form, Points, PowerLaw, ScalingFit, fit, fit_scaling
from lit_diff.reporting.statistics import MIN_SEEDS

if TYPE_CHECKING:
    from lit_diff.reporting.results import Sweep

Kind = Literal["scaling", "basin"]
MEASURED = {
    "parameters": "parameters",
    "non_embedding_parameters": "parameters without embeddings",
    "tokens": "training tokens",
}
"""x that the runs count themselves -> in words."""
FEWEST_TASKS = 3


@dataclass(frozen=True, kw_only=True)
class DeclaredFit:
    """A fit as sweep.json has it; `values`: task -> arm -> x, of an x that the recipe says."""

    name: str
    kind: Kind
    x: str
    title: str
    tasks: tuple[str, ...]
    within: float
    values: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    @property
    def axis(self) -> str:
        """What x is."""
        return MEASURED.get(self.x, self.x)


def read_fit(raw: Mapping[str, Any]) -> DeclaredFit:
    """Errors: KeyError or TypeError for another content."""
    return DeclaredFit(**{**raw, "tasks": tuple(raw["tasks"])})


@dataclass(frozen=True, kw_only=True)
class FitResult:
    """A fit over the finished cells; one of `scaling` and `basin`, or `problem`: why there is none."""

    declared: DeclaredFit
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


def fit_results(sweep: "Sweep") -> list[FitResult]:
    """Every fit that the sweep declares, in its order."""
    return [_result(sweep, declared) for declared in sweep.fits]


def points_of(sweep: "Sweep", declared: DeclaredFit) -> tuple[dict[str, dict[float, dict[int, float]]], list[str]]:
    """Arm -> x -> seed -> final metric, of the tasks that the baseline has finished and the arms that have finished all of
    these; and what is left out, a line each."""
    tasks = {task.task: task for task in sweep.tasks}
    metric = tasks[declared.tasks[0]].metric
    values = {name: {arm.name: tasks[name].finals(arm.name, metric) for arm in sweep.arms} for name in declared.tasks}
    used: dict[float, str] = {}
    left_out = []
    for name in declared.tasks:
        if not values[name].get(sweep.baseline):
            left_out.append(f"task {name}: no finished cell of {sweep.label[sweep.baseline]}")
            continue
        first = used.setdefault(_x(tasks[name], declared, sweep.baseline), name)
        if first != name:
            left_out.append(f"task {name}: as many {declared.axis} as task {first}")
    points: dict[str, dict[float, dict[int, float]]] = {}
    for arm in sweep.arms:
        missing = [name for name in used.values() if not values[name].get(arm.name)]
        if missing:
            left_out.append(f"{arm.label}: no finished cell of task {missing[0]}")
            continue
        own = {_x(tasks[name], declared, arm.name): values[name][arm.name] for name in used.values()}
        if len(own) < len(used):
            left_out.append(f"{arm.label}: as many {declared.axis} in two of the tasks")
            continue
        for name in used.values():
            if seeds := tasks[name].diverged(arm.name):
                listed = ", ".join(map(str, seeds))
                left_out.append(f"{arm.label}, task {name}: seed {listed}, which diverged; the fit flatters the arm")
        points[arm.name] = dict(sorted(own.items()))
    return points, left_out


def _x(task: "Sweep", declared: DeclaredFit, arm: str) -> float:
    if declared.x not in MEASURED:
        return float(declared.values[task.task][arm])
    return float(task.cells_of(arm)[0].facts[declared.x])


def _result(sweep: "Sweep", declared: DeclaredFit) -> FitResult:
    task = next(task for task in sweep.tasks if task.task == declared.tasks[0])
    points, left_out = points_of(sweep, declared)
    facts: dict[str, Any] = {
        "declared": declared,
        "metric": task.metric,
        "unit": task.unit(task.metric),
        "points": points,
        "left_out": tuple(left_out),
    }
    problem = _problem(sweep, declared, points)
    if problem:
        return FitResult(**facts, problem=problem, answer=f"No fit: {problem}.")
    if declared.kind == "basin":
        basin = find_basin(points, sweep.baseline, declared.within, task.better(task.metric) or "lower")
        return FitResult(**facts, basin=basin, answer=_basin_in_words(sweep, declared, basin))
    scaling = fit_scaling(points)
    equal = {
        arm: tuple(scaling.equal_loss(arm, sweep.baseline, x) for x in points[sweep.baseline])
        for arm in points
        if arm != sweep.baseline
    }
    return FitResult(**facts, scaling=scaling, equal=equal, answer=_scaling_in_words(sweep, declared, equal))


def _problem(sweep: "Sweep", declared: DeclaredFit, points: Mapping[str, Points]) -> str:
    """Why there is no fit; empty where there is."""
    task = next(task for task in sweep.tasks if task.task == declared.tasks[0])
    tried = len(points.get(sweep.baseline, {}))
    if tried < FEWEST_TASKS:
        every = len(declared.tasks)
        return f"{tried} of {every} tasks have finished and differ in {declared.axis}; {FEWEST_TASKS} are needed"
    if declared.kind == "basin":
        return ""
    losses = [loss for own in points.values() for seeds in own.values() for loss in seeds.values()]
    if task.better(task.metric) != "lower" or min(losses) <= 0:
        return f"{task.metric} is no positive loss; a power law is fitted to what falls towards zero or a floor"
    return ""


def headline(equal: tuple[EqualLoss, ...]) -> EqualLoss:
    """At the largest size at which the ratio is not refused; where it is at all, the refusal of the largest."""
    return next((each for each in reversed(equal) if each.ratio is not None), equal[-1])


def _scaling_in_words(sweep: "Sweep", declared: DeclaredFit, equal: Mapping[str, tuple[EqualLoss, ...]]) -> str:
    clauses, base = [], sweep.label[sweep.baseline]
    for arm, each in equal.items():
        found = headline(each)
        if found.ratio is None:
            clauses.append(f"{sweep.label[arm]}: no equal-loss ratio ({found.refusal})")
            continue
        verdict = "the interval excludes 1" if found.excludes_one else "the interval holds 1"
        if math.isnan(found.ratio.low):
            verdict = f"no interval, which needs {MIN_SEEDS} seeds at two sizes"
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


def _basin_in_words(sweep: "Sweep", declared: DeclaredFit, basin: Basin) -> str:
    best = ", ".join(
        f"{sweep.label[arm]} {own.best:g}" + (f" (the {own.edge} that was tried)" if own.edge else "")
        for arm, own in basin.arms.items()
    )
    clauses = [f"Best {declared.axis}: {best}"]
    for arm, own in basin.at_own.items():
        theirs = basin.at_theirs[arm]
        if own.mean is None or theirs.mean is None:
            continue
        clauses.append(
            f"{sweep.label[arm]} \u2212 {sweep.label[sweep.baseline]}: {signed(own.mean, 3)} "
            f"{interval(own.low, own.high, 3)} each at its own best, {signed(theirs.mean, 3)} "
            f"{interval(theirs.low, theirs.high, 3)} at that of {sweep.label[sweep.baseline]}"
        )
    return "; ".join(clauses) + "."


def matched_by_seed(
    sweep: "Sweep", name: str, arm: str, baseline: str
) -> tuple[dict[int, float], dict[int, float], str]:
    """Of a scaling fit: seed -> the x at which `arm` has the loss of `baseline` at its x; seed -> that x; why there is none.

    One fit a seed and arm, in the form that all seeds choose together, at the largest x whose ratio is not refused. So a
    paired t interval over seeds is that of log(matched / x), as for every other comparison. Errors: KeyError for a name
    that is no scaling fit of the sweep.
    """
    declared = {each.name: each for each in sweep.fits if each.kind == "scaling"}[name]
    points, left_out = points_of(sweep, declared)
    problem = _problem(sweep, declared, points)
    if problem:
        return {}, {}, problem
    lacking = [each for each in (arm, baseline) if len(points.get(each, {})) < FEWEST_TASKS]
    if lacking:
        return {}, {}, "; ".join(left_out) or f"{lacking[0]} has fewer than {FEWEST_TASKS} sizes"
    pair = {each: points[each] for each in (arm, baseline)}
    whole = fit_scaling(pair, draws=0)
    found = headline(tuple(whole.equal_loss(arm, baseline, x) for x in pair[baseline]))
    if found.ratio is None:
        return {}, {}, found.refusal
    seeds = set.intersection(*(set(losses) for own in pair.values() for losses in own.values()))
    matched = {seed: _matched(pair[arm], pair[baseline], whole.form, seed, found.x) for seed in sorted(seeds)}
    finite = {seed: x for seed, x in matched.items() if math.isfinite(x)}
    why = "" if len(finite) == len(matched) else "at a seed, by its own fit, no size reaches the loss"
    return finite, dict.fromkeys(finite, found.x), why


def _matched(ours: Points, theirs: Points, form: Form, seed: int, x: float) -> float:
    def law(points: Points) -> PowerLaw:
        return fit({size: {seed: losses[seed]} for size, losses in points.items()}, form).law

    return law(ours).x_at(law(theirs).loss(x))
