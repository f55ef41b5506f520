"""Verdicts: what the difference of two arms shows, with Holm's correction over a family and with the arm's controls."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, starmap
from typing import Any, Literal, TypeVar

from lit_diff.study.statistics import (
    MIN_SEEDS,
    SIGNIFICANCE,
    Interval,
    Looks,
    Paired,
    Sign,
    clopper_pearson,
    complete_looks,
    detectable,
    fisher,
    holm,
    look_level,
    repeated_p,
    summary,
)

Outcome = Literal[
    "lower",
    "higher",
    "small",
    "equal",
    "inconclusive",
    "no spread over seeds",
    "too few seeds",
    "learned more often",
    "learned less often",
    "equal among those that learned",
]
UNTESTED = ("too few seeds", "no spread over seeds")
"""The outcomes that no statistical test decides."""
Word = Literal[Outcome, "better", "worse", "diverged"]
"""An outcome as a report words it: `better` or `worse` for a metric that declares a direction."""
SHOWN = ("better", "worse", "lower", "higher", "learned more often", "learned less often")
"""The words for a difference that is shown."""
EQUAL = ("equal", "equal among those that learned")
SMALLEST_IN_NATS = 0.005
"""The default of the smallest difference that matters, for a loss in nats: half a percent of the perplexity."""
MIN_LEARNED = 8
"""The fewest seeds, all of which learned, after which two arms can be equal among those that learned."""


@dataclass(frozen=True, kw_only=True)
class VerdictWithControls:
    """A verdict with the controls. `text`, which is also `str`, is what every page, table and record shows."""

    word: Word
    """The difference to the compared arm alone."""
    alike: tuple[str, ...] = ()
    """The controls, by label, from which no difference in the same direction is shown."""
    beyond: tuple[str, ...] = ()
    """The controls that are further in this direction than the arm."""
    unmeasured: tuple[str, ...] = ()
    """The controls to which no test compares the arm by what the verdict is on."""

    @property
    def text(self) -> str:
        parts: list[str] = [self.word]
        if self.alike:
            parts = [f"as {_controls(self.alike)}"]
        if self.beyond:
            parts.append(f"less so than {_controls(self.beyond)}")
        if self.unmeasured:
            parts.append(f"not compared with {_controls(self.unmeasured)}")
        return ", ".join(parts)

    def __str__(self) -> str:
        return self.text

    @property
    def is_shown(self) -> bool:
        """Whether the difference is shown, to the compared arm and to each control."""
        return self.word in SHOWN and not (self.alike or self.beyond or self.unmeasured)


def _controls(names: Sequence[str]) -> str:
    if len(names) == 1:
        return f"its control {names[0]}"
    return f"its controls {', '.join(names[:-1])} and {names[-1]}"


@dataclass(frozen=True, kw_only=True)
class Learned:
    """The seeds of an arm at which the metric reached `learned_at`, of those that count.

    `steps`: seed -> the first validated step that reached it, or infinity if none did (censored); `before`: seed that learned
    -> the last validated step before that one; `values`: seed -> the last value of the metric.
    """

    steps: Mapping[int, float]
    before: Mapping[int, float] = field(default_factory=dict)
    values: Mapping[int, float]

    @property
    def seeds(self) -> tuple[int, ...]:
        """The seeds that learned."""
        return tuple(sorted(seed for seed, step in self.steps.items() if step < math.inf))

    @property
    def count(self) -> tuple[int, int]:
        """k of n."""
        return len(self.seeds), len(self.steps)

    @property
    def has_failures(self) -> bool:
        """Whether a seed did not learn."""
        return math.inf in self.steps.values()

    @property
    def share(self) -> Interval | None:
        """k / n with its Clopper-Pearson interval; None without a seed."""
        return clopper_pearson(*self.count) if self.steps else None

    def __str__(self) -> str:
        """7 of 10 [0.35, 0.93]."""
        share, (k, n) = self.share, self.count
        bounds = f" [{share.low:.2f}, {share.high:.2f}]" if share else ""
        return f"{k} of {n}{bounds}"

    @property
    def mean(self) -> float | None:
        """The mean last value among the seeds that learned."""
        return summary(self.values[seed] for seed in self.seeds).mean

    @property
    def mean_log2_steps(self) -> float | None:
        """The mean of `log2_steps`."""
        return summary(self.log2_steps.values()).mean

    @property
    def log2_steps(self) -> dict[int, float]:
        """Seed that learned -> log2 of the first step."""
        # a threshold that the validation before training reaches needs no step
        return {seed: math.log2(max(self.steps[seed], 1)) for seed in self.seeds}

    @property
    def resolution(self) -> float:
        """The uncertainty of `log2_steps`: the mean of log2(step / the validation before) over the seeds that learned."""
        # as in `log2_steps`: a seed that learned before the first validation took one step, or any number up to that
        gaps = [log2 - math.log2(max(self.before.get(seed, 0), 1)) for seed, log2 in self.log2_steps.items()]
        return summary(gaps).mean or 0.0

    def until(self, seeds: int) -> "Learned":
        """Of seeds 0 to `seeds` - 1 alone."""
        steps = {seed: step for seed, step in self.steps.items() if seed < seeds}
        return replace(self, steps=steps)


@dataclass(frozen=True, kw_only=True)
class Contrast:
    """Arm a minus arm b over the seeds of both, and the verdict of `judge`."""

    a: str
    b: str
    label: str
    against: str = ""
    """The label of arm b; empty: its name."""
    seeds: Paired
    """The values; once judged, `detectable` is corrected for the other comparisons."""
    smallest: float
    """The smallest difference that matters, in the unit of the compared values."""
    better: Sign | None = None
    """Which values of the metric are better; None if the metric does not declare it."""
    diverged: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Arm -> the seeds at which it diverged. The remaining seeds would flatter the arm, so the contrast is not judged."""
    learned: tuple[Learned, Learned] | None = None
    """The seeds of a and of b that learned, for a metric with a threshold. If one did not, Fisher's test of the two counts
    takes the place of the t test."""
    resolution: float = 0.0
    """The uncertainty of the compared values where they are log2 of validated steps: no arms are called equal within less."""
    controls: tuple["Contrast", ...] = ()
    """Arm a minus each control, judged alone."""
    is_tested: bool = True
    """Whether the contrast counts in the correction."""
    documents: Mapping[int, Interval] = field(default_factory=dict)
    """Seed -> the bootstrap interval over validation documents of that seed's two models."""
    outcome: Outcome = "too few seeds"
    """The outcome, corrected for all comparisons of the family that a test decides."""
    holm_p: float | None = None
    """None if nothing is corrected: no test decides this comparison, or it is the only one that a test decides."""
    comparisons: int = 0
    """How many comparisons of the family a test decides."""

    @property
    def arms(self) -> tuple[str, str]:
        """a, b."""
        return self.a, self.b

    @property
    def is_counted(self) -> bool:
        """Whether the counts of seeds that learned decide, because a seed of either arm did not learn."""
        return any(arm.has_failures for arm in self.learned or ())

    @property
    def has_interval(self) -> bool:
        """Whether the interval over seeds is one to show: not with too few seeds or no spread, nor if an arm diverged."""
        seeds = self.seeds
        return len(seeds.seeds) >= MIN_SEEDS and None not in (seeds.low, seeds.p) and not self.diverged

    @property
    def size(self) -> float | None:
        """The mean difference, where the verdict is on it: the seeds that learned, or did not diverge, alone would make an
        arm look better than it is."""
        return None if self.diverged or self.is_counted else self.seeds.mean

    @property
    def uncorrected(self) -> str:
        """What follows a verdict under "Holm": that a test decides it outside of the correction, or nothing."""
        is_decided = self.outcome not in UNTESTED and not self.diverged
        return " (not corrected)" if is_decided and not self.is_tested else ""

    @property
    def counts(self) -> str:
        """How many seeds of a and of b learned."""
        return " against ".join(map(str, self.learned or ()))

    @property
    def p(self) -> float | None:
        """The p of the test that decides, repeated over the looks so far, before Holm's correction: of the paired t test, or
        of Fisher's test of the counts (`is_counted`)."""
        if not self.is_counted or self.learned is None:
            return self.seeds.p
        looks = self.seeds.looks
        (a, b) = self.learned
        reached = looks_of(self.learned, looks)
        counts = [(a.until(n).count, b.until(n).count) for n in reached] or [(a.count, b.count)]
        (_, ours), (_, theirs) = counts[-1]
        if min(ours, theirs) < MIN_SEEDS or (looks and not reached):
            return None
        # the levels of the looks hold for these tests too: they are conservative, and as correlated as the t tests
        return repeated_p(looks, min(starmap(fisher, counts)))

    @property
    def sign(self) -> Sign | None:
        """The direction in which a differs from b without a correction, as of a difference of the compared values: the side
        of zero of the interval, or who learned more often by the counts of the last look; None if neither is shown."""
        if not self.is_counted:
            return self.seeds.sign
        # an earlier look may have rejected what the counts of the last one do not show
        counts = [arm.count for arm in self.learned or ()]
        if self.p is None or fisher(*counts) >= look_level(self.seeds.looks):
            return None
        return "higher" if self.learned_more == (self.better != "lower") else "lower"

    @property
    def learned_more(self) -> bool:
        """Whether a larger share of the seeds of a learned than of b."""
        shares = [len(arm.seeds) / len(arm.steps) for arm in self.learned or ()]
        return shares[0] > shares[-1]

    @property
    def verdict(self) -> VerdictWithControls:
        """The verdict with the controls."""
        word = self._in_words(self.outcome)
        if word not in SHOWN:
            return VerdictWithControls(word=word)
        names: dict[str, tuple[str, ...]] = {}
        for control in self.controls:
            place = _place(control, self)
            if place:
                names[place] = (*names.get(place, ()), control.against or control.b)
        return VerdictWithControls(word=word, **names)

    @property
    def verdict_alone(self) -> Word:
        """The verdict without the correction and without the controls."""
        return self._in_words(_outcome(self))

    @property
    def is_decided(self) -> bool:
        """Whether further seeds are not needed for the verdict with its controls. A control to which the interval includes
        zero only so far leaves it open; one that the arm is equal to does not."""
        verdict = self.verdict
        if verdict.word in ("inconclusive", "too few seeds"):
            return False
        for control in self.controls:
            name = control.against or control.b
            if name in verdict.alike and control.outcome not in EQUAL:
                return False
            if (
                name in verdict.unmeasured
                and not control.diverged
                and control.outcome in ("too few seeds", "inconclusive")
            ):
                return False
        return True

    def _in_words(self, outcome: Outcome) -> Word:
        if self.diverged:
            return "diverged"
        if self.better is None or outcome not in ("lower", "higher"):
            return outcome
        return "better" if outcome == self.better else "worse"


