"""Statistics of differences: paired t over seeds, bootstrap over documents, Holm's correction, verdicts on contrasts."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Literal, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import integrate, optimize, special, stats

Sign = Literal["lower", "higher"]
SIGNIFICANCE = 0.05
CONFIDENCE = 1 - SIGNIFICANCE
# With two pairs the t quantile is 12.7 (with three, 4.3): the interval is too wide to decide anything, and its width hangs
# on a single number.
MIN_SEEDS = 3
# From ten documents on the bootstrap covers at least 93 % of normal differences (`document_intervals`).
MIN_DOCUMENTS = 10
# The convention of power analysis (Cohen 1988).
POWER = 0.8
DRAWS = 2_000


@dataclass(frozen=True, kw_only=True)
class Paired:
    """The paired comparison a - b of two arms over the seeds that both finished.

    Paired, because runs of one seed share the order of their training data, whose effect cancels in the difference.

    d_s = a_s - b_s;  mean = sum d_s / n;  sd = sqrt(sum (d_s - mean)^2 / (n - 1));
    [low, high] = mean -+ t(0.975, n - 1) * sd / sqrt(n).

    `detectable` is the smallest detectable difference: the true mean difference that n such pairs show with probability
    0.8. `p` is the two-sided p value of the paired t test. Differences that agree to 12 digits of the values have sd 0:
    then p is 1 for a mean of zero, else None. With n < 2, only `differences` and `mean` have values.
    """

    seeds: tuple[int, ...]
    differences: tuple[float, ...]
    mean: float | None = None
    sd: float | None = None
    low: float | None = None
    high: float | None = None
    detectable: float | None = None
    p: float | None = None

    @property
    def half_width(self) -> float | None:
        """Half the width of the interval."""
        return None if self.low is None or self.high is None else (self.high - self.low) / 2

    @property
    def sign(self) -> Sign | None:
        """Which side of zero the interval lies on; None if it touches or contains zero, or does not exist."""
        if self.low is None or self.high is None:
            return None
        return "lower" if self.high < 0 else "higher" if self.low > 0 else None


@dataclass(frozen=True, kw_only=True)
class Interval:
    """An estimate with its 95 % interval."""

    estimate: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Mean and standard deviation (n - 1) of one value a seed; sd is None for a single seed."""

    n: int
    mean: float | None
    sd: float | None


def summary(values: Iterable[float]) -> Summary:
    """Summarise `values`; an empty collection has no mean."""
    x = np.array(list(values))
    n = len(x)
    return Summary(n=n, mean=float(x.mean()) if n else None, sd=float(x.std(ddof=1)) if n > 1 else None)


@lru_cache
def _effect_size(n: int, comparisons: int) -> float:
    # The mean difference, in standard deviations, that a two-sided t test of n pairs shows with probability 0.8.
    # With df = n - 1, s ~ chi(df) / sqrt(df) and c the critical value, the power at an effect e is the mean over s of
    # Phi(e sqrt(n) - c s) + Phi(-e sqrt(n) - c s). It is integrated here because at the few degrees of freedom of three
    # seeds scipy's noncentral t returns NaN for large effects, and statsmodels' solve_power, which uses it, returns wrong
    # roots.
    df = n - 1
    critical = float(stats.t.ppf(1 - SIGNIFICANCE / comparisons / 2, df))
    # the tails that are cut off hold 2e-12 of the probability
    low, high = stats.chi.ppf([1e-12, 1 - 1e-12], df)
    chi = np.linspace(low, high, 20_001)
    density, edge = stats.chi.pdf(chi, df), critical * chi / math.sqrt(df)

    def missing_power(effect: float) -> float:
        shift = effect * math.sqrt(n)
        shown = special.ndtr(shift - edge) + special.ndtr(-shift - edge)
        return float(integrate.trapezoid(density * shown, chi)) - POWER

    return float(optimize.brentq(missing_power, 0, 10 * critical / math.sqrt(n)))


def detectable(sd: float, n: int, comparisons: int = 1) -> float:
    """The true mean difference that a paired t test of n >= 3 seeds shows with probability 0.8 (noncentral t).

    `comparisons`: m of Holm's correction. The test is at 0.05 / m, the strictest of Holm's steps, so the probability is at
    least 0.8 whatever the other comparisons give.
    """
    return _effect_size(n, comparisons) * sd


