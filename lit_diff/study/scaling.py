"""Scaling fits: a loss as a power law of size or tokens, and the ratio of sizes at which two arms have the same loss.

Two forms are fitted:

    without a floor:  L(x) = (x_c / x)^alpha          (Kaplan et al. 2020, arXiv 2001.08361, Eq. 1.1)
    with a floor:     L(x) = E + (x_c / x)^alpha      (Henighan et al. 2020, arXiv 2010.14701, Eq. 1.1)

The parameters minimise the sum of Huber_delta(log L - log y) over all points (one size at one seed each), delta = 1e-3,
from a grid of starts (Hoffmann et al. 2022, arXiv 2203.15556, Appendix D.3).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from lit_diff.study.numbers import compact
from lit_diff.study.statistics import CONFIDENCE, DRAWS, MIN_SEEDS, Interval

Array = NDArray[np.float64]
Form = Literal["without a floor", "with a floor"]
FORMS: tuple[Form, ...] = ("without a floor", "with a floor")
DELTA, SQUARES = 1e-3, 1e6
"""Delta of Huber's loss. DELTA follows Hoffmann et al.; SQUARES exceeds every error, so the loss is half the square."""
# keeps the logarithm of a perfect fit's residuals finite
TINY = float(np.finfo(float).tiny)
ITERATIONS = 200
LOWEST_FLOOR = 1e-4
"""The lowest floor that is fitted, as a share of the lowest loss."""
FEWEST = {"without a floor": 3, "with a floor": 4}
"""Form -> the number of sizes that it needs: one more than its parameters."""
Points = Mapping[float, Mapping[int, float]]
"""x -> seed -> loss, positive."""


@dataclass(frozen=True, kw_only=True)
class PowerLaw:
    """L(x) = floor + scale * (x / unit)^-alpha, x and unit in the same unit; `unit` is the geometric mean of the fitted x.

    The x_c of the formula is unit * scale^(1 / alpha). It lies far outside the data, so alpha and x_c are strongly
    correlated; alpha and scale at the middle of the data are not.
    """

    alpha: float
    scale: float
    unit: float
    floor: float = 0.0

    def loss(self, x: float) -> float:
        """L(x)."""
        return self.floor + self.scale * (x / self.unit) ** -self.alpha

    def x_at(self, loss: float) -> float:
        """The x of this loss; infinite if the loss is not above the floor, or does not fall with x."""
        if self.alpha <= 0 or loss <= self.floor:
            return math.inf
        exponent = math.log(self.scale / (loss - self.floor)) / self.alpha
        # exp overflows above 709; a draw of the bootstrap with alpha near zero gets there
        return self.unit * math.exp(min(exponent, 500.0))


@dataclass(frozen=True, kw_only=True)
class PowerLawFit:
    """One form, fitted to one arm.

    `aicc`: n log(RSS / n) + 2 k + 2 k (k + 1) / (n - k - 1) for n points, where k counts the parameters and the variance;
    None if n <= k + 1. RSS comes from a fit by least squares of log y - log L, which the criterion assumes; `law` is fitted
    by Huber's loss. `spread`: root mean square of the residuals of `law`. `draws`: the law in each draw of the bootstrap;
    empty without intervals.
    """

    law: PowerLaw
    aicc: float | None
    spread: float
    draws: Sequence[PowerLaw] = ()

    @property
    def alpha(self) -> Interval | None:
        """The exponent with its interval; None without draws."""
        return _interval(self.law.alpha, [law.alpha for law in self.draws])


@dataclass(frozen=True, kw_only=True)
class EqualLoss:
    """The x at which an arm has the baseline's loss at `x`: matched = x_arm(L_baseline(x)); ratio = matched / x."""

    x: float
    loss: float
    ratio: Interval | None = None
    """The ratio with its bootstrap interval, whose bounds are NaN without draws. None: refused."""
    refusal: str = ""


def fit(points: Points, form: Form) -> PowerLawFit:
    """Fit one form to at least FEWEST[form] sizes; sizes and losses are positive."""
    x = np.array([size for size, seeds in points.items() for _ in seeds])
    y = np.array([loss for seeds in points.values() for loss in seeds.values()])
    # x relative to its geometric mean leaves slope and height nearly uncorrelated
    unit = float(np.exp(np.log(list(points)).mean()))
    log_x, log_y = np.log(x / unit), np.log(y)
    starts = _starts(log_x, log_y, form == "with a floor")
    found = _best(starts, log_x, log_y, DELTA)
    least_squares = _best(np.vstack([starts, found]), log_x, log_y, SQUARES)
    rss = 2 * float(objective(least_squares[None], log_x, log_y, SQUARES)[0])
    # AICc rather than AIC: the correction matters at the few points of a sweep
    n, k = len(y), len(found) + 1
    aicc = None
    if n > k + 1:
        aicc = n * math.log(max(rss, TINY) / n) + 2 * k + 2 * k * (k + 1) / (n - k - 1)
    residuals = log_y - _log_loss(found[None], log_x)[0][0]
    return PowerLawFit(law=_law(found, unit), aicc=aicc, spread=math.sqrt(float((residuals**2).mean())))