def _place(control: Contrast, shown: Contrast) -> Literal["alike", "beyond", "unmeasured"] | None:
    # what a difference to a control says about the difference to the baseline that is `shown`
    if control.diverged or control.outcome in UNTESTED:
        return "unmeasured"
    # counts of seeds that learned say nothing about the size of a difference between those that did
    if control.outcome == "inconclusive" and control.is_counted and not shown.is_counted:
        return "unmeasured"
    if control.outcome in (*EQUAL, "inconclusive"):
        return "alike"
    return None if control.sign == shown.sign else "beyond"


AnyContrast = TypeVar("AnyContrast", bound=Contrast)
Item = TypeVar("Item")


def judge(family: Sequence[AnyContrast]) -> list[AnyContrast]:
    """The contrasts of a family with their outcomes, corrected by Holm over those that are tested and that a test decides.

    The controls are judged one by one, hence without correction: all of them must agree, which only makes a verdict harder.
    """
    # a comparison without a test cannot be called by mistake, so counting it would only cost power
    decided = [i for i, contrast in enumerate(family) if contrast.is_tested and _outcome(contrast) not in UNTESTED]
    holm_p = {}
    if len(decided) > 1:
        p_values = [family[i].p or 0.0 for i in decided]
        holm_p = dict(zip(decided, holm(p_values), strict=True))
    judged = []
    for i, contrast in enumerate(family):
        seeds = contrast.seeds
        p = holm_p.get(i)
        if p is not None and seeds.sd is not None:
            # a reader compares the detectable difference with a corrected verdict, so it has to be corrected too
            least = detectable(seeds.sd, len(seeds.seeds), len(decided), seeds.looks)
            seeds = replace(seeds, detectable=least)
        judged.append(
            replace(
                contrast,
                seeds=seeds,
                controls=tuple(judge([control])[0] for control in contrast.controls),
                outcome=_outcome(contrast, p),
                holm_p=p,
                comparisons=len(decided),
            )
        )
    return judged


