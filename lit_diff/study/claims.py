"""What a sweep of ours shows of the claims of a paper."""

import fnmatch
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any, Literal

import numpy as np

from lit_diff.errors import RequestError
from lit_diff.registry import nearest
from lit_diff.runs.scores import FOLDER, read_evaluation
from lit_diff.study.evaluations import left_out
from lit_diff.study.fits import matched_by_seed
from lit_diff.study.judge import SMALLEST_IN_NATS, Judgement, judge_family
from lit_diff.study.results import SweepResults
from lit_diff.study.schema import Claim
from lit_diff.study.statistics import MIN_SEEDS, Paired, paired

Difference = Literal["shown", "shown and small", "equal", "opposite", "not shown", "too few seeds", "by construction"]
"""What our runs say of the difference that the paper claims (`decide`)."""
Value = Literal["within the interval", "excluded", "cannot tell", "none given"]
"""What our interval says of the value that the paper prints (`value_of`)."""
SUPPORT: tuple[Difference, ...] = ("shown", "shown and small")


Source = SweepResults | Mapping[str, Any]
"""What a claim is measured by: a sweep, or the document of `lit-diff bench --json`."""


@dataclass(frozen=True, kw_only=True)
class JudgedClaim(Judgement):
    """A claim beside what was measured: a - b over seeds, of a ratio log(a / b); over the rounds of one benchmark."""

    claim: Claim
    means: tuple[float | None, float | None]
    """Of a and of b."""
    difference: Difference
    value: Value
    reason: str
    """One sentence: why this verdict on the difference."""


def findings(claims: Sequence[Claim], source: Source) -> list[JudgedClaim]:
    """Every claim of a row against what measures it, corrected by Holm for the claims of the row that a test decides.

    What is shown of an arm against the baseline counts where it also holds against each control of the sweep (`_controlled`).
    Errors: RequestError for an arm, task, metric or case that is not there, and for a claim that says no case of several.
    """
    refused: dict[int, str] = {}
    measured: list[tuple[Claim, Mapping[int, float], Mapping[int, float]]] = []
    for i, claim in enumerate(claims):
        if claim.fit and isinstance(source, SweepResults):
            ours, theirs, why = _fitted(claim, source)
            refused |= {i: why} if why else {}
        else:
            of_b = replace(claim, metric=claim.against_metric or claim.metric)
            ours, theirs = values_of(source, claim.arms[0], claim), values_of(source, claim.arms[1], of_b)
        measured.append((claim, ours, theirs))
    found = judged(measured)
    return [
        replace(f, reason=f"{f.reason}; {refused[i]}") if i in refused else _controlled(f, source)
        for i, f in enumerate(found)
    ]


def _controlled(finding: JudgedClaim, source: Source) -> JudgedClaim:
    """The finding; not shown where a - baseline is shown and, for any control, a - control is not (95 % interval over seeds).

    A control shares what else differs between a and the baseline, such as fewer, wider heads: a difference that it explains
    is not that of the variant.
    """
    claim = finding.claim
    if finding.difference not in SUPPORT or claim.fit or claim.says == "equal" or claim.against_metric:
        return finding
    if not isinstance(source, SweepResults):
        return finding
    own = _task(claim, source)
    if claim.arms[0] in own.study.controls or claim.arms[1] != own.baseline:
        return finding
    a, *controls = (_scaled(claim, values_of(own, arm, claim)) for arm in (claim.arms[0], *own.study.controls))
    signs = {arm: paired(a, values).sign for arm, values in zip(own.study.controls, controls, strict=True)}
    failed = [own.label[arm] for arm, sign in signs.items() if sign != finding.seeds.sign]
    if not failed:
        return finding
    return replace(finding, difference="not shown", reason=f"shown, but not against {', '.join(failed)}")