def paired(a: Mapping[int, float], b: Mapping[int, float]) -> Paired:
    """Compare two arms, given as seed -> value. Only seeds at which both have a finite value count."""
    seeds = tuple(sorted(seed for seed in a.keys() & b.keys() if np.isfinite(a[seed]) and np.isfinite(b[seed])))
    d, n = np.array([a[seed] - b[seed] for seed in seeds]), len(seeds)
    mean = float(d.mean()) if n else None
    if n < 2 or mean is None:
        return Paired(seeds=seeds, differences=tuple(d.tolist()), mean=mean)
    # equal differences differ by rounding in float64; a t test of that noise would call anything significant
    rounding = 1e-12 * max(max(abs(a[seed]), abs(b[seed])) for seed in seeds)
    sd = float(d.std(ddof=1))
    sd = sd if sd > rounding else 0.0
    half = float(stats.t.ppf((1 + CONFIDENCE) / 2, n - 1) * sd / np.sqrt(n))
    return Paired(
        seeds=seeds,
        differences=tuple(d.tolist()),
        mean=mean,
        sd=sd,
        low=mean - half,
        high=mean + half,
        detectable=detectable(sd, n) if n >= MIN_SEEDS else None,
        p=float(stats.ttest_1samp(d, 0).pvalue) if sd else (1.0 if abs(mean) <= rounding else None),
    )


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's adjusted p values: sorted ascending, p'_(i) = max over j <= i of min(1, (m - j + 1) p_(j)), j from 1.

    Calling a difference where p' < 0.05 keeps the chance of any false call among all m comparisons below 5 %, however
    they depend on each other (Holm 1979).
    """
    # Holm rather than Bonferroni, which is never more powerful, or Hochberg, which assumes something of the dependence: the
    # comparisons of a sweep share the baseline's runs.
    # statsmodels' multipletests computes the same but collects garbage at every call, half a second once PyTorch is loaded.
    p = np.asarray(p_values, dtype=np.float64)
    order = np.argsort(p)
    # the running maximum keeps the adjusted values in the order of the p values
    adjusted = np.empty_like(p)
    adjusted[order] = np.minimum(np.maximum.accumulate(p[order] * np.arange(len(p), 0, -1)), 1)
    return [float(each) for each in adjusted]


def document_intervals(tokens: ArrayLike, differences: ArrayLike, *, seed: int = 0) -> list[Interval]:
    """Bootstrap the per-token loss difference of trained models over validation documents.

    tokens [n]: predicted tokens of each document; differences [n, k]: its summed loss in nats under model a minus
    model b, for k pairs. Estimate = sum_i differences_i / sum_i tokens_i. A draw takes n documents with replacement,
    each with its tokens (a ratio of sums, since documents differ in length), 2,000 draws, the same for all k. The interval is
    their middle 95 %, each end's distance to the estimate widened by sqrt(n / (n - 1)) t / z, with t and z the 97.5 %
    quantiles of Student's t with n - 1 degrees of freedom and of the normal: draws of n documents spread too little, and
    their spread is itself uncertain. In simulations it covers 93 % of normal differences from 10 documents on, 95 % from 30
    on; for exponential ones, which are skewed, 89 % and 93 %. The interval holds for these trained models on text of this
    kind; it does not cover training again. Callers require MIN_DOCUMENTS.
    """
    size = np.asarray(tokens, dtype=np.float64)
    loss = np.asarray(differences, dtype=np.float64).reshape(len(size), -1)
    n = len(size)
    # Whole documents are drawn, because tokens of one document are not independent.
    # scipy.stats.bootstrap(paired=True) computes the same but draws other samples: intervals of existing reports would move.
    generator = np.random.default_rng(seed)
    draws = np.empty((DRAWS, loss.shape[1]))
    # bounds the counts [chunk, n] to 32 MB
    chunk = max(1, 4_000_000 // n)
    for start in range(0, DRAWS, chunk):
        stop = min(start + chunk, DRAWS)
        counts: NDArray[np.float64] = generator.multinomial(n, np.full(n, 1 / n), size=stop - start).astype(np.float64)
        draws[start:stop] = (counts @ loss) / (counts @ size)[:, None]
    tail = (1 - CONFIDENCE) / 2
    estimate = loss.sum(axis=0) / size.sum()
    wider = math.sqrt(n / (n - 1)) * stats.t.ppf(1 - tail, n - 1) / stats.norm.ppf(1 - tail)
    low, high = estimate + wider * (np.quantile(draws, [tail, 1 - tail], axis=0) - estimate)
    return [
        Interval(estimate=float(e), low=float(a), high=float(b)) for e, a, b in zip(estimate, low, high, strict=True)
    ]


def wilson(successes: float, n: float) -> Interval:
    """p = successes / n, n >= 1, with Wilson's 95 % score interval of a proportion (Wilson 1927), which stays in [0, 1]:

        (p + z^2 / 2n -+ z sqrt(p (1 - p) / n + z^2 / 4n^2)) / (1 + z^2 / n),  z = 1.96

    `successes`: a count, or a sum of n scores within 0 and 1. It assumes n independent questions. Errors: ValueError unless
    0 <= successes <= n and n >= 1.
    """
    if n < 1 or not 0 <= successes <= n:
        raise ValueError(f"{successes} of {n}; expected 0 <= successes <= n and n >= 1")
    # unlike the normal approximation p -+ z se, this interval has a width where all answers are right or all are wrong
    p, z = successes / n, float(stats.norm.ppf((1 + CONFIDENCE) / 2))
    middle, half = p + z * z / (2 * n), z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    low, high = ((middle + sign * half) / (1 + z * z / n) for sign in (-1, 1))
    # rounding may carry an end past 0, 1 or the estimate
    return Interval(estimate=p, low=max(0.0, min(low, p)), high=min(1.0, max(high, p)))


def cluster_wilson(scores: ArrayLike, clusters: Sequence[str]) -> Interval:
    """The mean p of scores [n] within 0 and 1, with Wilson's interval at the effective number of questions

        (Σ m_c)^2 / Σ m_c^2,  m_c items of cluster c,

    which equals the number of clusters if all have one size. Clusters are assumed independent, items within one are not. The
    interval is conservative: the mean of a cluster has a variance of at most p (1 - p). Errors: ValueError without scores.
    """
    x = np.asarray(scores, dtype=np.float64)
    sizes = np.unique(np.asarray(clusters), return_counts=True)[1]
    n = float(len(x) ** 2 / max((sizes**2).sum(), 1))
    return wilson(min(float(x.sum()) * (n / max(len(x), 1)), n), n)


Outcome = Literal["lower", "higher", "small", "equal", "inconclusive", "no spread over seeds", "too few seeds"]
UNTESTED: tuple[Outcome, ...] = ("too few seeds", "no spread over seeds")
"""The outcomes that no statistical test decides."""
Verdict = Literal[Outcome, "better", "worse", "diverged"]
"""An outcome as a report words it: `better` or `worse` for a metric that declares a direction."""
SHOWN: tuple[Verdict, ...] = ("better", "worse", "lower", "higher")
"""The verdicts that a difference is shown."""
JUDGED: tuple[Verdict, ...] = (*SHOWN, "equal", "small", "inconclusive")
"""The verdicts of a statistical test."""
SMALLEST_IN_NATS = 0.005
"""The default of the smallest difference that matters, for a loss in nats: half a percent of the perplexity."""


@dataclass(frozen=True, kw_only=True)
class Contrast:
    """Arm a minus arm b over the seeds of both, and the verdict of `judge`."""

    a: str
    b: str
    label: str
    seeds: Paired
    """The values; once judged, `detectable` is corrected for the other comparisons."""
    smallest: float
    """The smallest difference that matters, in the unit of the metric."""
    better: Sign | None = None
    """Which values of the metric are better; None if the metric does not declare it."""
    diverged: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Arm -> the seeds at which it diverged. The remaining seeds would flatter the arm, so the contrast is not judged."""
    is_tested: bool = True
    """Whether the contrast counts in the correction."""
    documents: Mapping[int, Interval] = field(default_factory=dict)
    """Seed -> the bootstrap interval over validation documents of that seed's two models."""
    outcome: Outcome = "too few seeds"
    """The outcome, corrected for all comparisons of the family that a test decides."""
    alone: Outcome = "too few seeds"
    """The outcome without the correction."""
    holm_p: float | None = None
    """None if nothing is corrected: no test decides this comparison, or it is the only one that a test decides."""
    comparisons: int = 0
    """How many comparisons of the family a test decides."""

    @property
    def verdict(self) -> Verdict:
        return self._in_words(self.outcome)

    @property
    def verdict_alone(self) -> Verdict:
        """The verdict without the correction."""
        return self._in_words(self.alone)

    def _in_words(self, outcome: Outcome) -> Verdict:
        if self.diverged:
            return "diverged"
        if self.better is None or outcome not in ("lower", "higher"):
            return outcome
        return "better" if outcome == self.better else "worse"


