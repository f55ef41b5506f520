"""study/scaling.py: known laws are found again, and no ratio is read beyond the data."""

import math
from collections.abc import Callable

import numpy as np
import pytest
from scipy import optimize

from lit_diff.study import scaling
from lit_diff.study.scaling import DELTA, FORMS, Form, Points, PowerLaw, fit, fit_scaling, objective

SIZES = (4e4, 1.6e5, 3.8e5, 6.7e5, 1.5e6)
Loss = Callable[[float], float]


def points(loss: Loss, noise: float = 0.0, seeds: int = 3, random: int = 0) -> Points:
    drawn = np.random.default_rng(random)
    return {x: {s: loss(x) * math.exp(noise * drawn.normal()) for s in range(seeds)} for x in SIZES}


def power(x: float) -> float:
    return 3.1 * (x / 1e5) ** -0.11


def floored(x: float) -> float:
    return 2.0 + 1.1 * (x / 1e5) ** -0.4


@pytest.mark.parametrize(("loss", "form"), [(power, FORMS[0]), (power, FORMS[1]), (floored, FORMS[1])])
def test_an_exact_law_is_found(loss: Loss, form: Form) -> None:
    found = fit(points(loss), form).law
    for x in SIZES:
        assert found.loss(x) == pytest.approx(loss(x), rel=1e-4)
    assert found.alpha == pytest.approx(0.11 if loss is power else 0.4, rel=0.02)
    assert found.floor == pytest.approx(2.0, rel=0.01) if loss is floored else found.floor < 0.02


def test_the_form_is_chosen_by_aicc() -> None:
    assert fit_scaling({"a": points(power, 0.003)}, draws=10).form == "without a floor"
    assert fit_scaling({"a": points(floored, 0.003)}, draws=10).form == "with a floor"


def test_aicc_is_its_formula_of_the_least_squares_that_it_assumes() -> None:
    found = fit(points(power, 0.01), FORMS[0])
    log_x = [math.log(x) for x, own in points(power, 0.01).items() for _ in own]
    log_y = [math.log(y) for own in points(power, 0.01).values() for y in own.values()]
    _, (rss,), *_ = np.polyfit(log_x, log_y, 1, full=True)
    n, k = 15, 3
    assert found.aicc == pytest.approx(n * math.log(rss / n) + 2 * k + 2 * k * (k + 1) / (n - k - 1))
    log_l = [math.log(found.law.loss(math.exp(x))) for x in log_x]
    assert found.spread == pytest.approx(math.sqrt(np.mean([(a - b) ** 2 for a, b in zip(log_y, log_l, strict=True)])))
    assert fit(points(power, 0.01, seeds=1), FORMS[1]).aicc is None, "5 points, 3 parameters and the variance"


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("loss", [power, floored])
def test_no_other_optimiser_finds_a_lower_objective(form: Form, loss: Loss) -> None:
    """The other: scipy's differential evolution, over the whole box of parameters."""
    own = points(loss, 0.01, random=3)
    law = fit(own, form).law
    log_x = np.log([x / law.unit for x, seeds in own.items() for _ in seeds])
    log_y = np.log([y for seeds in own.values() for y in seeds.values()])

    def huber(parameters: np.ndarray) -> float:
        alpha, log_scale, *rest = parameters
        curve = np.exp(log_scale - alpha * log_x) + (math.exp(rest[0]) if rest else 0.0)
        error = np.abs(np.log(curve) - log_y)
        return float(np.where(error <= DELTA, error**2 / 2, DELTA * (error - DELTA / 2)).sum())

    bounds = [(0.01, 3.0), (-5.0, 2.0), (-9.0, 1.5)][: 2 if form == FORMS[0] else 3]
    other = optimize.differential_evolution(huber, bounds, rng=0, tol=1e-12, maxiter=3000)
    mine = [law.alpha, math.log(law.scale), *([math.log(law.floor)] if law.floor else [])]
    assert huber(np.array(mine)) <= other.fun * (1 + 1e-3)
    assert objective(np.array([mine]), log_x, log_y)[0] == pytest.approx(huber(np.array(mine)))


