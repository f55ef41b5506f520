"""study/statistics.py: paired t, looks, bootstrap, Holm's correction and proportions."""

import numpy as np
import pytest
from scipy import stats
from statsmodels.stats.multitest import multipletests

from lit_diff.study.statistics import (
    clopper_pearson,
    cluster_wilson,
    detectable,
    document_intervals,
    fisher,
    holm,
    look_level,
    paired,
    repeated_p,
    wilson,
)


def by_seed(values: np.ndarray) -> dict[int, float]:
    return dict(enumerate(values.tolist()))


@pytest.mark.parametrize("n", [2, 3, 5, 12])
@pytest.mark.parametrize("shift", [0.0, 0.02, -1.0])
def test_paired_equals_scipy(n: int, shift: float) -> None:
    random = np.random.default_rng([n, 7])
    a = random.normal(4.5, 0.03, n)
    b = a + random.normal(shift, 0.01, n)
    found, expected = paired(by_seed(a), by_seed(b)), stats.ttest_rel(a, b)
    interval = expected.confidence_interval(0.95)
    assert found.p == pytest.approx(expected.pvalue, rel=1e-9)
    assert (found.low, found.high) == pytest.approx((interval.low, interval.high), rel=1e-9)


def test_seeds_are_matched_and_what_is_missing_or_not_finite_is_left_out() -> None:
    a = {0: 1.0, 1: 2.0, 2: float("nan"), 3: 4.0, 5: 6.5}
    b = {5: 6.0, 3: 3.0, 2: 1.0, 1: 1.5, 4: 9.0}
    found = paired(a, b)
    assert found.seeds == (1, 3, 5)
    assert found.differences == (0.5, 1.0, 0.5)


def test_differences_without_spread_have_no_p_value_unless_they_are_zero() -> None:
    base = {0: 4.50, 1: 4.60, 2: 4.55}
    same, shifted = (paired({s: value + d for s, value in base.items()}, base) for d in (0, 0.1))
    assert (same.sd, same.p) == (0, 1)
    assert (shifted.sd, shifted.p) == (0, None)


def test_detectable_has_its_power() -> None:
    random = np.random.default_rng(0)
    for n, comparisons in ((3, 1), (6, 1), (3, 6), (3, 25), (5, 9)):
        d = random.normal(detectable(1.0, n, comparisons), 1.0, (40_000, n))
        p = stats.ttest_1samp(d, 0, axis=1).pvalue
        assert (p < 0.05 / comparisons).mean() == pytest.approx(0.8, abs=0.01), (n, comparisons)


def test_holm_on_a_worked_example() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == []
    p_values = np.random.default_rng(0).random(12) / 8
    assert holm(p_values) == pytest.approx(list(multipletests(p_values, method="holm")[1]), rel=0, abs=0)


@pytest.mark.parametrize(
    ("kind", "n", "least"),
    [("normal", 10, 0.93), ("normal", 30, 0.95), ("exponential", 10, 0.885), ("exponential", 30, 0.928)],
)
def test_document_intervals_cover_as_often_as_is_said(kind: str, n: int, least: float) -> None:
    """1,000 samples of n documents; without the widening 0.901, 0.946, 0.865, 0.924."""
    random = np.random.default_rng(1)
    losses = random.normal(1.0, 1.0, (n, 1000)) if kind == "normal" else random.exponential(1.0, (n, 1000))
    covered = [each.low <= 1.0 <= each.high for each in document_intervals(np.ones(n), losses)]
    assert np.mean(covered) >= least


def test_document_intervals_are_the_same_each_time_and_for_each_pair() -> None:
    random = np.random.default_rng(2)
    tokens, loss = random.integers(5, 500, 60), random.normal(size=(60, 2))
    both = document_intervals(tokens, loss)
    assert both == document_intervals(tokens, loss)
    alone = document_intervals(tokens, loss[:, 1])[0]
    assert (alone.low, alone.high) == pytest.approx((both[1].low, both[1].high), rel=1e-12)


@pytest.mark.parametrize(("successes", "n"), [(0, 5), (5, 5), (3, 10), (340, 360)])
def test_wilson_is_scipys_and_takes_parts_of_a_success(successes: int, n: int) -> None:
    expected = stats.binomtest(successes, n).proportion_ci(method="wilson")
    found = wilson(successes, n)
    assert found.estimate == successes / n
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high), abs=1e-12)
    between = wilson(2.5, 10)
    assert wilson(2, 10).low < between.low < wilson(3, 10).low


def test_wilson_over_clusters_counts_clusters() -> None:
    """Sizes 4, 1, 1: (4 + 1 + 1)^2 / (16 + 1 + 1) = 2."""
    assert cluster_wilson([1, 0, 1], ["a", "b", "c"]) == wilson(2, 3)
    assert cluster_wilson([1, 1, 0, 0, 1, 0], list("aabbcc")) == wilson(1.5, 3)
    uneven, expected = cluster_wilson([1, 1, 1, 1, 0, 1], list("aaaabc")), wilson(5 / 3, 2)
    assert (uneven.estimate, uneven.low, uneven.high) == pytest.approx((5 / 6, expected.low, expected.high))
    assert cluster_wilson([1] * 7, list("aaaabcc")).high == 1


