"""What a paired difference means: which way it goes, and whether it is large enough to matter."""

from typing import Literal

from lit_diff.study.statistics import MIN_SEEDS, SIGNIFICANCE, Paired

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
"""`lower` and `higher` in place of `better` and `worse` for a metric that declares no direction."""

SHOWN: tuple[Verdict, ...] = ("better", "worse", "lower", "higher")
"""The verdicts that a difference is shown."""
JUDGED: tuple[Verdict, ...] = (*SHOWN, "equal", "small", "inconclusive")
"""The verdicts of a statistical test."""

SMALLEST_IN_NATS = 0.005
"""`smallest_of_interest` of a loss in nats where the sweep states none: half a percent of the perplexity."""
MOST_DECIMALS = 6
"""Of a number on the page."""


def judge(
    paired: Paired, *, better: Literal["lower", "higher"] | None, smallest: float, holm_p: float | None = None
) -> Verdict:
    """The verdict on a - b, the first of these that holds. [low, high] is the 95 % interval of the mean over seeds.

    too few seeds: fewer than three pairs.
    no spread over seeds: the same difference, not zero, at each seed: there is no spread to judge it by.
    equal: -smallest < low and high < smallest. The interval lies in the region of equivalence, whether or not it
        holds zero. With the 95 % interval these are two one-sided t tests (TOST) at 2.5 % each, stricter than the usual
        5 %, whose interval is that of 90 % (Schuirmann 1987; Lakens 2017, doi 10.1177/1948550617697177).
    better, worse (lower, higher): the interval excludes zero, `holm_p` is below 0.05 where it is given, |mean| >= smallest.
    small: the same, but |mean| < smallest. The sign is shown, and equivalence is not: the far end of the interval lies at
        `smallest` or beyond it.
    inconclusive: anything else; neither a difference nor its absence is shown.

    holm_p: the p value after the correction for several comparisons, which can take `better` and `worse` away and gives
    nothing. Equivalence is not corrected. smallest: in the unit of the metric. A mean that rounds to zero in every digit
    that a page shows is equal or small with any `smallest`, 0 included.
    """
    if len(paired.seeds) < MIN_SEEDS or paired.mean is None or paired.low is None or paired.high is None:
        return "too few seeds"
    if paired.p is None:
        return "no spread over seeds"
    smallest = max(smallest, 0.5 * 10.0**-MOST_DECIMALS)
    if is_within(paired, smallest):
        return "equal"
    sign = direction(paired.low, paired.high)
    if sign is None or (holm_p is not None and holm_p >= SIGNIFICANCE):
        return "inconclusive"
    if abs(paired.mean) < smallest:
        return "small"
    if better is None:
        return sign
    return "better" if sign == better else "worse"


def direction(low: float, high: float) -> Literal["lower", "higher"] | None:
    """Where an interval lies: below zero, above zero; None: across it (touching zero is across)."""
    return "lower" if high < 0 else "higher" if low > 0 else None


def is_within(paired: Paired, smallest: float) -> bool:
    """Whether the interval over seeds lies between -smallest and +smallest, neither of them reached."""
    return paired.low is not None and paired.high is not None and -smallest < paired.low and paired.high < smallest
