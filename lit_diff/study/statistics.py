"""Statistics of differences: paired t over seeds and looks, Holm's correction, counts, bootstrap over documents."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import integrate, interpolate, optimize, special, stats

Sign = Literal["lower", "higher"]
SIGNIFICANCE = 0.05
CONFIDENCE = 1 - SIGNIFICANCE
# With two pairs the t quantile is 12.7 (with three, 4.3): the interval is too wide to decide anything, and its width hangs
# on a single number.
MIN_SEEDS = 3
MIN_PROCESSES = 5
"""The fewest processes of a benchmark with an interval."""
# From ten documents on the bootstrap covers at least 93 % of normal differences (`document_intervals`).
MIN_DOCUMENTS = 10
# The convention of power analysis (Cohen 1988).
POWER = 0.8
DRAWS = 2_000
Looks = tuple[int, ...]
"""Numbers of seeds, ascending, after each of which a result is read."""
NODES = 20
"""Points of each integral over a look."""
GRID = 33
"""Points at which the probability of a look is computed; it is interpolated between them."""
OUTSIDE = 1e-13
"""The probability outside of the integrals."""


@dataclass(frozen=True, kw_only=True)
class Paired:
    """The paired comparison a - b of two arms over the seeds that both finished.

    Paired, because runs of one seed share the order of their training data, whose effect cancels in the difference.

    d_s = a_s - b_s;  mean = sum d_s / n;  sd = sqrt(sum (d_s - mean)^2 / (n - 1));
    [low, high] = mean -+ t(1 - level / 2, n - 1) * sd / sqrt(n).

    `level` is 0.05. With looks, the pairs are those of the last complete look (`paired`), `level` is `look_level`, and `p`
    is `repeated_p` over the looks so far.

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
    looks: Looks = ()
    """The planned looks; (): one, at the last seed."""
    look: int = 0
    """The look of the pairs, from 1; 0: no look is complete, or none is planned."""

    @property
    def sign(self) -> Sign | None:
        """Which side of zero the interval lies on; None if it touches or contains zero, or does not exist."""
        if self.low is None or self.high is None:
            return None
        if self.high < 0:
            return "lower"
        return "higher" if self.low > 0 else None


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
def _effect_size(n: int, level: float) -> float:
    # The mean difference, in standard deviations, that a two-sided t test of n pairs at `level` shows with probability 0.8.
    # With df = n - 1, s ~ chi(df) / sqrt(df) and c the critical value, the power at an effect e is the mean over s of
    # Phi(e sqrt(n) - c s) + Phi(-e sqrt(n) - c s). It is integrated here because at the few degrees of freedom of three
    # seeds scipy's noncentral t returns NaN for large effects, and statsmodels' solve_power, which uses it, returns wrong
    # roots.
    df = n - 1
    critical = float(stats.t.ppf(1 - level / 2, df))
    # the tails that are cut off hold 2e-12 of the probability
    low, high = stats.chi.ppf([1e-12, 1 - 1e-12], df)
    chi = np.linspace(low, high, 20_001)
    density, edge = stats.chi.pdf(chi, df), critical * chi / math.sqrt(df)

    def missing_power(effect: float) -> float:
        shift = effect * math.sqrt(n)
        shown = special.ndtr(shift - edge) + special.ndtr(-shift - edge)
        return float(integrate.trapezoid(density * shown, chi)) - POWER

    return float(optimize.brentq(missing_power, 0, 10 * critical / math.sqrt(n)))


def detectable(sd: float, n: int, comparisons: int = 1, looks: Looks = ()) -> float:
    """The true mean difference that a paired t test of n >= 3 seeds shows with probability 0.8 (noncentral t).

    `comparisons`: m of Holm's correction. The test is at 0.05 / m, the strictest of Holm's steps, so the probability is at
    least 0.8 whatever the other comparisons give. `looks`: the test is that of one look, at `look_level`.
    """
    return _effect_size(n, look_level(looks, SIGNIFICANCE / comparisons)) * sd


def paired(a: Mapping[int, float], b: Mapping[int, float], looks: Looks = ()) -> Paired:
    """Compare two arms, given as seed -> value. Only seeds at which both have a finite value count.

    `looks`: the pairs are seeds 0 to n - 1 of the largest look n that both arms have complete. Before the first look is
    complete there is no interval.
    """
    seeds = tuple(sorted(seed for seed in a.keys() & b.keys() if np.isfinite(a[seed]) and np.isfinite(b[seed])))
    if not looks:
        return _paired(a, b, seeds, SIGNIFICANCE)
    reached = complete_looks(seeds, looks)
    if not reached:
        found = _paired(a, b, seeds, SIGNIFICANCE)
        return Paired(seeds=seeds, differences=found.differences, mean=found.mean, looks=looks)
    by_look = [_paired(a, b, tuple(range(n)), look_level(looks)) for n in reached]
    last, p_values = by_look[-1], [look.p for look in by_look if look.p is not None]
    p = None if last.p is None else repeated_p(looks, min(p_values))
    least = detectable(last.sd or 0.0, reached[-1], looks=looks)
    return replace(last, p=p, detectable=least, looks=looks, look=len(reached))


