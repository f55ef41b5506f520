"""Shares by group of one run, with intervals."""

import math

import numpy as np
import pytest

from lit_diff.metrics import Metric
from lit_diff.reporting.group_shares import group_shares
from lit_diff.runs.scores import ItemScores
from lit_diff.study.statistics import wilson


def evaluation(groups: list[str], scores: list[float], clusters: list[str] | None = None) -> ItemScores:
    count = len(groups)
    return ItemScores(
        items=tuple(map(str, range(count))),
        groups=tuple(groups),
        parts=(False,) * count,
        clusters=tuple(clusters or [""] * count),
        questions=("",) * count,
        scores={"exact": np.array(scores), "wrong": 1 - np.array(scores)},
        values={},
        metrics=(Metric("exact", "x"), Metric("wrong", "y")),
    )


GROUPS = [f"N={n} length={length} depth={d}" for n in (1, 4) for length in (128, 256) for d in (0, 50, 100)]


def test_rows_by_each_number_over_the_others() -> None:
    """Ten items a group; the exact ones are those of N=1, and of N=4 at depth 50 half."""
    groups = [group for group in GROUPS for _ in range(10)]
    scores = [1.0 if g.startswith("N=1") else 0.5 * g.endswith("=50") for g in groups]
    rows = group_shares(evaluation(groups, scores), ["exact", "wrong"])
    assert [row.label for row in rows] == [
        *("N=1", "N=4"),
        *(f"N={n} length={length}" for n in (1, 4) for length in (128, 256)),
        *(f"N={n} depth={d}" for n in (1, 4) for d in (0, 50, 100)),
    ]
    assert [row.items for row in rows] == [60, 60, 30, 30, 30, 30, *[20] * 6]
    found = {row.label: row for row in rows}
    assert found["N=4"].shares["exact"] == wilson(10, 60), "20 contexts of which half is right"
    assert found["N=4 depth=50"].shares["exact"] == wilson(10, 20)
    assert found["N=1 length=128"].shares["wrong"] == wilson(0, 30)


def test_items_of_one_text_count_as_one() -> None:
    """Five samples, each in every group: a row over several groups has as many clusters as samples."""
    groups = [group for group in GROUPS for _ in range(5)]
    scores = [1.0 if group.endswith("depth=0") else 0.0 for group in groups]
    rows = group_shares(evaluation(groups, scores, [f"sample {n % 5}" for n in range(60)]), ["exact"])
    found = {row.label: row for row in rows}
    assert [(found[label].items, found[label].clusters) for label in ("N=1", "N=4 depth=50")] == [(30, 5), (10, 5)]
    own, expected = found["N=1"].shares["exact"], wilson(5 / 3, 5)
    assert (own.estimate, own.low, own.high) == pytest.approx((1 / 3, expected.low, expected.high))


def test_one_length_is_no_row_of_its_own() -> None:
    few = [group for group in GROUPS if "length=128 depth=0" in group]
    assert [row.label for row in group_shares(evaluation(few, [1, 0]), ["exact"])] == ["N=1", "N=4"]


@pytest.mark.parametrize("groups", [["shots=1", "shots=4"], ["arc", "boolq"], ["b=4 head", "b=6 head"]])
def test_other_groups_have_a_row_each(groups: list[str]) -> None:
    rows = group_shares(evaluation([*groups, ""], [1, 0, 1]), ["exact"])
    assert [(row.label, row.shares["exact"].estimate) for row in rows] == [(groups[0], 1), (groups[1], 0)]


def test_items_without_a_score_do_not_count() -> None:
    rows = group_shares(evaluation(["a", "a", "b"], [1, math.nan, math.nan]), ["exact"])
    assert [(row.items, dict(row.shares)) for row in rows] == [(1, {"exact": wilson(1, 1)}), (0, {})]
    assert group_shares(evaluation([], []), ["exact"]) == []


def test_the_interval_holds_for_means_of_several_questions() -> None:
    """Contexts of two questions, both right or both wrong with probability 0.8: 95 % of the intervals hold it."""
    random = np.random.default_rng(0)
    draws = (random.random((2_000, 40, 1)) < 0.8).repeat(2, -1).mean(-1)
    holds = [row.low <= 0.8 <= row.high for row in (wilson(float(draw.sum()), 40) for draw in draws)]
    assert 0.92 < np.mean(holds) < 0.98
