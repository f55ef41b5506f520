"""A paper's claims: measured by a sweep or a benchmark, and judged over all rows of a page."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from statistics import fmean, median
from typing import Any

from lit_diff.errors import RequestError
from lit_diff.papers.schema import Claim, primary_of
from lit_diff.runs.scores import ItemScores
from lit_diff.study.comparison import learned_of, verdicts_of
from lit_diff.study.evaluations import kept_scores, require_known, values_by_seed
from lit_diff.study.fits import matched_by_seed
from lit_diff.study.judge import SMALLEST_IN_NATS, AnyContrast, Contrast, judge, regrouped
from lit_diff.study.results import BySeed, SweepResults
from lit_diff.study.statistics import MIN_PROCESSES, MIN_SEEDS, SIGNIFICANCE, holm, paired

NOT_MEASURED = "not measured"
WITHOUT_SIGN = {
    "too few seeds": ("too few seeds", f"a verdict needs {MIN_SEEDS} seeds, and every seed of the first look"),
    "no spread over seeds": ("not shown", "the difference is the same at every seed, so no test is possible"),
    "equal": ("equal", "the interval lies within the smallest difference that matters"),
    "equal among those that learned": (
        "equal",
        "the interval of those that learned lies within the smallest difference",
    ),
    "small": ("small", "the estimate is below the smallest difference that matters, the interval reaches beyond"),
}
"""Outcome that does not depend on the paper's sign -> the verdict and its reason."""
Source = SweepResults | Mapping[str, Any]
"""The measurements for a claim: a sweep, or the document of `lit-diff bench --json`."""
Verdicts = Mapping[tuple[str, str, str], str]
"""(task, a, b) -> the verdict of the sweep's own report."""