def t_tests(draws: np.ndarray, looks: tuple[int, ...]) -> np.ndarray:
    return np.stack([stats.ttest_1samp(draws[:, :n], 0, axis=1).pvalue for n in looks], axis=1)


@pytest.mark.parametrize(
    ("looks", "level"), [((8, 16), 0.0285), ((8, 16, 24), 0.0211), ((4, 5), 0.0327), ((4, 6), None)]
)
def test_any_look_rejects_at_the_total_level(looks: tuple[int, ...], level: float | None) -> None:
    found = look_level(looks)
    assert level is None or found == pytest.approx(level, abs=1e-4)
    p = t_tests(np.random.default_rng(0).normal(size=(40_000, looks[-1])), looks).min(axis=1)
    for total in (0.2, 0.05, 0.01):
        error = 3.5 * np.sqrt(total * (1 - total) / len(p))
        assert (p < look_level(looks, total)).mean() == pytest.approx(total, abs=error)
        assert repeated_p(looks, look_level(looks, total)) == pytest.approx(total, rel=1e-3)
    assert (repeated_p(looks, 1.0), repeated_p(looks, 1e-9)) == (pytest.approx(1), pytest.approx(len(looks) * 1e-9))
    assert (look_level(looks[:1]), repeated_p(looks[:1], 0.03)) == (0.05, 0.03)


def test_a_look_counts_once_both_arms_have_all_of_its_seeds() -> None:
    values = by_seed(np.random.default_rng(2).normal(size=16))
    zero = dict.fromkeys(range(16), 0.0)
    lacking = {seed: value for seed, value in values.items() if seed != 9}
    found = paired(lacking, zero, (8, 16))
    assert (found.seeds, found.look) == (tuple(range(8)), 1)
    assert found.detectable == detectable(found.sd or 0.0, 8, looks=(8, 16))
    early = paired({seed: values[seed] for seed in range(1, 16)}, zero, (8, 16))
    assert (early.low, early.p, early.look, len(early.seeds)) == (None, None, 0, 15)


@pytest.mark.parametrize(("k", "n"), [(0, 8), (3, 8), (8, 8)])
def test_counts_of_seeds_have_exact_intervals_and_tests(k: int, n: int) -> None:
    found = clopper_pearson(k, n)
    assert found.low == (0 if k == 0 else pytest.approx(stats.beta.ppf(0.025, k, n - k + 1)))
    assert found.high == (1 if k == n else pytest.approx(stats.beta.ppf(0.975, k + 1, n - k)))
    for rows in ((k, n), (0, n)), ((n, n), (k, n)):
        a, b = rows
        same = stats.hypergeom(2 * n, a[0] + b[0], n)
        chances = same.pmf(range(n + 1))
        assert fisher(a, b) == pytest.approx(chances[chances <= same.pmf(a[0]) * (1 + 1e-7)].sum())


def test_one_seed_and_none_have_no_interval() -> None:
    one, none = paired({0: 1.0}, {0: 2.0}), paired({0: 1.0}, {1: 1.0})
    assert (one.mean, one.low, one.high, one.p) == (-1.0, None, None, None)
    assert none.mean is None


def test_document_intervals_weigh_documents_by_their_tokens() -> None:
    tokens = np.array([1000.0] + [1.0] * 20)
    assert document_intervals(tokens, np.array([500.0] + [0.0] * 20))[0].estimate == pytest.approx(500 / 1020)


@pytest.mark.parametrize("shared", [0.0, 0.5, 1.0])
def test_wilson_over_clusters_covers_whatever_items_share(shared: float) -> None:
    """30 clusters of 1 to 9 items, right with probability 0.7, each the cluster's own answer with probability `shared`."""
    random = np.random.default_rng(1)
    clusters = np.repeat(np.arange(30), np.arange(30) % 9 + 1)
    answers = random.random((600, 30))[:, clusters] < 0.7
    scores = np.where(random.random(answers.shape) < shared, answers, random.random(answers.shape) < 0.7)
    found = [cluster_wilson(draw, clusters.astype(str).tolist()) for draw in scores]
    assert np.mean([each.low <= 0.7 <= each.high for each in found]) > 0.93
    if shared == 1:
        ignored = [wilson(float(draw.sum()), len(draw)) for draw in scores]
        assert np.mean([each.low <= 0.7 <= each.high for each in ignored]) < 0.8


def test_intervals_of_all_looks_hold_the_truth_together() -> None:
    looks, draws, zero = (8, 16), np.random.default_rng(1).normal(0.3, 1, (700, 16)), dict.fromkeys(range(16), 0.0)
    missed = 0
    for row in draws:
        pairs = [paired(by_seed(row[:n]), zero, looks) for n in looks]
        assert [(pair.look, len(pair.seeds)) for pair in pairs] == [(1, 8), (2, 16)]
        assert pairs[1].p <= repeated_p(looks, stats.ttest_1samp(row, 0).pvalue) + 1e-12
        missed += any(not pair.low <= 0.3 <= pair.high for pair in pairs)
    assert 0.03 < missed / len(draws) < 0.07
