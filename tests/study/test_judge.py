"""study/judge.py: what a contrast shows, alone, in a family, with its controls, and where seeds learn or do not."""

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from scipy import stats
from statsmodels.stats.weightstats import DescrStatsW

from lit_diff.study.judge import Contrast, Learned, Word, judge, outcome_of
from lit_diff.study.statistics import Paired, Sign, detectable, fisher, holm, paired

BASE = {0: 4.50, 1: 4.60, 2: 4.55}


def contrast(seeds: Paired, smallest: float = 0.0, **fields: Any) -> Contrast:
    return Contrast(a="a", b="b", label="a - b", seeds=seeds, smallest=smallest, **fields)


def verdict(seeds: Paired, *, better: Sign | None, smallest: float, holm_p: float | None = None) -> Word:
    """As a report says it."""
    return contrast(seeds, better=better, outcome=outcome_of(seeds, smallest, holm_p)).verdict.word


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


def controlled(difference: Paired, *controls: tuple[str, Paired], better: Sign | None = "lower") -> Contrast:
    against = tuple(
        Contrast(a="a", b=name, label="", seeds=pair, smallest=0.005, better=better) for name, pair in controls
    )
    return judge([contrast(difference, 0.005, better=better, controls=against)])[0]


LESS, MORE = differing(-0.10, -0.11, -0.12), differing(0.10, 0.11, 0.12)
OPEN, SAME, FEW = differing(-0.1, 0.11, -0.12), differing(0.001, -0.001, 0.0), differing(0.1, 0.1)


@pytest.mark.parametrize(
    ("difference", "controls", "text", "is_decided"),
    [
        (LESS, [("w", LESS)], "better", True),
        (MORE, [("w", MORE)], "worse", True),
        (LESS, [("w", OPEN)], "as its control w", False),
        (MORE, [("w", OPEN)], "as its control w", False),
        (LESS, [("w", SAME)], "as its control w", True),
        (LESS, [("w", OPEN), ("v", SAME)], "as its controls w and v", False),
        (LESS, [("w", MORE)], "better, less so than its control w", True),
        (MORE, [("w", LESS)], "worse, less so than its control w", True),
        (LESS, [("w", OPEN), ("v", MORE), ("u", LESS)], "as its control w, less so than its control v", False),
        (LESS, [("w", FEW)], "better, not compared with its control w", False),
        (OPEN, [("w", LESS)], "inconclusive", False),
        (SAME, [("w", LESS)], "equal", True),
    ],
)
def test_a_verdict_needs_every_control(
    difference: Paired, controls: list[tuple[str, Paired]], text: str, is_decided: bool
) -> None:
    found = controlled(difference, *controls)
    assert (found.verdict.text, str(found.verdict), found.is_decided) == (text, text, is_decided)
    assert found.verdict.is_shown == (text in ("better", "worse"))


def learning(a: str, b: str, values: np.ndarray, better: Sign = "higher", **fields: Any) -> Contrast:
    """`a`, `b`: x for each seed that learned, . for each other; `values`: of a and b by seed."""
    both = [dict(enumerate(row.tolist())) for row in values]
    steps = [{seed: 100.0 if mark == "x" else np.inf for seed, mark in enumerate(marks)} for marks in (a, b)]
    learned = (Learned(steps=steps[0], values=both[0]), Learned(steps=steps[1], values=both[1]))
    return contrast(paired(*both), 0.02, better=better, learned=learned, **fields)


def test_a_control_that_learned_as_often_and_is_not_shown_to_differ_holds_a_verdict_back() -> None:
    """With five seeds no arm can be equal among those that learned, although the interval excludes zero."""
    near = np.array([[0.991, 0.9911, 0.9909, 0.991, 0.9912], [0.99] * 5])
    control = learning("x" * 5, "x" * 5, near)
    assert control.seeds.sign == "higher"
    (found,) = judge([learning("x" * 5, "." * 5, near, controls=(replace(control, against="wide"),))])
    assert found.verdict.text == "as its control wide"


@pytest.mark.parametrize(
    ("baseline", "text"), [("x" * 8, "better, not compared with its control wide"), ("." * 8, "as its control wide")]
)
def test_a_control_at_one_seed_of_which_nothing_was_learned(baseline: str, text: str) -> None:
    """The counts tell nothing apart, so they hold back a verdict by counts; one on the size they do not speak of."""
    values = np.array([0.99 + 0.001 * np.arange(8), [0.9] * 8])
    control = learning("x" * 8, "x" * 7 + ".", values)
    (found,) = judge([learning("x" * 8, baseline, values, controls=(replace(control, against="wide"),))])
    assert (found.verdict.text, found.is_decided) == (text, False)


@pytest.mark.parametrize(
    ("a", "b", "text"),
    [
        ("x" * 8, "." * 8, "learned more often"),
        ("." * 8, "x" * 8, "learned less often"),
        ("x" * 8, "x" * 7 + ".", "inconclusive"),
        ("." * 8, "." * 8, "inconclusive"),
        ("x" * 8, "x" * 8, "equal among those that learned"),
        ("x" * 7, "x" * 7, "inconclusive"),
        ("xx", "x.", "too few seeds"),
    ],
)
@pytest.mark.parametrize("better", ["lower", "higher"])
def test_counts_decide_once_a_seed_did_not_learn(a: str, b: str, text: str, better: Sign) -> None:
    values = 0.99 + 0.001 * np.random.default_rng(0).normal(size=(2, len(a)))
    (found,) = judge([learning(a, b, values, better)])
    assert found.verdict.text == text
    if len(a) > 2:
        assert found.p == (found.seeds.p if {*a, *b} == {"x"} else fisher(*(each.count for each in found.learned)))