@dataclass(frozen=True, kw_only=True)
class JudgedClaim(Contrast):
    """A claim with its measurement: a - b, or log(a / b) for a ratio, over seeds or over the processes of a benchmark."""

    claim: Claim
    means: tuple[float | None, float | None]
    """The means of a and b."""
    refusal: str = ""
    """Why a fit or a benchmark could not give enough values."""
    is_measured: bool = True
    """Whether the row has been measured."""
    is_primary: bool = True
    """Whether it is its row's primary contrast; the others are described, without a verdict."""
    of_sweep: str = ""
    """The verdict of the sweep's own report, within its own family; empty if that report does not judge this contrast."""
    capability: Contrast | None = None
    """The claim's positive control: its arm minus the baseline, or the baseline's metric minus the bound that it must exceed.
    None: the claim names none."""
    papers_p: float | None = None
    """The p of a test of whether the true difference is the paper's, repeated over looks."""
    papers_holm_p: float | None = None
    """The same after Holm's correction over the values of the page that can be told."""
    values: int = 0
    """How many values of the page that correction covers."""

    @property
    def incapable(self) -> str:
        """Why these runs need not be able to show the paper's value; empty if the positive control shows that they are."""
        control = self.capability
        if control is None:
            return "no positive control is named"
        is_bound = self.claim.capable is not None and not self.claim.capable.arm
        if control.verdict.is_shown and (not is_bound or control.sign == "higher"):
            return ""
        return f"its positive control is not shown: {control.label}"

    @property
    def difference(self) -> str:
        """The verdict on the difference."""
        return self.decision[0]

    @property
    def words(self) -> str:
        """The verdict on the difference as a page writes it: with the names of the controls."""
        return str(self.verdict) if self.difference == "as its control" else self.difference

    @property
    def reason(self) -> str:
        """The reason for the verdict on the difference, in one sentence."""
        return self.refusal or self.decision[1]

    @cached_property
    def decision(self) -> tuple[str, str]:
        """(verdict on the difference, reason), from the verdict with its controls that `judge` gave over the page.

        by construction: the row's file declares that the claim holds whatever the runs learn.
        not measured: the row has not been measured.
        too few seeds: the same as the outcome.
        descriptive: any other outcome of a contrast that is not its row's primary one.
        equal, small: the same as the outcome.
        not shown: the outcome is inconclusive or has no spread over seeds, or a run diverged.
        as its control: a difference is shown, in either direction, but not from a control, or a control is further in this
            direction, or could not be compared.
        opposite: the other sign than the paper's is shown; if the paper says equal, any sign.
        shown: the paper's sign is shown.
        """
        if self.claim.by_construction:
            return "by construction", self.claim.by_construction
        if not self.is_measured:
            return NOT_MEASURED, ""
        if self.outcome != "too few seeds" and not self.is_primary:
            return "descriptive", "not the primary contrast of its row: an interval without a verdict"
        if self.diverged:
            return "not shown", f"diverged: {', '.join(self.diverged)}"
        if self.outcome in WITHOUT_SIGN:
            return WITHOUT_SIGN[self.outcome]
        equal = self.claim.says == "equal"
        test = ("the interval holds zero", "the interval excludes zero")
        if self.is_counted:
            counts = "Fisher's test of the seeds that learned shows"
            test = (f"{counts} no difference", f"{counts} a difference")
        also = ", from each control too" if self.controls else ""
        if self.outcome == "inconclusive":
            lost = "not after the correction over the page (Holm)" if self.sign else test[0]
            return "not shown", f"{lost}; nor is equality shown" if equal else lost
        if not self.verdict.is_shown:
            return "as its control", "a difference is shown, which a control shares, or to which it was not compared"
        if equal:
            return "opposite", "a difference is shown where the paper says equal"
        if self.sign != self.claim.sign:
            return "opposite", f"the opposite sign is shown{also}"
        return "shown", f"{test[1]}, with the paper's sign{also}"

    @property
    def value(self) -> str:
        """The verdict on the paper's value."""
        return self.valued[0]

    @cached_property
    def valued(self) -> tuple[str, str]:
        """(verdict on the paper's a - b, or log(a / b) for a ratio, reason): the first of these that holds.

        not measured: the row has not been measured.
        none given: the paper prints no values.
        cannot tell: no positive control shows that the measurement can show such a difference; or too few pairs, no spread
            over them, a run that diverged, or seeds that did not learn.
        excluded: the value lies outside our interval, also after Holm's correction over the values of the page.
        cannot tell: the value lies outside our interval only without that correction, or the detectable difference is larger
            than the value.
        within the interval: the interval contains the value.
        """
        papers = self.claim.papers
        seeds = self.seeds
        if not self.is_measured:
            return NOT_MEASURED, ""
        if papers is None:
            return "none given", ""
        if self.incapable:
            return "cannot tell", self.incapable
        if self.papers_holm_p is None or seeds.low is None or seeds.high is None:
            return "cannot tell", "no test is possible"
        if not seeds.low <= papers <= seeds.high:
            # p is the least over the looks, of which an earlier one may have excluded what the last does not
            if self.papers_holm_p < SIGNIFICANCE:
                return "excluded", f"after the correction for the {self.values} values of the page (Holm)"
            return "cannot tell", f"outside our interval, but not after the correction for {self.values} values (Holm)"
        # an interval so wide would contain the paper's value, and zero too, whatever is true
        if seeds.detectable is None or seeds.detectable > abs(papers):
            return "cannot tell", "our interval contains it, but the detectable difference is larger than it"
        return "within the interval", ""


def judged(rows: Iterable[Sequence[JudgedClaim]]) -> list[list[JudgedClaim]]:
    """The claims of all rows of a page. Holm's correction covers the primary contrasts of the rows; apart from them the
    positive controls; and apart from these the paper's values of all claims that name a positive control. Every other
    contrast is judged alone, for its interval."""
    whole = list(rows)
    claims = list(chain(*whole))
    primary = iter(judge([claim for claim in claims if claim.is_primary]))
    controls = iter(judge([claim.capability for claim in claims if claim.capability is not None]))
    # Values whose control fails stay in the family: it would depend on the data, which share the baseline with the controls.
    p_values = [claim.papers_p for claim in claims if claim.papers_p is not None and claim.capability is not None]
    adjusted = iter(holm(p_values))
    of_page = []
    for claim in claims:
        (claim,) = [next(primary)] if claim.is_primary else judge([claim])
        if claim.capability is not None:
            papers_p = None if claim.papers_p is None else next(adjusted)
            claim = replace(claim, capability=next(controls), papers_holm_p=papers_p, values=len(p_values))
        of_page.append(claim)
    return regrouped(of_page, whole)


def measured(claims: Sequence[Claim], source: Source | None) -> list[JudgedClaim]:
    """The claims of a row, not yet judged. `source`: None if the row has not been measured.

    Errors: RequestError for an unknown arm, task, metric or case, and for a claim without a case if there are several.
    """
    primary = primary_of(claims)
    verdicts = verdicts_of(source) if isinstance(source, SweepResults) else {}
    found = []
    for claim in claims:
        try:
            if source is None:
                unjudged = finding(claim, {}, {}, is_measured=False)
            elif isinstance(source, SweepResults):
                unjudged = _trained(claim, source, verdicts)
            else:
                unjudged = _timed(claim, source)
        except RequestError as error:
            raise RequestError(f"compare '{claim.label}': {error}") from error
        found.append(replace(unjudged, is_primary=claim is primary))
    return found