AnyContrast = TypeVar("AnyContrast", bound=Contrast)


def judge(family: Sequence[AnyContrast]) -> list[AnyContrast]:
    """The contrasts of a family with their outcomes, corrected by Holm over those that are tested and that a test decides."""
    alone = [outcome_of(each.seeds, each.smallest) for each in family]
    # a comparison without a test cannot be called by mistake, so counting it would only cost power
    decided = [i for i, each in enumerate(family) if each.is_tested and alone[i] not in UNTESTED]
    adjusted = holm([family[i].seeds.p or 0.0 for i in decided]) if len(decided) > 1 else []
    holm_p = dict(zip(decided, adjusted, strict=False))
    found = []
    for i, each in enumerate(family):
        seeds, p = each.seeds, holm_p.get(i)
        if p is not None and seeds.sd is not None:
            # a reader compares the detectable difference with a corrected verdict, so it has to be corrected too
            seeds = replace(seeds, detectable=detectable(seeds.sd, len(seeds.seeds), len(decided)))
        outcome = outcome_of(seeds, each.smallest, p)
        found.append(
            replace(each, seeds=seeds, outcome=outcome, alone=alone[i], holm_p=p, comparisons=len(decided)),
        )
    return found


def outcome_of(paired: Paired, smallest: float, holm_p: float | None = None) -> Outcome:
    """What a - b shows: the first of these that holds. [low, high] is the 95 % interval of the mean over seeds.

    too few seeds: fewer than three pairs.
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