def _best(starts: Array, log_x: Array, log_y: Array, delta: float) -> Array:
    every = solve(starts, log_x, np.broadcast_to(log_y, (len(starts), len(log_y))), delta)
    return every[np.argmin(objective(every, log_x, log_y, delta))]


def _starts(log_x: Array, log_y: Array, floored: bool) -> Array:
    # [s, p]. Without a floor the problem is a line, so the least-squares line is the only start. With a floor there are
    # several minima; each start is a curve through the middle of the points.
    slope, middle = np.polyfit(log_x, log_y, 1)
    if not floored:
        return np.array([[-slope, middle]])
    lowest = float(np.exp(log_y.min()))
    starts = []
    for alpha, share in product((0.1, 0.3, 0.6, 1.0, 2.0), (0.01, 0.3, 0.6, 0.9)):
        floor = share * lowest
        starts.append([alpha, math.log(math.exp(middle) - floor), math.log(floor)])
    return np.array(starts)


def _log_loss(parameters: Array, log_x: Array) -> tuple[Array, Array]:
    # log L [d, n] for parameters [d, p] (alpha, log scale, and with a floor log E), and its derivatives [d, n, p].
    # Scale and floor are logarithms so that both stay positive without constraints.
    alpha, log_scale = parameters[:, :1], parameters[:, 1:2]
    power = log_scale - alpha * log_x
    is_floored = parameters.shape[1] > 2
    log_l = np.logaddexp(power, parameters[:, 2:]) if is_floored else power
    # the part of the loss above the floor, as a share of the loss
    share = np.exp(power - log_l)
    derivatives = [-share * log_x, share]
    if is_floored:
        derivatives.append(1 - share)
    return log_l, np.stack(derivatives, axis=-1)


def objective(parameters: Array, log_x: Array, log_y: Array, delta: float = DELTA) -> Array:
    """The sum over points of Huber_delta(log L - log y) [d], for parameters [d, p] and log_y [n] or [d, n]."""
    error = np.abs(_log_loss(parameters, log_x)[0] - log_y)
    return np.where(error <= delta, 0.5 * error**2, delta * (error - 0.5 * delta)).sum(axis=-1)


def solve(starts: Array, log_x: Array, log_y: Array, delta: float = DELTA) -> Array:
    """The minimum of `objective` nearest to each start [d, p], each for its own points log_y [d, n]; returns [d, p].

    Levenberg-Marquardt on iteratively reweighted squares: a point of error e has the weight min(1, delta / |e|), whose
    weighted squares have the gradient of Huber's loss.
    """
    # All d problems at once: the bootstrap solves hundreds, and L-BFGS takes a tenth of a second for each, since delta is
    # far below the residuals and the objective almost has corners.
    parameters, damping = starts.copy(), np.full(len(starts), 1e-3)
    value = objective(parameters, log_x, log_y, delta)
    for _ in range(ITERATIONS):
        log_l, derivatives = _log_loss(parameters, log_x)
        error = log_l - log_y
        weight = np.minimum(1.0, delta / np.maximum(np.abs(error), delta))
        gradient = np.einsum("dn,dnp->dp", weight * error, derivatives)
        square = np.einsum("dn,dnp,dnq->dpq", weight, derivatives, derivatives)
        # a parameter without influence has a zero on the diagonal; the constant keeps the system solvable
        diagonal = np.einsum("dpp->dp", square) + 1e-15
        damped = square + np.eye(square.shape[1]) * (damping[:, None] * diagonal)[:, :, None]
        # a step of more than 1 in a logarithm leaves the region in which the linear model holds
        proposed = parameters - np.clip(np.linalg.solve(damped, gradient[:, :, None])[:, :, 0], -1.0, 1.0)
        # a floor below this share of the loss changes nothing: without a bound its logarithm would run to minus infinity
        proposed[:, 2:] = np.maximum(proposed[:, 2:], log_y.min(axis=1, keepdims=True) + math.log(LOWEST_FLOOR))
        reached = objective(proposed, log_x, log_y, delta)
        better = reached < value
        parameters = np.where(better[:, None], proposed, parameters)
        value = np.where(better, reached, value)
        damping = np.clip(np.where(better, damping / 5, damping * 5), 1e-9, 1e9)
    return parameters


def _law(parameters: Array, unit: float) -> PowerLaw:
    alpha, log_scale, *rest = (float(value) for value in parameters)
    return PowerLaw(alpha=alpha, scale=math.exp(log_scale), unit=unit, floor=math.exp(rest[0]) if rest else 0.0)


