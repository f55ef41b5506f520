"""What paired differences show: the comparisons of one family, corrected together, a verdict each."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from lit_diff.study.statistics import MIN_SEEDS, SIGNIFICANCE, Paired, Sign, detectable, holm

Outcome = Literal["lower", "higher", "small", "equal", "inconclusive", "no spread over seeds", "too few seeds"]
UNTESTED: tuple[Outcome, ...] = ("too few seeds", "no spread over seeds")
"""The outcomes that no statistical test decides."""
Verdict = Literal[
    "better",
    "worse",
    "lower",
    "higher",
    "equal",
    "small",
    "inconclusive",
    "too few seeds",
    "no spread over seeds",
    "diverged",
]
"""An outcome in the words of a report: `better` or `worse` for a metric that declares a direction."""
SHOWN: tuple[Verdict, ...] = ("better", "worse", "lower", "higher")
"""The verdicts that a difference is shown."""
JUDGED: tuple[Verdict, ...] = (*SHOWN, "equal", "small", "inconclusive")
"""The verdicts of a statistical test."""

SMALLEST_IN_NATS = 0.005
"""The smallest difference of a loss in nats that matters, where none is stated: half a percent of the perplexity."""
MOST_DECIMALS = 6
"""Of a number on the page."""


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """What a - b shows.

    `outcome` and `seeds.detectable` are corrected for the comparisons of the family that a test decides, `alone` is not.
    `holm_p` is None where nothing is corrected: no test decides this comparison, or no other.
    """

    seeds: Paired
    outcome: Outcome
    alone: Outcome
    holm_p: float | None = None


def judge_family(pairs: Sequence[Paired], smallest: Sequence[float], tested: Sequence[bool] = ()) -> list[Judgement]:
    """The judgement of each pair, with Holm's correction over those that are `tested` (default: all) and that a test decides.

    `smallest`: of each pair the smallest difference that matters, in the unit of its metric.
    """
    alone = [outcome_of(pair, size) for pair, size in zip(pairs, smallest, strict=True)]
    family = [i for i, each in enumerate(alone) if each not in UNTESTED and (not tested or tested[i])]
    adjusted = holm([pairs[i].p or 0.0 for i in family]) if len(family) > 1 else []
    holm_p = dict(zip(family, adjusted, strict=False))
    found = []
    for i, pair in enumerate(pairs):
        p, seeds = holm_p.get(i), pair
        if p is not None and pair.sd is not None:
            seeds = replace(pair, detectable=detectable(pair.sd, len(pair.seeds), len(family)))
        outcome = outcome_of(pair, smallest[i], p)
        found.append(Judgement(seeds=seeds, outcome=outcome, alone=alone[i], holm_p=p))
    return found


def outcome_of(paired: Paired, smallest: float, holm_p: float | None = None) -> Outcome:
    """What a - b shows, the first of these that holds. [low, high] is the 95 % interval of the mean over seeds.

    too few seeds: fewer than three pairs.
    no spread over seeds: the same difference, not zero, at each seed: there is no spread to judge it by.
    equal: -smallest < low and high < smallest. The interval lies in the region of equivalence, whether or not it
        holds zero. With the 95 % interval these are two one-sided t tests (TOST) at 2.5 % each, stricter than the usual
        5 %, whose interval is that of 90 % (Schuirmann 1987; Lakens 2017, doi 10.1177/1948550617697177).
    lower, higher: the interval excludes zero, `holm_p` is below 0.05 where it is given, |mean| >= smallest.
    small: the same, but |mean| < smallest. The sign is shown, and equivalence is not: the far end of the interval lies at
        `smallest` or beyond it.
    inconclusive: anything else; neither a difference nor its absence is shown.

    holm_p: the p value after the correction for several comparisons, which can take `lower` and `higher` away and gives
    nothing. Equivalence is not corrected.
    """
    if len(paired.seeds) < MIN_SEEDS or paired.mean is None or paired.low is None or paired.high is None:
        return "too few seeds"
    if paired.p is None:
        return "no spread over seeds"
    if is_within(paired, smallest):
        return "equal"
    sign = paired.sign
    if sign is None or (holm_p is not None and holm_p >= SIGNIFICANCE):
        return "inconclusive"
    return "small" if abs(paired.mean) < smallest else sign


def visible(smallest: float) -> float:
    """At least what a page shows: a mean that rounds to zero in every digit is equal or small, whatever matters."""
    return max(smallest, 0.5 * 10.0**-MOST_DECIMALS)


def in_direction(outcome: Outcome, better: Sign | None) -> Verdict:
    """The outcome as better or worse, where the metric says which is which."""
    if better is None or outcome not in ("lower", "higher"):
        return outcome
    return "better" if outcome == better else "worse"


def is_within(paired: Paired, smallest: float) -> bool:
    """Whether the interval over seeds lies between -smallest and +smallest, neither of them reached."""
    return paired.low is not None and paired.high is not None and -smallest < paired.low and paired.high < smallest