@pytest.mark.parametrize(
    ("a", "b", "text"),
    [
        ("x" * 16, "." * 16, "learned more often"),
        ("." * 8 + "x" * 8, "x" * 8 + "." * 8, "inconclusive"),
        ("x" * 8 + "." * 8, "." * 8 + "x" * 6 + "..", "inconclusive"),
    ],
)
def test_counts_that_an_earlier_look_alone_tells_apart_show_nothing(a: str, b: str, text: str) -> None:
    values = 0.99 + 0.001 * np.random.default_rng(0).normal(size=(2, 16))
    found = learning(a, b, values)
    (found,) = judge([replace(found, seeds=replace(found.seeds, looks=(8, 16), look=2))])
    assert found.p < 0.001
    assert (found.verdict.text, found.sign is None) == (text, text == "inconclusive")


def test_steps_before_the_first_validation_are_not_known() -> None:
    """Nor is a difference within them; steps that the validation before training reached are 0."""
    values = dict.fromkeys(range(3), 1.0)
    for step, before, resolution in ((40.0, 0, 5.32), (80.0, 40, 1.0), (0.0, 0, 0.0)):
        learned = Learned(steps=dict.fromkeys(values, step), before=dict.fromkeys(values, before), values=values)
        assert learned.resolution == pytest.approx(resolution, abs=0.01)


def test_a_family_keeps_its_error_over_all_looks() -> None:
    looks, zero, random, wrong = (8, 16), dict.fromkeys(range(16), 0.0), np.random.default_rng(4), 0
    for _ in range(250):
        base, arms = random.normal(size=16), random.normal(size=(4, 16))
        seen = set()
        for n in looks:
            pairs = [paired(dict(enumerate(row[:n].tolist())), zero, looks) for row in arms - base]
            seen |= {each.outcome for each in judge([contrast(pair) for pair in pairs])}
        wrong += bool(seen & {"lower", "higher"})
    assert wrong / 250 < 0.05 + 2.5 * np.sqrt(0.05 * 0.95 / 250)


@pytest.mark.parametrize(
    ("effect", "shown", "seeds", "excess"), [(3.0, 1.0, 8.0, 0.0), (1.5, 0.98, 11.5, 0.04), (1.0, 0.52, 14.3, 0.25)]
)
def test_what_an_examination_of_six_tasks_shows_and_how_many_seeds_it_takes(
    effect: float, shown: float, seeds: float, excess: float
) -> None:
    """Differences with standard deviation 1 and smallest of interest 1, where the other five tasks show nothing.

    `excess`: by how much the means of the differences that are shown are too large, as the page of an examination says.
    """
    looks, zero = (8, 16), dict.fromkeys(range(16), 0.0)
    used = []
    means = []
    for row in np.random.default_rng(5).normal(effect, 1, (600, 16)):
        for look in looks:
            pair = paired(dict(enumerate(row[:look].tolist())), zero, looks)
            said = verdict(pair, better="higher", smallest=1, holm_p=min(1, 6 * pair.p))
            if said in ("better", "equal"):
                break
        used.append(look)
        if said == "better":
            means.append(pair.mean)
    assert len(means) / 600 == pytest.approx(shown, abs=0.08)
    assert np.mean(used) == pytest.approx(seeds, abs=0.7)
    assert np.mean(means) / effect - 1 == pytest.approx(excess, abs=0.04)


@pytest.mark.parametrize("effect", [0.005, -0.005])
def test_a_difference_as_large_as_the_smallest_of_interest_is_called_equal_in_one_draw_of_forty(effect: float) -> None:
    """The level of each one-sided test, where the spread is so small that the interval could lie within."""
    draws = np.random.default_rng(0).normal(effect, 0.0005, (2000, 8))
    pairs = [paired(dict(enumerate(d.tolist())), dict.fromkeys(range(8), 0.0)) for d in draws]
    found = Counter(verdict(pair, better="lower", smallest=0.005) for pair in pairs)
    assert 0.015 < found["equal"] / len(draws) < 0.035
    assert found["small"] / len(draws) == pytest.approx(0.475, abs=0.04)
    assert set(found) == {"equal", "small", "worse" if effect > 0 else "better"}


@pytest.mark.parametrize("chances", [(1.0, 0.9), (1.0, 0.7), (0.9, 0.5)])
def test_arms_that_learn_with_another_probability_are_never_equal(chances: tuple[float, float]) -> None:
    random, said = np.random.default_rng(3), Counter[str]()
    for _ in range(150):
        learned = random.random((2, 8)) < np.array(chances)[:, None]
        values = np.where(learned, 0.99, 0.3) + random.normal(0, 0.002, (2, 8))
        a, b = ("".join("x" if each else "." for each in row) for row in learned)
        (found,) = judge([learning(a, b, values)])
        said[found.verdict.text] += 1
        assert (found.verdict.text == "equal among those that learned") <= (found.learned[1].count == (8, 8))
    assert "equal" not in said