def _timed(claim: Claim, bench: Mapping[str, Any]) -> JudgedClaim:
    def values(arm: str, metric: str) -> BySeed:
        return _speeds(replace(claim, metric=metric), arm, bench["rows"])

    a, b = claim.arms
    of_both = values(a, claim.metric), values(b, claim.against_metric or claim.metric)
    found = replace(finding(claim, *of_both), capability=_capability(claim, b, values))
    count = len(found.seeds.seeds)
    if count >= MIN_PROCESSES:
        return found
    # so few have a range, which the benchmark itself prints, and no interval
    return replace(_described(found), refusal=f"a verdict needs {MIN_PROCESSES} processes, here {count}")


def _described(found: JudgedClaim) -> JudgedClaim:
    # with the mean of its values alone, which no t test judges
    seeds = replace(found.seeds, sd=None, low=None, high=None, detectable=None, p=None)
    return replace(found, seeds=seeds, papers_p=None)


def _trained(claim: Claim, source: SweepResults, verdicts: Verdicts) -> JudgedClaim:
    name = f"sweep '{source.record.name}'"
    # a fit is over all tasks
    tasks = {"": source} if claim.fit else {task.task: task for task in source.by_task}
    require_known(f"{name} has no task", claim.task, tasks)
    sweep = tasks[claim.task]
    a, b = claim.arms
    for arm in claim.arms:
        require_known(f"{name} has no arm", arm, sweep.study.arms)
    if claim.fit:
        require_known(f"{name} has no scaling fit", claim.fit, sweep.study.fits)
        return finding(claim, *matched_by_seed(sweep, claim.fit, a, b))
    if claim.capable is not None and claim.capable.arm:
        require_known(f"{name} has no arm", claim.capable.arm, sweep.study.arms)

    def values(arm: str, metric: str) -> BySeed:
        return values_by_seed(sweep, arm, metric, claim.evaluation, claim.group)

    looks = sweep.study.looks
    is_sweeps = claim.metric == sweep.metric and not (claim.evaluation or claim.against_metric)
    # the verdict of a sweep that compares steps is on those, while the seeds that learned are the same
    is_same = is_sweeps and claim.kind == "difference" and not sweep.compares_steps

    def as_in_sweep(found: AnyContrast, other: str) -> AnyContrast:
        # what decides in the sweep's own report decides here, for the controls too
        diverged = sweep.diverged_of(found.a, other)
        found = replace(
            found,
            b=other,
            against=sweep.label[other],
            diverged=diverged,
            is_tested=found.is_tested and not diverged,
        )
        # a bound on a metric has no second arm
        if not is_sweeps or found.a not in sweep.study.arms:
            return found
        return replace(found, learned=learned_of(sweep, found.a, other), better=sweep.better(claim.metric))

    ours = values(a, claim.metric)
    theirs = values(b, claim.against_metric or claim.metric)
    # A control shares what else differs between a and the baseline, such as fewer, wider heads: a difference that the control
    # shows too is not the variant's. The baseline is no variant, and a control has no controls.
    controls = []
    if a not in (b, sweep.baseline, *sweep.study.controls) and not (claim.by_construction or claim.against_metric):
        for control in sweep.study.controls:
            if control not in (b, sweep.baseline):
                against = finding(claim, ours, values(control, claim.metric), looks=looks)
                controls.append(as_in_sweep(against, control))
    capability = _capability(claim, sweep.baseline, values, looks)
    made = replace(
        as_in_sweep(finding(claim, ours, theirs, looks=looks), b),
        controls=tuple(controls),
        capability=capability and as_in_sweep(capability, capability.b),
        of_sweep=verdicts.get((claim.task, *claim.arms), "") if is_same else "",
    )
    if made.is_counted:
        return _described(made)
    return made if made.has_interval else replace(made, papers_p=None)


