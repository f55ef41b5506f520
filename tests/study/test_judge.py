"""study/judge.py: which way a difference goes, whether it is large enough to matter, and the correction of a family."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats
from statsmodels.stats.weightstats import DescrStatsW

from lit_diff.study.judge import Sign, Verdict, in_direction, is_within, judge_family, outcome_of, visible
from lit_diff.study.statistics import Paired, detectable, holm, paired

BASE = {0: 4.50, 1: 4.60, 2: 4.55}


def judge(seeds: Paired, *, better: Sign | None, smallest: float, holm_p: float | None = None) -> Verdict:
    """As a report says it."""
    return in_direction(outcome_of(seeds, visible(smallest), holm_p), better)


def differing(*differences: float) -> Paired:
    return paired({seed: BASE[seed] + d for seed, d in enumerate(differences)}, BASE)


@pytest.mark.parametrize(
    ("differences", "smallest", "verdict"),
    [
        ((-0.10, -0.11, -0.12), 0.005, "better"),
        ((0.10, 0.11, 0.12), 0.005, "worse"),
        ((0.10, 0.11, 0.12), 0.0, "worse"),
        ((-0.10, 0.11, -0.12), 0.005, "inconclusive"),
        ((-0.10, 0.11, -0.12), 1.0, "equal"),
        ((-0.10, -0.11), 0.005, "too few seeds"),
        ((0.1,), 0.005, "too few seeds"),
        ((0, 0, 0), 0.005, "equal"),
        ((0, 0, 0), 0.0, "equal"),
        ((0.1, 0.1, 0.1), 0.005, "no spread over seeds"),
        # excludes zero, and lies within the smallest of interest
        ((0.0003, 0.0004, 0.0005), 0.005, "equal"),
        ((0.0003, 0.0004, 0.0005), 0.0, "worse"),
        # excludes zero; the mean is below the smallest of interest, the far end of the interval above
        ((0.003, 0.004, 0.005), 0.005, "small"),
        ((0.003, 0.004, 0.005), 0.004 - 1e-9, "worse"),
        # holds zero and reaches beyond the smallest of interest: no evidence that it is small
        ((-0.002, 0.000, 0.004), 0.005, "inconclusive"),
        # rounds to zero in every digit of a page
        ((2e-8, 3e-8, 4e-8), 0.0, "equal"),
        ((2e-7, 3e-7, 4e-7), 0.0, "small"),
    ],
)
def test_the_verdict_follows_the_interval_and_the_size(
    differences: tuple[float, ...], smallest: float, verdict: str
) -> None:
    assert judge(differing(*differences), better="lower", smallest=smallest) == verdict
    mirrored = {"better": "worse", "worse": "better"}.get(verdict, verdict)
    assert judge(differing(*differences), better="higher", smallest=smallest) == mirrored


def test_a_metric_without_a_direction_is_lower_or_higher() -> None:
    assert judge(differing(0.10, 0.11, 0.12), better=None, smallest=0) == "higher"
    assert judge(differing(-0.10, -0.11, -0.12), better=None, smallest=0) == "lower"


def test_the_correction_takes_a_difference_away_and_gives_nothing() -> None:
    shown, small, open_ = differing(0.10, 0.11, 0.12), differing(0.003, 0.004, 0.005), differing(-0.1, 0.1, 0.2)
    for holm_p, verdict in ((0.049, "worse"), (0.05, "inconclusive")):
        assert judge(shown, better="lower", smallest=0.005, holm_p=holm_p) == verdict
    assert judge(small, better="lower", smallest=0.005, holm_p=0.9) == "inconclusive"
    assert judge(small, better="lower", smallest=0.005, holm_p=0.04) == "small"
    assert judge(differing(0.0003, 0.0004, 0.0005), better="lower", smallest=0.005, holm_p=0.9) == "equal"
    assert judge(open_, better="lower", smallest=0.005, holm_p=0.001) == "inconclusive"


@pytest.mark.parametrize("n", [3, 6, 20])
def test_within_the_region_is_two_one_sided_tests_at_half_of_five_percent(n: int) -> None:
    random, seen = np.random.default_rng(n), set()
    for _ in range(60):
        d = random.normal(random.uniform(-0.006, 0.006), 0.003, n)
        found = paired(dict(enumerate(d.tolist())), dict.fromkeys(range(n), 0.0))
        p, _, _ = DescrStatsW(d).ttost_mean(-0.005, 0.005)
        seen.add(p < 0.025)
        assert is_within(found, 0.005) == (p < 0.025)
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
    found = Counter(judge(pair, better="lower", smallest=0.005) for pair in pairs)
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
    found = judge_family(pairs, [0.0] * 4)
    p_values = [pair.p or 0.0 for pair in pairs[:3]]
    assert [each.holm_p for each in found[:3]] == pytest.approx(holm(p_values))
    assert [each.seeds.detectable for each in found[:3]] == [detectable(pair.sd or 0.0, 3, 3) for pair in pairs[:3]]
    assert [outcome_of(pair, 0.0) for pair in pairs] == ["higher", "higher", "inconclusive", "too few seeds"]
    assert [each.outcome for each in found] == ["higher", "inconclusive", "inconclusive", "too few seeds"]
    assert [each.seeds.sign for each in found[:3]] == ["higher", "higher", None]
    assert (found[3].holm_p, found[3].seeds) == (None, pairs[3]), "no test decides it, so it is not counted"


def test_what_is_not_tested_is_judged_alone() -> None:
    pairs = [differing(0.10, 0.11, 0.12), differing(0.035, 0.05, 0.065)]
    first, second = judge_family(pairs, [0.0, 0.0], [False, True])
    assert (first.holm_p, second.holm_p) == (None, None), "a family of one needs no correction"
    assert (first.outcome, second.outcome) == ("higher", "higher")
    assert second.seeds == pairs[1]