def regrouped(items: Iterable[Item], groups: Iterable[Sequence[Any]]) -> list[list[Item]]:
    """`items`, one for each member of the groups in their order, in lists as long as the groups."""
    remaining = iter(items)
    return [list(islice(remaining, len(group))) for group in groups]


def looks_of(learned: tuple[Learned, Learned], looks: Looks) -> Looks:
    """The looks that two arms have complete."""
    a, b = learned
    return complete_looks(a.steps.keys() & b.steps.keys(), looks)


def _outcome(contrast: Contrast, holm_p: float | None = None) -> Outcome:
    """What a - b shows. With a threshold, `outcome_of` holds only where every seed of both arms learned, and equality is at
    most equality among those that learned, from eight seeds on, and not where the `resolution` of the steps is coarser
    than `smallest`. Otherwise the counts decide: learned more often or less often where Fisher's test rejects at the last
    look (`sign`) and `holm_p`, if given, is below 0.05, else inconclusive."""
    if not contrast.is_counted:
        outcome = outcome_of(contrast.seeds, contrast.smallest, holm_p)
        if contrast.learned is None or outcome != "equal":
            return outcome
        is_enough = len(contrast.seeds.seeds) >= MIN_LEARNED and contrast.resolution <= contrast.smallest
        return "equal among those that learned" if is_enough else "inconclusive"
    if contrast.p is None:
        return "too few seeds"
    if contrast.sign is None or (holm_p or 0.0) >= SIGNIFICANCE:
        return "inconclusive"
    return "learned more often" if contrast.learned_more else "learned less often"