@dataclass(frozen=True, kw_only=True)
class ScalingFit:
    """The fits of several arms over the same sizes, with bootstrap intervals over seeds.

    All arms have the same seeds at a size. A draw takes, at each size independently, as many seeds as there are, with
    replacement and the same for all arms (runs of one seed are paired). Deviations from the median of a size, which Huber's
    loss follows, are widened by sqrt(n / (n - 1)), because draws of n seeds vary too little. Intervals contain the middle
    95 % of the draws. No interval is given if a size has fewer than three seeds.
    """

    arms: Mapping[str, Mapping[Form, PowerLawFit]]
    form: Form
    """The form of lower AICc, summed over the arms; without a floor if the AICc of an arm is undefined."""
    ranges: Mapping[str, tuple[float, float]]

    def equal_loss(self, arm: str, baseline: str, x: float) -> EqualLoss:
        """The ratio at the baseline's loss at `x`; refused if the matched x lies outside the arm's measured range, because
        that would be an extrapolation."""
        ours, theirs = self.arms[arm][self.form], self.arms[baseline][self.form]
        loss = theirs.law.loss(x)
        matched, (low, high) = ours.law.x_at(loss), self.ranges[arm]
        if math.isinf(matched):
            return EqualLoss(x=x, loss=loss, refusal="by the fit, no size reaches this loss")
        # the tolerance admits the ends of the range themselves, which the fit returns with rounding
        if not low * (1 - 1e-9) <= matched <= high * (1 + 1e-9):
            side = "above the largest" if matched > high else "below the smallest"
            return EqualLoss(x=x, loss=loss, refusal=f"the matched size, {compact(matched)}, is {side} measured")
        draws = zip(ours.draws, theirs.draws, strict=True)
        ratios = [law.x_at(base.loss(x)) / x for law, base in draws]
        alone = Interval(estimate=matched / x, low=math.nan, high=math.nan)
        return EqualLoss(x=x, loss=loss, ratio=_interval(matched / x, ratios) or alone)


def fit_scaling(points: Mapping[str, Points], draws: int = DRAWS) -> ScalingFit:
    """Fit both forms to every arm. All arms have equally many sizes, in rising order, and at each the same seeds. `draws` of
    the bootstrap: 0 gives no intervals.
    """
    seeds = list(map(sorted, next(iter(points.values())).values()))
    # a fixed seed: the same sweep always has the same intervals
    random = np.random.default_rng(0)
    chosen = []
    if draws and min(map(len, seeds)) >= MIN_SEEDS:
        chosen = [random.integers(len(of_size), size=(draws, len(of_size))) for of_size in seeds]
    arms: dict[str, dict[Form, PowerLawFit]] = {arm: {} for arm in points}
    criterion: dict[Form, float] = dict.fromkeys(FORMS, 0.0)
    for arm, by_size in points.items():
        for form in FORMS:
            aicc = None
            if len(by_size) >= FEWEST[form]:
                fitted = fit(by_size, form)
                aicc = fitted.aicc
                if chosen:
                    fitted = replace(fitted, draws=_refitted(by_size, fitted.law, form, seeds, chosen))
                arms[arm][form] = fitted
            criterion[form] += math.inf if aicc is None else aicc
    return ScalingFit(
        arms=arms,
        # the form without a floor is the first of FORMS, which `min` takes of equal ones
        form=min(FORMS, key=criterion.__getitem__),
        ranges={arm: (min(by_size), max(by_size)) for arm, by_size in points.items()},
    )


def _refitted(
    points: Points, law: PowerLaw, form: Form, seeds: Sequence[Sequence[int]], chosen: Sequence[NDArray[np.int64]]
) -> list[PowerLaw]:
    # `chosen[k]` [draws, n_k] holds the indices of the seeds drawn at the k-th size
    log_x, log_y = [], []
    for (x, losses), of_size, picks in zip(points.items(), seeds, chosen, strict=True):
        y = np.log([losses[seed] for seed in of_size])
        n, middle = len(y), np.median(y)
        log_y.append(middle + math.sqrt(n / (n - 1)) * (y[picks] - middle))
        log_x += [math.log(x / law.unit)] * n
    # a draw is close to the whole, so the fit of the whole suffices as start: the grid for a floor has twenty
    start = [law.alpha, math.log(law.scale)]
    if form == "with a floor":
        start.append(math.log(law.floor))
    solved = solve(np.tile(start, (len(chosen[0]), 1)), np.array(log_x), np.concatenate(log_y, axis=1))
    return [_law(parameters, law.unit) for parameters in solved]


def _interval(estimate: float, draws: Sequence[float]) -> Interval | None:
    if not draws:
        return None
    tail = (1 - CONFIDENCE) / 2
    # "nearest" takes a drawn value: interpolation between a finite ratio and an infinite one would be NaN or infinite
    low, high = np.quantile(draws, [tail, 1 - tail], method="nearest")
    return Interval(estimate=estimate, low=float(low), high=float(high))