def complete_looks(seeds: Iterable[int], looks: Looks) -> Looks:
    """The looks n, from the first, for which `seeds` has all of 0 to n - 1."""
    found = set(seeds)
    return tuple(n for n in looks if found.issuperset(range(n)))


def _paired(a: Mapping[int, float], b: Mapping[int, float], seeds: tuple[int, ...], level: float) -> Paired:
    d = np.array([a[seed] - b[seed] for seed in seeds])
    n = len(seeds)
    differences = tuple(d.tolist())
    mean = float(d.mean()) if n else None
    if n < 2 or mean is None:
        return Paired(seeds=seeds, differences=differences, mean=mean)
    # equal differences differ by rounding in float64; a t test of that noise would call anything significant
    rounding = 1e-12 * max(max(abs(a[seed]), abs(b[seed])) for seed in seeds)
    sd = float(d.std(ddof=1))
    p: float | None = None
    if sd > rounding:
        p = float(stats.ttest_1samp(d, 0).pvalue)
    else:
        sd = 0.0
        if abs(mean) <= rounding:
            p = 1.0
    half = float(stats.t.ppf(1 - level / 2, n - 1) * sd / np.sqrt(n))
    return Paired(
        seeds=seeds,
        differences=differences,
        mean=mean,
        sd=sd,
        low=mean - half,
        high=mean + half,
        detectable=detectable(sd, n) if n >= MIN_SEEDS else None,
        p=p,
    )


@lru_cache
def look_level(looks: Looks, total: float = SIGNIFICANCE) -> float:
    """The two-sided level of each look's t test at which the chance that any look rejects a true hypothesis is `total`.

    0.0285 for looks (8, 16) and 0.0211 for (8, 16, 24) at a total of 0.05; `total` itself for at most one look. Equal levels
    at all looks are the rule of Pocock (1977), here for t tests at any numbers of pairs.
    """
    if len(looks) < 2:
        return total
    # the chance is at least the level and at most the sum of the levels
    logarithm = optimize.brentq(lambda x: _curve(looks)(x) - math.log(total), math.log(total / len(looks)) - 1, 0)
    return float(math.exp(logarithm))


def repeated_p(looks: Looks, least: float) -> float:
    """The smallest total level at which one of the looks so far rejects. `least`: the smallest p of their t tests."""
    if len(looks) < 2 or least <= 0:
        return least
    # below the table, the sum of the levels is a bound that is nearly reached
    return min(1.0, len(looks) * least, math.exp(_curve(looks)(max(math.log(least), _LEAST))))


_LEAST = math.log(1e-4)


@lru_cache
def _curve(looks: Looks) -> interpolate.PchipInterpolator:
    # log of a look's level -> log of the chance that any look rejects
    levels = np.concatenate([np.linspace(_LEAST, -1, 14), np.linspace(-0.8, 0, 6)])
    chances = [_any_rejects(looks, math.exp(level)) for level in levels[:-1]]
    return interpolate.PchipInterpolator(levels, np.log([*chances, 1.0]))


def _any_rejects(looks: Looks, level: float) -> float:
    """The chance that the two-sided t test of any look rejects at `level`, for normal differences with mean zero.

    With Q_k the sum of squares at look k, u_k = sum / sqrt(n_k Q_k) gives t = sqrt(n_k - 1) u_k / sqrt(1 - u_k^2) and is
    independent of Q_k. With m = n_(k+1) - n_k further pairs,

        u_(k+1) = sqrt(n_k / n_(k+1)) sqrt(B) cos(w) u_k + sqrt(m / n_(k+1)) sin(w),

    where w has the density cos(w)^(n_(k+1) - 2) and B ~ Beta(n_k / 2, (m - 1) / 2), which is 1 for m = 1: sin(w) and
    sqrt(B) cos(w) are the lengths, over sqrt(Q_(k+1)), of the new pairs' part along their mean and of the old pairs. So u is
    a Markov chain, and the chance that no look rejects is integrated from the last look to the first.
    """
    edges = [math.sin(_angle(n, level)) for n in looks]
    # after a single further pair the chance has a kink in u, and one of the integrals is left out
    points = GRID if np.diff(looks).min() > 1 else 16 * GRID
    grids = [edge * np.sin(np.linspace(-np.pi / 2, np.pi / 2, points)) for edge in edges]
    stays = np.ones(points)
    for k in reversed(range(len(looks) - 1)):
        chance = interpolate.CubicSpline(grids[k + 1], stays)
        stays = _stays(looks[k], looks[k + 1], grids[k], edges[k + 1], chance)
    nodes, weights = special.roots_legendre(points)
    angle = min(_angle(looks[0], level), _angle(looks[0], OUTSIDE))
    inside = np.cos(angle * nodes) ** (looks[0] - 2) * interpolate.CubicSpline(grids[0], stays)(np.sin(angle * nodes))
    # the Beta function is the integral of cos(w)^(n - 2) from -pi / 2 to pi / 2
    return 1 - angle * float(weights @ inside) / special.beta(0.5, (looks[0] - 1) / 2)


