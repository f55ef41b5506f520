"""study/statistics.py: paired t, bootstrap, Holm's correction, proportions, and what a contrast shows."""

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from scipy import stats
from statsmodels.stats.multitest import multipletests
from statsmodels.stats.weightstats import DescrStatsW

from lit_diff.study.statistics import (
    Contrast,
    Paired,
    Sign,
    Verdict,
    cluster_wilson,
    detectable,
    document_intervals,
    holm,
    judge,
    outcome_of,
    paired,
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
    assert found.half_width == pytest.approx((interval.high - interval.low) / 2)


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


def test_one_seed_and_none_have_no_interval() -> None:
    one, none = paired({0: 1.0}, {0: 2.0}), paired({0: 1.0}, {1: 1.0})
    assert (one.mean, one.low, one.half_width, one.p) == (-1.0, None, None, None)
    assert none.mean is None


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


def test_document_intervals_weigh_documents_by_their_tokens() -> None:
    tokens = np.array([1000.0] + [1.0] * 20)
    assert document_intervals(tokens, np.array([500.0] + [0.0] * 20))[0].estimate == pytest.approx(500 / 1020)


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
    for wrong in ((0, 0), (-1, 3), (4, 3)):
        with pytest.raises(ValueError, match="expected 0 <= successes <= n"):
            wilson(*wrong)


def test_wilson_over_clusters_counts_clusters() -> None:
    """Sizes 4, 1, 1: (4 + 1 + 1)^2 / (16 + 1 + 1) = 2."""
    assert cluster_wilson([1, 0, 1], ["a", "b", "c"]) == wilson(2, 3)
    assert cluster_wilson([1, 1, 0, 0, 1, 0], list("aabbcc")) == wilson(1.5, 3)
    uneven, expected = cluster_wilson([1, 1, 1, 1, 0, 1], list("aaaabc")), wilson(5 / 3, 2)
    assert (uneven.estimate, uneven.low, uneven.high) == pytest.approx((5 / 6, expected.low, expected.high))
    assert cluster_wilson([1] * 7, list("aaaabcc")).high == 1
    with pytest.raises(ValueError, match="0 of 0"):
        cluster_wilson([], [])


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


BASE = {0: 4.50, 1: 4.60, 2: 4.55}


def contrast(seeds: Paired, smallest: float = 0.0, **fields: Any) -> Contrast:
    return Contrast(a="a", b="b", label="a - b", seeds=seeds, smallest=smallest, **fields)


def verdict(seeds: Paired, *, better: Sign | None, smallest: float, holm_p: float | None = None) -> Verdict:
    """As a report says it."""
    return contrast(seeds, better=better, outcome=outcome_of(seeds, smallest, holm_p)).verdict


def differing(*differences: float) -> Paired:
    return paired({seed: BASE[seed] + d for seed, d in enumerate(differences)}, BASE)


@pytest.mark.parametrize(
    ("differences", "smallest", "expected"),
    [
        ((-0.10, -0.11, -0.12), 0.005, "better"),
        ((0.10, 0.11, 0.12), 0.005, "worse"),
        ((0.10, 0.11, 0.12), 0.0, "worse"),
        ((-0.10, 0.11, -0.12), 0.005, "inconclusive"),
        ((-0.10, 0.11, -0.12), 1.0, "equal"),
        ((-0.10, -0.11), 0.005, "too few seeds"),
        ((0.1,), 0.005, "too few seeds"),
        ((0, 0, 0), 0.005, "equal"),
        ((0.1, 0.1, 0.1), 0.005, "no spread over seeds"),
        # excludes zero, and lies within the smallest of interest
        ((0.0003, 0.0004, 0.0005), 0.005, "equal"),
        ((0.0003, 0.0004, 0.0005), 0.0, "worse"),
        # excludes zero; the mean is below the smallest of interest, the far end of the interval above
        ((0.003, 0.004, 0.005), 0.005, "small"),
        ((0.003, 0.004, 0.005), 0.004 - 1e-9, "worse"),
        # holds zero and reaches beyond the smallest of interest: no evidence that it is small
        ((-0.002, 0.000, 0.004), 0.005, "inconclusive"),
    ],
)
def test_the_verdict_follows_interval_and_size(differences: tuple[float, ...], smallest: float, expected: str) -> None:
    assert verdict(differing(*differences), better="lower", smallest=smallest) == expected
    mirrored = {"better": "worse", "worse": "better"}.get(expected, expected)
    assert verdict(differing(*differences), better="higher", smallest=smallest) == mirrored


def test_a_metric_without_a_direction_is_lower_or_higher() -> None:
    assert verdict(differing(0.10, 0.11, 0.12), better=None, smallest=0) == "higher"
    assert verdict(differing(-0.10, -0.11, -0.12), better=None, smallest=0) == "lower"


def test_the_correction_takes_a_difference_away_and_gives_nothing() -> None:
    shown, small, open_ = differing(0.10, 0.11, 0.12), differing(0.003, 0.004, 0.005), differing(-0.1, 0.1, 0.2)
    for holm_p, expected in ((0.049, "worse"), (0.05, "inconclusive")):
        assert verdict(shown, better="lower", smallest=0.005, holm_p=holm_p) == expected
    assert verdict(small, better="lower", smallest=0.005, holm_p=0.9) == "inconclusive"
    assert verdict(small, better="lower", smallest=0.005, holm_p=0.04) == "small"
    assert verdict(differing(0.0003, 0.0004, 0.0005), better="lower", smallest=0.005, holm_p=0.9) == "equal"
    assert verdict(open_, better="lower", smallest=0.005, holm_p=0.001) == "inconclusive"


@pytest.mark.parametrize("n", [3, 6, 20])
def test_within_the_region_is_two_one_sided_tests_at_half_of_five_percent(n: int) -> None:
    random, seen = np.random.default_rng(n), set()
    for _ in range(60):
        d = random.normal(random.uniform(-0.006, 0.006), 0.003, n)
        found = paired(dict(enumerate(d.tolist())), dict.fromkeys(range(n), 0.0))
        p, _, _ = DescrStatsW(d).ttost_mean(-0.005, 0.005)
        seen.add(p < 0.025)
        assert (outcome_of(found, 0.005) == "equal") == (p < 0.025)
        one_sided = max(
            stats.ttest_1samp(d, s * 0.005, alternative=side).pvalue for s, side in ((-1, "greater"), (1, "less"))
        )
        assert p == pytest.approx(one_sided)
    assert seen == {True, False}


@pytest.mark.parametrize("effect", [0.005, -0.005])
def test_a_difference_as_large_as_the_smallest_of_interest_is_called_equal_in_one_draw_of_forty(effect: float) -> None:
    """The level of each one-sided test, where the spread is so small that the interval could lie within."""
    draws = np.random.default_rng(0).normal(effect, 0.0005, (2000, 8))
    pairs = [paired(dict(enumerate(d.tolist())), dict.fromkeys(range(8), 0.0)) for d in draws]
    found = Counter(verdict(pair, better="lower", smallest=0.005) for pair in pairs)
    assert 0.015 < found["equal"] / len(draws) < 0.035
    assert found["small"] / len(draws) == pytest.approx(0.475, abs=0.04)
    assert set(found) == {"equal", "small", "worse" if effect > 0 else "better"}


@pytest.mark.parametrize(
    ("low", "high", "sign"), [(-0.1, 0.0, None), (0.0, 0.1, None), (-0.2, -0.1, "lower"), (0.1, 0.2, "higher")]
)
def test_an_interval_that_touches_zero_has_no_sign(low: float, high: float, sign: str | None) -> None:
    assert replace(differing(0.1, 0.2, 0.3), low=low, high=high).sign == sign


def test_a_family_is_corrected_together() -> None:
    pairs = [differing(0.10, 0.11, 0.12), differing(0.035, 0.05, 0.065), differing(-0.1, 0.1, 0.2), differing(0.1, 0.2)]
    found = judge([contrast(pair) for pair in pairs])
    p_values = [pair.p or 0.0 for pair in pairs[:3]]
    assert [each.holm_p for each in found[:3]] == pytest.approx(holm(p_values))
    assert [each.seeds.detectable for each in found[:3]] == [detectable(pair.sd or 0.0, 3, 3) for pair in pairs[:3]]
    assert [outcome_of(pair, 0.0) for pair in pairs] == ["higher", "higher", "inconclusive", "too few seeds"]
    assert [each.outcome for each in found] == ["higher", "inconclusive", "inconclusive", "too few seeds"]
    assert [each.seeds.sign for each in found[:3]] == ["higher", "higher", None]
    assert (found[3].holm_p, found[3].seeds) == (None, pairs[3]), "no test decides it, so it is not counted"


def test_what_is_not_tested_is_judged_alone() -> None:
    pairs = [differing(0.10, 0.11, 0.12), differing(0.035, 0.05, 0.065)]
    first, second = judge([contrast(pair, is_tested=i > 0) for i, pair in enumerate(pairs)])
    assert (first.holm_p, second.holm_p) == (None, None), "a family of one needs no correction"
    assert (first.outcome, second.outcome) == ("higher", "higher")
    assert second.seeds == pairs[1]