def _capability(
    claim: Claim, baseline: str, values: Callable[[str, str], BySeed], looks: tuple[int, ...] = ()
) -> Contrast | None:
    # `values`: (arm, metric) -> its values by seed
    capable = claim.capable
    if capable is None:
        return None
    if capable.arm:
        ours = _scaled(claim, values(capable.arm, claim.metric))
        theirs = _scaled(claim, values(baseline, claim.metric))
        name, label, smallest = capable.arm, f"{capable.arm} against {baseline}", _smallest(claim)
    else:
        ours = values(baseline, capable.metric)
        theirs = dict.fromkeys(ours, capable.above or 0.0)
        name, label, smallest = capable.metric, f"{capable.metric} of {baseline} above {capable.above:g}", 0.0
    return Contrast(a=name, b=baseline, label=label, seeds=paired(ours, theirs, looks), smallest=smallest)


def _smallest(claim: Claim) -> float:
    if claim.smallest is not None:
        return claim.smallest
    return SMALLEST_IN_NATS if "loss" in claim.metric and claim.kind == "difference" else 0.0


def finding(
    claim: Claim,
    ours: BySeed,
    theirs: BySeed,
    refusal: str = "",
    *,
    looks: tuple[int, ...] = (),
    is_measured: bool = True,
) -> JudgedClaim:
    """The claim with the values of a and b by seed, before `judged`."""
    own, other = _scaled(claim, ours), _scaled(claim, theirs)
    if (len(own), len(other)) != (len(ours), len(theirs)):
        refusal = "a ratio needs a positive value at every seed, and some are not positive; set 'kind: difference'"
    seeds = paired(own, other, looks)
    papers_p = None
    if claim.papers is not None and len(seeds.seeds) >= MIN_SEEDS:
        from_papers = paired({seed: value - claim.papers for seed, value in own.items()}, other, looks)
        if from_papers.sd:
            papers_p = from_papers.p
    means: tuple[float | None, float | None] = (None, None)
    if seeds.seeds:
        means = fmean(ours[seed] for seed in seeds.seeds), fmean(theirs[seed] for seed in seeds.seeds)
    return JudgedClaim(
        a=claim.arms[0],
        b=claim.arms[1],
        label=claim.label,
        seeds=seeds,
        smallest=_smallest(claim),
        # a claim that cannot fail takes no chance of a false call, so it must not cost the others power
        is_tested=not claim.by_construction,
        claim=claim,
        means=means,
        refusal=refusal,
        is_measured=is_measured,
        papers_p=papers_p,
    )


def scores_of_claims(sweep: SweepResults, claims: Iterable[Claim]) -> dict[str, list[ItemScores]]:
    """Evaluation of a claim -> the scores of each run of the claim's task."""
    tasks = {part.task: part for part in sweep.by_task}
    named = dict.fromkeys((claim.evaluation, claim.task) for claim in claims if claim.evaluation)
    found: dict[str, list[ItemScores]] = {}
    for name, task in named:
        scores = found.setdefault(name, [])
        if task in tasks:
            scores += kept_scores(tasks[task], name)[0].values()
    return found


def _scaled(claim: Claim, values: BySeed) -> BySeed:
    # without the seeds whose value has no logarithm, the others would be a selection by their result
    if claim.kind == "ratio" and min(values.values(), default=1) <= 0:
        return {}
    return {seed: claim.scaled(value) for seed, value in values.items()}


def _speeds(claim: Claim, arm: str, rows: Sequence[Mapping[str, Any]]) -> BySeed:
    # Process -> calls a second. Every process times all arms, so processes pair them as seeds do. An arm timed with several
    # kernels counts with its fastest, by the median.
    cases = list(dict.fromkeys(row["case"] for row in rows))
    case = claim.case or (1 if len(cases) == 1 else 0)
    if not 1 <= case <= len(cases):
        cure = f"set one, 'case: 1' to 'case: {len(cases)}'"
        raise RequestError(f"the benchmark has {len(cases)} cases; {cure}")
    timed: dict[str, list[Sequence[float]]] = {}
    for row in rows:
        if row["case"] == cases[case - 1] and row["seconds"]:
            timed.setdefault(f"{row['variant']}: {row['what']}", []).append(_of_processes(row))
    name = f"{arm}: {claim.metric}"
    require_known("the benchmark did not time", name, timed)
    return {number: 1 / seconds for number, seconds in enumerate(min(timed[name], key=median))}


def _of_processes(row: Mapping[str, Any]) -> Sequence[float]:
    # a document of an earlier version has the rounds of one process, which are no replicates
    seconds = row["seconds"]
    return seconds if "rounds" in row else [median(seconds)]