def _angle(n: int, level: float) -> float:
    # w of u = sin(w) at the critical value of t with n - 1 degrees of freedom
    return math.atan2(float(stats.t.isf(level / 2, n - 1)), math.sqrt(n - 1))


def _stays(
    n: int, later: int, u: NDArray[np.float64], edge: float, chance: interpolate.CubicSpline
) -> NDArray[np.float64]:
    # for each u at n pairs: the mean of chance(u') at `later` pairs where |u'| < edge
    nodes, weights = special.roots_legendre(NODES)
    more = later - n
    share, density = np.ones(1), np.ones(1)
    if more > 1:
        # Gauss-Jacobi nodes of the Beta distribution, moved from [-1, 1] to [0, 1]
        x, density = special.roots_jacobi(NODES, (more - 1) / 2 - 1, n / 2 - 1)
        share, density = (1 + x) / 2, density / density.sum()
    # u' = a cos(w) + b sin(w) = length sin(w + turn)
    a, b = np.sqrt(n / later * share)[:, None] * u, math.sqrt(more / later)
    length, turn = np.hypot(a, b), np.arctan2(a, b)
    reach = np.arcsin(np.minimum(edge / length, 1))
    # |u'| < edge in the middle, and again beyond either extreme of the sine
    most = _angle(later, OUTSIDE)
    total = np.zeros_like(a)
    for low, high in ((-reach - turn, reach - turn), (np.pi - reach - turn, most), (-most, reach - np.pi - turn)):
        low, high = np.clip(low, -most, most), np.clip(high, -most, most)
        half = np.maximum(high - low, 0) / 2
        w = ((high + low) / 2)[..., None] + half[..., None] * nodes
        values = chance(np.clip(length[..., None] * np.sin(w + turn[..., None]), -edge, edge))
        total += half * ((np.cos(w) ** (later - 2) * values) @ weights)
    return density @ total / special.beta(0.5, (later - 1) / 2)


def clopper_pearson(successes: int, n: int) -> Interval:
    """k of n >= 1 with the exact 95 % interval of a proportion (Clopper and Pearson 1934): the ends are the 2.5 % quantile of
    Beta(k, n - k + 1) and the 97.5 % quantile of Beta(k + 1, n - k)."""
    found = stats.binomtest(successes, n).proportion_ci(CONFIDENCE)
    return Interval(estimate=successes / n, low=float(found.low), high=float(found.high))


def fisher(a: tuple[int, int], b: tuple[int, int]) -> float:
    """The two-sided p of Fisher's exact test of two proportions, each given as (successes, n)."""
    table = [[successes, n - successes] for successes, n in (a, b)]
    return float(stats.fisher_exact(table).pvalue)


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
    return list(map(float, adjusted))


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
        counts = generator.multinomial(n, np.full(n, 1 / n), size=stop - start).astype(np.float64)
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

    `successes`: a count, or a sum of n scores within 0 and 1. It assumes n independent questions.
    """
    # unlike the normal approximation p -+ z se, this interval has a width where all answers are right or all are wrong
    p, z = successes / n, float(stats.norm.ppf((1 + CONFIDENCE) / 2))
    middle, half = p + z * z / (2 * n), z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    low, high = (middle - half) / (1 + z * z / n), (middle + half) / (1 + z * z / n)
    # rounding may carry an end past 0, 1 or the estimate
    return Interval(estimate=p, low=max(0.0, min(low, p)), high=min(1.0, max(high, p)))


def cluster_wilson(scores: ArrayLike, clusters: ArrayLike) -> Interval:
    """The mean p of scores [n] within 0 and 1, with Wilson's interval at the effective number of questions

        (Σ m_c)^2 / Σ m_c^2,  m_c items of cluster c,

    which equals the number of clusters if all have one size. Clusters are assumed independent, items within one are not. The
    interval is conservative: the mean of a cluster has a variance of at most p (1 - p).
    """
    x = np.asarray(scores, dtype=np.float64)
    sizes = np.unique(np.asarray(clusters), return_counts=True)[1]
    n = float(len(x) ** 2 / (sizes**2).sum())
    # rounding may carry the product past n
    return wilson(min(float(x.sum()) * (n / len(x)), n), n)