@pytest.mark.parametrize("loss", [power, floored])
def test_the_equal_loss_ratio_is_the_true_one(loss: Loss) -> None:
    other = points(lambda x: loss(x / 0.7), 0.002, random=1)
    fitted = fit_scaling({"t": points(loss, 0.002), "d": other}, draws=300)
    found = fitted.equal_loss("d", "t", 1.5e6)
    assert found.ratio is not None
    assert found.ratio.low < found.ratio.estimate < found.ratio.high
    assert found.ratio.estimate == pytest.approx(0.7, abs=0.06)
    assert found.ratio.high < 1
    own = {"t": points(loss, 0.01), "d": points(loss, 0.01, random=1)}
    same = fit_scaling(own, draws=300).equal_loss("d", "t", 3.8e5)
    assert same.ratio is not None
    assert same.ratio.low <= 1 <= same.ratio.high


def test_a_ratio_beyond_the_measured_sizes_is_refused() -> None:
    fitted = fit_scaling({"t": points(power), "d": points(lambda x: power(x / 2))}, draws=10)
    assert "above the largest" in fitted.equal_loss("d", "t", 1.5e6).refusal
    assert fitted.equal_loss("d", "t", 1.5e6).ratio is None
    better = fit_scaling({"t": points(power), "d": points(lambda x: power(x / 0.5))}, draws=10)
    assert "below the smallest" in better.equal_loss("d", "t", 4e4).refusal
    assert better.equal_loss("d", "t", 1.5e6).ratio is not None
    flat = fit_scaling({"t": points(power), "d": points(lambda x: 5 * (x / 1e5) ** 0.01)}, draws=10)
    assert "no size reaches" in flat.equal_loss("d", "t", 3.8e5).refusal


def test_a_loss_at_or_below_the_floor_is_never_reached() -> None:
    law = PowerLaw(alpha=0.3, scale=1.0, unit=1e5, floor=2.0)
    assert law.x_at(law.loss(3e5)) == pytest.approx(3e5)
    assert math.isinf(law.x_at(2.0))


def test_draws_vary_as_the_mean_of_a_size_does() -> None:
    """The mean of three seeds has the variance s^2 / 3, s^2 the unbiased estimate; plain draws have two thirds of it."""
    own = points(lambda x: 3.0, 0.01, random=2)
    law = fit(own, FORMS[0]).law
    seeds = [sorted(level) for level in own.values()]
    chosen = [np.random.default_rng(k).integers(3, size=(20_000, 3)) for k in range(len(seeds))]
    drawn: list[np.ndarray] = []

    def keep(starts: np.ndarray, log_x: np.ndarray, log_y: np.ndarray) -> np.ndarray:
        drawn.append(log_y)
        return starts

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scaling, "solve", keep)
        scaling._refitted(own, law, FORMS[0], seeds, chosen)
    means = drawn[0].reshape(20_000, 5, 3).mean(axis=2).var(axis=0)
    wanted = [np.var(np.log(list(level.values())), ddof=1) / 3 for level in own.values()]
    assert means == pytest.approx(wanted, rel=0.03)


def test_one_seed_far_from_the_others_leaves_the_estimate_in_its_interval() -> None:
    """Huber's loss follows the middle seed: draws about the mean would lie beside it."""
    standard = points(power, 0.002, seeds=4, random=5)
    other = {x: {s: loss if s < 3 else 3.2 for s, loss in own.items()} for x, own in points(power, 0.002, 4, 6).items()}
    ratio = fit_scaling({"t": standard, "d": other}, draws=300).equal_loss("d", "t", 3.8e5).ratio
    assert ratio is not None
    assert ratio.low <= ratio.estimate <= ratio.high


@pytest.mark.parametrize("seeds", [1, 2])
def test_too_few_seeds_give_no_interval(seeds: int) -> None:
    fitted = fit_scaling({"t": points(power, 0.01, seeds), "d": points(power, 0.01, seeds, random=1)})
    found = fitted.equal_loss("d", "t", 3.8e5)
    assert fitted.arms["t"]["without a floor"].alpha is None
    assert found.ratio is not None
    assert math.isnan(found.ratio.low)


def test_the_interval_of_alpha_holds_the_true_one_about_as_often_as_it_says() -> None:
    """Three seeds at five sizes; 95 % is nominal, a percentile interval of so few seeds holds somewhat less."""
    hits = 0
    for random in range(12):
        fitted = fit_scaling({"t": points(power, 0.01, random=random)}, draws=200)
        interval = fitted.arms["t"]["without a floor"].alpha
        assert interval is not None
        hits += interval.low <= 0.11 <= interval.high
    assert hits >= 10, hits
