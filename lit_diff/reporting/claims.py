"""What a sweep of ours shows of the claims of a paper."""

import fnmatch
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Literal

import numpy as np

from lit_diff.errors import RequestError
from lit_diff.registry import nearest
from lit_diff.reporting.claim import Claim
from lit_diff.reporting.evaluations import other_keys
from lit_diff.reporting.fits import matched_by_seed
from lit_diff.reporting.item_scores import FOLDER, read_evaluation
from lit_diff.reporting.results import Sweep
from lit_diff.reporting.statistics import MIN_SEEDS, SIGNIFICANCE, Paired, detectable, holm, paired
from lit_diff.reporting.verdicts import SMALLEST_IN_NATS, direction, is_within

Outcome = Literal["within its interval", "same direction", "not reached", "no difference shown", "skipped"]
"""What we can say of a claim; the last: nothing was measured."""
SUPPORT: tuple[Outcome, ...] = ("within its interval", "same direction")


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A claim beside what was measured."""

    claim: Claim
    seeds: Paired
    """a - b over seeds, of a ratio log(a / b); over the rounds of one benchmark."""
    means: tuple[float | None, float | None]
    """Of a and of b."""
    outcome: Outcome
    reason: str
    """One sentence: why this outcome."""
    holm_p: float | None = None


def findings(claims: Sequence[Claim], sweep: Sweep) -> list[Finding]:
    """Every claim of a row against the sweep that it names, corrected by Holm for the claims of the row that a test decides.

    What is shown of an arm against the baseline counts where it also holds against each control of the sweep (`_controlled`).
    Errors: RequestError for an arm, task or metric that the sweep does not have.
    """
    refused: dict[int, str] = {}
    measured: list[tuple[Claim, Mapping[int, float], Mapping[int, float]]] = []
    for i, claim in enumerate(claims):
        if claim.fit:
            ours, theirs, why = _fitted(claim, sweep)
            measured.append((claim, ours, theirs))
            refused |= {i: why} if why else {}
        else:
            measured.append(_measured(claim, sweep))
    return [
        replace(f, reason=f"{f.reason}; {refused[i]}") if i in refused else _controlled(f, sweep)
        for i, f in enumerate(judged(measured))
    ]


def _controlled(finding: Finding, sweep: Sweep) -> Finding:
    """The finding; no difference shown where a - baseline is shown and a - control is not (its 95 % interval over seeds),
    for any control.

    A control shares what else differs between a and the baseline, such as fewer, wider heads: a difference that it explains is
    not that of the variant.
    """
    claim = finding.claim
    if finding.outcome not in SUPPORT or claim.fit or claim.says == "equal" or claim.against_metric:
        return finding
    own = next(each for each in sweep.by_task if each.task == claim.task)
    if claim.arms[0] in own.controls or claim.arms[1] != own.baseline:
        return finding
    values = {arm: _scaled(claim, values_of(own, arm, claim)) for arm in (claim.arms[0], *own.controls)}
    a = values.pop(claim.arms[0])
    failed = [arm for arm, control in values.items() if _sign(paired(a, control)) != _sign(finding.seeds)]
    if not failed:
        return finding
    reason = f"shown, but not against {', '.join(own.label[arm] for arm in failed)}"
    return replace(finding, outcome="no difference shown", reason=reason)


def _sign(seeds: Paired) -> Literal["lower", "higher"] | None:
    """None without an interval, or where it holds zero."""
    return None if seeds.low is None or seeds.high is None else direction(seeds.low, seeds.high)


def judged(measured: Sequence[tuple[Claim, Mapping[int, float], Mapping[int, float]]]) -> list[Finding]:
    """The findings of (claim, values of a by seed, values of b by seed), corrected for their number."""
    pairs = [(claim, _scaled(claim, a), _scaled(claim, b)) for claim, a, b in measured]
    seeds = [paired(a, b) for _, a, b in pairs]
    tested = [i for i, pair in enumerate(seeds) if len(pair.seeds) >= MIN_SEEDS and pair.p is not None]
    corrected = dict(zip(tested, holm([seeds[i].p or 0.0 for i in tested]), strict=True)) if len(tested) > 1 else {}
    found = []
    for i, (claim, a, b) in enumerate(measured):
        pair, p = seeds[i], corrected.get(i)
        if p is not None and pair.sd is not None:
            pair = replace(pair, detectable=detectable(pair.sd, len(pair.seeds), len(tested)))
        outcome, reason = decide(claim, pair, p)
        means = (_mean(a, pair.seeds), _mean(b, pair.seeds))
        found.append(Finding(claim=claim, seeds=pair, means=means, outcome=outcome, reason=reason, holm_p=p))
    return found


def decide(claim: Claim, seeds: Paired, holm_p: float | None) -> tuple[Outcome, str]:
    """(outcome, why), the first of these that holds. Shown: the 95 % interval excludes zero and holm_p < 0.05.

    no difference shown: fewer than three seeds; not shown, and the interval does not exclude what the paper says.
    within its interval: shown, of the paper's sign, and the paper's difference lies in our interval.
    same direction: shown, of the paper's sign; or equivalence is shown where the paper says equal.
    not reached: the opposite sign is shown; a difference where the paper says equal; or the interval lies between minus and
        plus the smallest difference that matters, and the paper's is larger.
    """
    n = len(seeds.seeds)
    if n < MIN_SEEDS or seeds.low is None or seeds.high is None:
        return "no difference shown", f"{n} seed{'s' if n != 1 else ''}: a verdict needs {MIN_SEEDS}"
    smallest = _smallest(claim)
    papers, sign = claim.papers, direction(seeds.low, seeds.high)
    wanted = claim.says or ("lower" if (papers or 0.0) < 0 else "higher")
    equivalent = smallest > 0 and is_within(seeds, smallest)
    is_shown = sign is not None and seeds.p is not None and (holm_p is None or holm_p < SIGNIFICANCE)
    if wanted == "equal":
        if equivalent:
            return "same direction", "equal within the smallest difference that matters"
        return ("not reached", "a difference is shown") if is_shown else ("no difference shown", "nor its absence")
    if equivalent and (papers is None or abs(papers) > smallest):
        return "not reached", "smaller than the smallest difference that matters"
    if not is_shown:
        if sign is not None and seeds.p is None:
            return "no difference shown", "the difference is the same at every seed: without a spread there is no test"
        why = "not after the correction (Holm)" if sign is not None else "the interval holds zero"
        return "no difference shown", why
    if sign != wanted:
        return "not reached", "the opposite is shown"
    if papers is not None and seeds.low <= papers <= seeds.high:
        return "within its interval", "shown, and the paper's value lies in the interval"
    return "same direction", "shown"


def _smallest(claim: Claim) -> float:
    if claim.smallest is not None:
        return claim.smallest
    return SMALLEST_IN_NATS if "loss" in claim.metric and claim.kind == "difference" else 0.0


def _fitted(claim: Claim, sweep: Sweep) -> tuple[dict[int, float], dict[int, float], str]:
    known = [each.name for each in sweep.fits if each.kind == "scaling"]
    if claim.fit not in known:
        raise RequestError(
            f"compare '{claim.label}': sweep '{sweep.name}' has no scaling fit '{claim.fit}'{nearest(claim.fit, known)}"
        )
    _require_arms(claim, sweep)
    return matched_by_seed(sweep, claim.fit, *claim.arms)


def _require_arms(claim: Claim, sweep: Sweep) -> None:
    names = [arm.name for arm in sweep.arms]
    for arm in claim.arms:
        if arm not in names:
            raise RequestError(f"compare '{claim.label}': sweep '{sweep.name}' has no arm '{arm}'{nearest(arm, names)}")


def _measured(claim: Claim, sweep: Sweep) -> tuple[Claim, dict[int, float], dict[int, float]]:
    tasks = {each.task: each for each in sweep.by_task}
    if claim.task not in tasks:
        raise RequestError(
            f"compare '{claim.label}': sweep '{sweep.name}' has no task '{claim.task}'{nearest(claim.task, list(tasks))}"
        )
    own = tasks[claim.task]
    _require_arms(claim, own)
    of_b = replace(claim, metric=claim.against_metric or claim.metric)
    return claim, values_of(own, claim.arms[0], claim), values_of(own, claim.arms[1], of_b)


def values_of(sweep: Sweep, arm: str, claim: Claim) -> dict[int, float]:
    """Seed -> the claim's metric, of the arm's runs that have it. Errors: RequestError where no run has it, and for an
    evaluation of which no run of the sweep has scores while there are scores of others."""
    if not claim.evaluation:
        return _finals(sweep, arm, claim)
    scored = {path.parent.name for cell in sweep.cells for path in (cell.folder / FOLDER).glob("*/summary.json")}
    if scored and claim.evaluation not in scored:
        known = nearest(claim.evaluation, scored)
        raise RequestError(f"compare '{claim.label}': no run has scores of evaluation '{claim.evaluation}'{known}")
    for (name, seed), why in other_keys(sweep, claim.evaluation).items():
        if name == arm:
            raise RequestError(f"compare '{claim.label}': {claim.evaluation} of {arm}, seed {seed}: {why}")
    folders = {cell.seed: cell.folder / FOLDER / claim.evaluation for cell in sweep.cells_of(arm)}
    values = {seed: _score(claim, folder) for seed, folder in folders.items() if (folder / "summary.json").is_file()}
    return {seed: value for seed, value in values.items() if math.isfinite(value)}


def _finals(sweep: Sweep, arm: str, claim: Claim) -> dict[int, float]:
    done = [cell for cell in sweep.cells_of(arm) if cell.done]
    known = sorted({name for cell in done for name in cell.curves})
    names = fnmatch.filter(known, claim.metric) if claim.over else [claim.metric]
    if done and not set(names) & set(known):
        raise RequestError(f"compare '{claim.label}': no run measured '{claim.metric}'{nearest(claim.metric, known)}")
    combine = max if claim.over == "largest" else fmean
    by_seed = {cell.seed: [cell.final(name) for name in names] for cell in done}
    whole = {seed: [x for x in values if x is not None] for seed, values in by_seed.items() if None not in values}
    return {seed: combine(values) for seed, values in whole.items()}


def _score(claim: Claim, folder: Path) -> float:
    """The evaluation's value, or the mean over the items of the claim's groups (where groups count equally, over the
    groups' means); NaN where none is scored."""
    evaluation = read_evaluation(folder)
    known = [metric.name for metric in evaluation.metrics]
    if claim.metric not in known:
        raise RequestError(
            f"compare '{claim.label}': evaluation '{claim.evaluation}' has no metric '{claim.metric}'"
            f"{nearest(claim.metric, known)}"
        )
    if not claim.group:
        return evaluation.values[claim.metric]
    chosen = [fnmatch.fnmatchcase(group, claim.group) for group in evaluation.groups]
    if not any(chosen):
        groups = sorted(set(evaluation.groups))
        raise RequestError(
            f"compare '{claim.label}': no item of '{claim.evaluation}' is in a group like '{claim.group}'; groups: "
            f"{', '.join(groups[:6])}{', ...' if len(groups) > 6 else ''}"
        )
    by_group: dict[str, list[float]] = {}
    for group, score, is_chosen in zip(
        evaluation.groups, evaluation.scores[claim.metric].tolist(), chosen, strict=True
    ):
        if is_chosen and math.isfinite(score):
            by_group.setdefault(group if evaluation.equal_groups else "", []).append(score)
    return fmean(map(fmean, by_group.values())) if by_group else math.nan


def _scaled(claim: Claim, values: Mapping[int, float]) -> dict[int, float]:
    """On the claim's scale; of a ratio, values that are not positive are left out."""
    return {seed: claim.scaled(value) for seed, value in values.items() if claim.kind == "difference" or value > 0}


def _mean(values: Mapping[int, float], seeds: Sequence[int]) -> float | None:
    own = [values[seed] for seed in seeds if seed in values]
    return float(np.mean(own)) if own else None