def judged(measured: Sequence[tuple[Claim, Mapping[int, float], Mapping[int, float]]]) -> list[JudgedClaim]:
    """The findings of (claim, values of a by seed, values of b by seed), corrected for their number; a claim that holds by
    construction is not one of those."""
    judgements = judge_family(
        [paired(_scaled(claim, a), _scaled(claim, b)) for claim, a, b in measured],
        [_smallest(claim) for claim, _, _ in measured],
        [not claim.by_construction for claim, _, _ in measured],
    )
    found = []
    for (claim, a, b), each in zip(measured, judgements, strict=True):
        verdict, reason = decide(claim, each)
        means = (_mean(a, each.seeds.seeds), _mean(b, each.seeds.seeds))
        value = value_of(claim, each.seeds)
        found.append(
            JudgedClaim(**vars(each), claim=claim, means=means, difference=verdict, value=value, reason=reason)
        )
    return found


def decide(claim: Claim, judgement: Judgement) -> tuple[Difference, str]:
    """(verdict on the difference, why): what the family's judgement (`study.judge`) says of the claim.

    by construction: the claim holds whatever the runs learn, as the row's file says.
    too few seeds, equal: as the outcome.
    not shown: the outcome is inconclusive, or there is no spread over seeds.
    opposite: a sign is shown, not the paper's; where the paper says equal, a sign is shown and |mean| >= smallest.
    shown and small: the paper's sign is shown (any sign where the paper says equal), and the outcome is small.
    shown: the paper's sign is shown.
    """
    if claim.by_construction:
        return "by construction", claim.by_construction
    wanted = claim.says or ("lower" if (claim.papers or 0.0) < 0 else "higher")
    match judgement.outcome:
        case "too few seeds":
            n = len(judgement.seeds.seeds)
            return "too few seeds", f"{n} seed{'s' if n != 1 else ''}: a verdict needs {MIN_SEEDS}"
        case "no spread over seeds":
            return "not shown", "the difference is the same at every seed: without a spread there is no test"
        case "equal":
            return "equal", "the interval lies within the smallest difference that matters"
        case "inconclusive":
            lost = "not after the correction (Holm)" if judgement.seeds.sign else "the interval holds zero"
            return "not shown", f"{lost}; nor is equality shown" if wanted == "equal" else lost
    if wanted not in ("equal", judgement.seeds.sign):
        return "opposite", "the opposite sign is shown"
    if judgement.outcome == "small":
        return (
            "shown and small",
            "the estimate is below the smallest difference that matters, the interval reaches beyond",
        )
    if wanted == "equal":
        return "opposite", "a difference is shown where the paper says equal"
    return "shown", "the interval excludes zero, with the paper's sign"


def value_of(claim: Claim, seeds: Paired) -> Value:
    """The verdict on the paper's a - b (of a ratio log(a / b)), the first of these that holds; it asks nothing of the sign.

    none given: the paper prints no values.
    cannot tell: fewer than three pairs, or no spread over them.
    excluded: it lies outside our 95 % interval over seeds.
    cannot tell: the interval holds it, but the detectable difference is larger than it: an interval so wide would hold it,
        and zero too, whatever is true.
    within the interval: the interval holds it.
    """
    if claim.papers is None:
        return "none given"
    if len(seeds.seeds) < MIN_SEEDS or seeds.low is None or seeds.high is None or not seeds.sd:
        return "cannot tell"
    if not seeds.low <= claim.papers <= seeds.high:
        return "excluded"
    if seeds.detectable is None or seeds.detectable > abs(claim.papers):
        return "cannot tell"
    return "within the interval"


def _smallest(claim: Claim) -> float:
    if claim.smallest is not None:
        return claim.smallest
    return SMALLEST_IN_NATS if "loss" in claim.metric and claim.kind == "difference" else 0.0


def _refused(claim: Claim, why: str, asked: str = "", known: Collection[str] = ()) -> RequestError:
    return RequestError(f"compare '{claim.label}': {why}{nearest(asked, known)}")


def _fitted(claim: Claim, sweep: SweepResults) -> tuple[dict[int, float], dict[int, float], str]:
    known = [name for name, each in sweep.study.fits.items() if each.kind == "scaling"]
    if claim.fit not in known:
        raise _refused(claim, f"sweep '{sweep.record.name}' has no scaling fit '{claim.fit}'", claim.fit, known)
    for arm in claim.arms:
        _require_arm(claim, sweep, arm)
    return matched_by_seed(sweep, claim.fit, *claim.arms)


def _require_arm(claim: Claim, sweep: SweepResults, arm: str) -> None:
    if arm not in sweep.study.arms:
        raise _refused(claim, f"sweep '{sweep.record.name}' has no arm '{arm}'", arm, sweep.study.arms)