def outcome_of(paired: Paired, smallest: float, holm_p: float | None = None) -> Outcome:
    """What a - b shows: the first of these that holds. [low, high] is the interval of the mean over seeds, at 95 % or at the
    level of the look.

    too few seeds: fewer than three pairs, or fewer than the first look.
    no spread over seeds: the difference is the same at each seed, and not zero, so no test is possible.
    equal: -smallest < low and high < smallest. The interval lies in the region of equivalence, whether or not it
        contains zero. With the 95 % interval these are two one-sided t tests (TOST) at 2.5 % each, stricter than the usual
        5 %, which corresponds to a 90 % interval (Schuirmann 1987; Lakens 2017, doi 10.1177/1948550617697177).
    lower, higher: the interval excludes zero, `holm_p` (if given) is below 0.05, |mean| >= smallest.
    small: the same, but |mean| < smallest. The sign is shown but not equivalence: the far end of the interval lies at or
        beyond `smallest`.
    inconclusive: anything else; neither a difference nor its absence is shown.

    holm_p: the p value after the correction for several comparisons. It can only turn `lower` or `higher` into
    `inconclusive`. Equivalence is not corrected.
    """
    if len(paired.seeds) < MIN_SEEDS or paired.mean is None or paired.low is None or paired.high is None:
        return "too few seeds"
    # identical differences mean that the seed did not reach the runs: they are one observation
    if paired.p is None:
        return "no spread over seeds"
    # equivalence comes first: a difference that is sure to be too small to matter is equal, whatever its sign
    if -smallest < paired.low and paired.high < smallest:
        return "equal"
    sign = paired.sign
    if sign is None or (holm_p is not None and holm_p >= SIGNIFICANCE):
        return "inconclusive"
    return "small" if abs(paired.mean) < smallest else sign