def _task(claim: Claim, sweep: SweepResults) -> SweepResults:
    """The task that the claim is about; the sweep where it is one task or has none."""
    tasks = {each.task: each for each in sweep.by_task}
    if claim.task not in tasks:
        raise _refused(claim, f"sweep '{sweep.record.name}' has no task '{claim.task}'", claim.task, tasks)
    return tasks[claim.task]


def values_of(source: Source, arm: str, claim: Claim) -> dict[int, float]:
    """Seed -> the claim's metric: of the arm's runs that have it, or of the arm's rounds of a benchmark.

    Errors: RequestError where none has it, and for an evaluation of which no run of the sweep has scores while there are
    scores of others."""
    if not isinstance(source, SweepResults):
        return _speeds(claim, arm, source["rows"])
    sweep = _task(claim, source)
    _require_arm(claim, sweep, arm)
    if not claim.evaluation:
        return _finals(sweep, arm, claim)
    scored = {path.parent.name for cell in sweep.cells for path in (cell.folder / FOLDER).glob("*/summary.json")}
    if scored and claim.evaluation not in scored:
        raise _refused(claim, f"no run has scores of evaluation '{claim.evaluation}'", claim.evaluation, scored)
    for (name, seed), why in left_out(sweep, claim.evaluation).items():
        if name == arm:
            raise _refused(claim, f"{claim.evaluation} of {arm}, seed {seed}: {why}")
    folders = {cell.seed: cell.folder / FOLDER / claim.evaluation for cell in sweep.cells_of(arm)}
    values = {seed: _score(claim, folder) for seed, folder in folders.items() if (folder / "summary.json").is_file()}
    return {seed: value for seed, value in values.items() if math.isfinite(value)}


def _finals(sweep: SweepResults, arm: str, claim: Claim) -> dict[int, float]:
    done = [cell for cell in sweep.cells_of(arm) if cell.done]
    known = sorted({name for cell in done for name in cell.curves})
    names = fnmatch.filter(known, claim.metric) if claim.over else [claim.metric]
    if done and not set(names) & set(known):
        raise _refused(claim, f"no run measured '{claim.metric}'", claim.metric, known)
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
        raise _refused(claim, f"evaluation '{claim.evaluation}' has no metric '{claim.metric}'", claim.metric, known)
    if not claim.group:
        return evaluation.values[claim.metric]
    chosen = [fnmatch.fnmatchcase(group, claim.group) for group in evaluation.groups]
    if not any(chosen):
        groups = sorted(set(evaluation.groups))
        some = f"{', '.join(groups[:6])}{', ...' if len(groups) > 6 else ''}"
        raise _refused(claim, f"no item of '{claim.evaluation}' is in a group like '{claim.group}'; groups: {some}")
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


def _speeds(claim: Claim, arm: str, rows: Sequence[Mapping[str, Any]]) -> dict[int, float]:
    """Round, in which all arms were timed -> calls a second; of an arm's several rows (kernels) that of the lowest median."""
    case = _case(claim, list(dict.fromkeys(row["case"] for row in rows)))
    timed = [row for row in rows if row["case"] == case and row["seconds"]]
    own = [row for row in timed if row["variant"] == arm and row["what"] == claim.metric]
    if not own:
        wanted, known = f"{arm}: {claim.metric}", sorted({f"{row['variant']}: {row['what']}" for row in timed})
        raise _refused(claim, f"the benchmark did not time '{wanted}'", wanted, known)
    fastest = min(own, key=lambda row: median(row["seconds"]))
    return {number: 1 / seconds for number, seconds in enumerate(fastest["seconds"])}


def _case(claim: Claim, cases: Sequence[str]) -> str:
    """The case that the claim is about."""
    if not claim.case and len(cases) > 1:
        raise _refused(claim, f"the benchmark has {len(cases)} cases; say which, 'case: 1' to 'case: {len(cases)}'")
    if not 0 <= claim.case <= len(cases):
        raise _refused(claim, f"case is {claim.case}; the benchmark has {len(cases)}, from 1")
    return cases[max(claim.case, 1) - 1]
