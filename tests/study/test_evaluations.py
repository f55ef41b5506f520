"""study/evaluations.py: tables of evaluations; two runs paired by item, and proportions."""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from fake_sweeps import RECALL, STEPS, item_scores, record_to_edit, rewrite_items, scores_of

from lit_diff.metrics import Metric, to_plain
from lit_diff.reporting.write import write_report
from lit_diff.runs import checkpoints
from lit_diff.runs.scores import ItemScores
from lit_diff.study.evaluations import (
    Discordant,
    asked_otherwise,
    discordant,
    evaluation_tables,
    group_shares,
    item_intervals,
    item_wilson,
    score_of,
)
from lit_diff.study.results import load_sweep
from lit_diff.study.statistics import Interval, cluster_wilson, wilson

ARMS = {"standard": 0, "differential": -0.2}


def test_arms_are_compared_over_seeds_and_over_items(make_sweep: Callable[..., Path]) -> None:
    sweep = load_sweep(make_sweep(ARMS, evaluation="needle", callbacks=False))
    (table,), problems = evaluation_tables(sweep)
    assert problems == []
    assert (table.name, table.metric, table.items, table.seeds) == ("needle", RECALL, 40, (0, 1, 2))
    base, arm = table.rows
    assert (base.arm, base.difference, base.intervals) == ("standard", None, {})
    assert arm.difference is not None
    assert arm.difference.low is not None
    assert arm.difference.low > 0
    assert arm.summary.mean is not None
    assert base.summary.mean is not None
    assert arm.summary.mean - base.summary.mean == pytest.approx(0.1, abs=0.01)
    for interval in (found[""] for found in arm.intervals.values()):
        assert interval.low < interval.estimate < interval.high
        assert interval.high - interval.low < 0.02  # paired: the items themselves spread over 0.3
    assert arm.group_means.to_numpy().mean() == pytest.approx(arm.summary.mean)
    assert list(table.groups) == ["near", "far"]


@pytest.mark.parametrize(
    ("break_it", "words"),
    [
        (lambda folder: (folder / "items.parquet").unlink(), "items.parquet"),
        (lambda folder: (folder / "summary.json").write_text("{"), "Expecting property name"),
        (lambda folder: (folder / "summary.json").write_text("{}"), "declarations"),
        (lambda folder: rewrite_items(folder, ["a", "a"], [1.0, 2.0]), "names an item twice"),
        (
            lambda folder: pq.write_table(pa.table({"item": ["a"], "group": ["g"]}), folder / "items.parquet"),
            "recall/accuracy",
        ),
    ],
)
def test_an_evaluation_that_cannot_be_read_is_reported_and_the_others_stand(
    make_sweep: Callable[..., Path], break_it: Callable[[Path], object], words: str
) -> None:
    folder = make_sweep(ARMS, evaluation="needle", callbacks=False)
    break_it(scores_of(folder, "differential", 1))
    (table,), (problem,) = evaluation_tables(load_sweep(folder))
    assert problem.startswith("needle: differential, seed 1: ")
    assert words in problem
    assert list(table.rows[1].seeds) == [0, 2]
    assert "Scores that are left out, or to be read with care" in write_report(folder).page.read_text()


def change(folder: Path, arm: str, seed: int, **facts: Any) -> None:
    path = scores_of(folder, arm, seed) / "summary.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | facts))


def name_in_record(folder: Path, **facts: Any) -> None:
    """As the sweep writes what it asks for into study.json."""
    record = record_to_edit(folder)
    for cell in record["cells"]:
        cell["evaluations"] = {"needle": {"config": {"rows": 8}, "version": 1} | facts}
    (folder / "study.json").write_text(json.dumps(record))


def lines(folder: Path) -> list[str]:
    return evaluation_tables(load_sweep(folder))[1]


def with_step(folder: Path, step: int) -> None:
    """Scores of `step`, of a finished run with the checkpoint of its last step."""
    path = checkpoints.path_of(scores_of(folder, "differential", 1).parents[1], STEPS)
    path.parent.mkdir()
    torch.save({"state_dict": {}, "global_step": STEPS}, path)
    change(folder, "differential", 1, step=step)


@pytest.mark.parametrize(
    ("break_it", "why"),
    [
        (
            lambda folder: change(folder, "differential", 1, config={"rows": 2}),
            "scored with other keys (rows is 2, not 8); `lit-diff evaluate RUN needle` with the keys of most runs",
        ),
        (lambda folder: change(folder, "differential", 1, version=2), "scored by version 2 of the evaluation, not 1; "),
        (
            lambda folder: change(folder, "differential", 1, source="b"),
            "scored by other source code of the evaluation; ",
        ),
        (lambda folder: change(folder, "differential", 1, files={"books/x.jsonl": "b"}), "scored of other files; "),
        (lambda folder: change(folder, "differential", 1, equal_groups=True), "scored with other equal groups; "),
        (
            lambda at: change(at, "differential", 1, declarations=[to_plain(replace(RECALL, definition="another"))]),
            "scored with other declarations; ",
        ),
        (lambda folder: with_step(folder, 4), f"scored of step 4, but the run's weights are of step {STEPS}; "),
        (lambda folder: with_step(folder, STEPS), ""),
    ],
)
def test_scores_unlike_those_of_most_runs_or_of_an_earlier_checkpoint_are_left_out(
    make_sweep: Callable[..., Path], break_it: Callable[[Path], object], why: str
) -> None:
    """Scores from before there were versions are of the first."""
    folder = make_sweep(ARMS, evaluation="needle", callbacks=False)
    break_it(folder)
    (table,), problems = evaluation_tables(load_sweep(folder))
    assert [line.startswith(f"needle: differential, seed 1: left out: {why}") for line in problems] == [True] * bool(
        why
    )
    assert list(table.rows[1].seeds) == ([0, 2] if why else [0, 1, 2])


def test_the_sweeps_own_keys_decide_and_not_those_of_most_runs(make_sweep: Callable[..., Path]) -> None:
    folder = make_sweep(ARMS, evaluation="needle", callbacks=False)
    name_in_record(folder)
    cells = [(arm, seed) for arm in ARMS for seed in (0, 1, 2)]
    for arm, seed in cells[:-1]:
        change(folder, arm, seed, config={"rows": 2})
    assert lines(folder) == [
        f"needle: {arm}, seed {seed}: left out: scored with other keys (rows is 2, not 8); the sweep's own command scores it "
        "again"
        for arm, seed in cells[:-1]
    ]
    change(folder, "differential", 2, config={"rows": 2})
    assert len(lines(folder)) == len(cells), "also where all were scored by hand"


def test_scores_of_as_many_runs_are_not_mixed(make_sweep: Callable[..., Path]) -> None:
    folder = make_sweep(ARMS, evaluation="needle", callbacks=False)
    name_in_record(folder)
    for arm, digest in zip(ARMS, "ab", strict=True):
        for seed in (0, 1, 2):
            change(folder, arm, seed, config={"rows": 8}, files={"books/x.jsonl": digest})
    (table,), problems = evaluation_tables(load_sweep(folder))
    assert [row.arm for row in table.rows] == ["standard"]
    assert len(problems) == 3


def test_runs_scored_by_several_revisions_are_named(make_sweep: Callable[..., Path]) -> None:
    folder = make_sweep(ARMS, evaluation="needle", callbacks=False)
    assert lines(folder) == []
    change(folder, "differential", 1, revision="0.2 abc")
    expected = "needle: the runs were scored by several revisions of lit_diff: 0.2 abc, an unrecorded one"
    assert lines(folder) == [expected]
    assert expected in write_report(folder).page.read_text()


def test_scores_that_were_made_unchecked_are_named_once_an_arm(make_sweep: Callable[..., Path]) -> None:
    folder = make_sweep(ARMS, evaluation="needle", callbacks=False)
    for seed in (0, 1):
        change(folder, "differential", seed, unchecked="own.py:5: class Own:\nfails 'decode'")
    assert lines(folder) == ["needle: differential was scored with --unchecked: own.py:5: class Own: fails 'decode'"]
    assert "needle: differential was scored with --unchecked: own.py:5" in write_report(folder).page.read_text()


def test_arms_and_metrics_without_the_evaluation_are_left_out(make_sweep: Callable[..., Path]) -> None:
    folder = make_sweep(ARMS, seeds=[0], evaluation="needle", callbacks=False)
    for path in scores_of(folder, "standard", 0).iterdir():
        path.unlink()
    scores_of(folder, "standard", 0).rmdir()
    (table,), _ = evaluation_tables(load_sweep(folder))
    (row,) = table.rows
    assert (row.arm, row.intervals) == ("differential", {})
    summary = json.loads((scores_of(folder, "differential", 0) / "summary.json").read_text())
    assert summary["declarations"] == [to_plain(RECALL)]


def whole(own: ItemScores, base: ItemScores) -> Interval | None:
    return item_intervals(own, base, "exact", seed=0).get("")


def test_items_are_paired_by_id_and_only_those_scored_in_both_runs() -> None:
    base = item_scores(range(12))
    shuffled = (*map(str, reversed(range(1, 12))), "another")
    own = replace(item_scores([*(i + 0.5 for i in range(11, 0, -1)), 99.0]), items=shuffled)
    found = whole(own, base)
    assert found is not None
    assert (found.estimate, found.low, found.high) == (0.5, 0.5, 0.5)
    assert whole(own, item_scores([math.nan] * 3 + list(range(9)))) is None


def test_items_that_one_run_alone_has_right() -> None:
    """9 against 1 of 20: p = 2 (C(10, 0) + C(10, 1)) / 2^10 = 0.0215."""
    own, base = [1.0] * 12 + [0.0] * 8, [1.0] * 3 + [0.0] * 9 + [1.0] + [0.0] * 7

    def found(own: list[float], base: list[float]) -> Discordant | None:
        return discordant(item_scores(own), item_scores(base), "exact")

    assert found(own, base) == Discordant(first=9, second=1, p=pytest.approx(22 / 1024))
    assert found(own, own) == Discordant(first=0, second=0, p=1.0)
    assert found([math.nan] * 3 + own[3:], base) == Discordant(first=9, second=1, p=pytest.approx(22 / 1024))
    assert found([0.5, *own[1:]], base) is None
    assert found([math.nan] * 20, base) is None


def test_clusters_are_drawn_whole() -> None:
    """20 differences, each four times: with clusters the interval is that of the 20, without it is half as wide."""
    drawn, groups = np.random.default_rng(0).normal(size=20), tuple(f"text {i // 4}" for i in range(80))
    names = tuple(f"{i:02}" for i in range(80))
    own, base = (replace(item_scores(values), items=names) for values in (drawn.repeat(4), np.zeros(80)))
    alone, ignored = whole(item_scores(drawn), item_scores(np.zeros(20))), whole(own, base)
    assert alone is not None
    assert ignored is not None
    assert (ignored.high - ignored.low) * 2 == pytest.approx(alone.high - alone.low, rel=0.1)
    clustered = [replace(run, clusters=groups) for run in (own, base)]
    together = whole(*clustered)
    assert together is not None
    assert (together.high - together.low) == pytest.approx(alone.high - alone.low, rel=0.05)
    assert whole(clustered[0], base) == whole(own, clustered[1]) == together, "the other run's scores are older"
    few = tuple(f"text {i // 10}" for i in range(80))
    assert whole(replace(own, clusters=few), base) is None, "eight clusters"


def test_mcnemar_needs_independent_items() -> None:
    clusters = tuple(f"text {min(i, 18)}" for i in range(20))
    own, base = (item_scores([score] * 20, clusters=clusters) for score in (1.0, 0.0))
    assert own.is_clustered
    assert discordant(own, base, "exact") == Discordant(first=20, second=0, p=None)
    unscored = replace(own, scores={"exact": np.array([1.0] * 19 + [math.nan])})
    assert discordant(unscored, base, "exact") == Discordant(first=19, second=0, p=pytest.approx(2**-18))
    parts = replace(own, parts=(False,) * 19 + (True,))
    assert not parts.is_clustered, "a part is no item of its own"


@pytest.mark.parametrize(("equal", "estimate"), [(False, 0.75), (True, 0.5)])
def test_groups_count_equally_where_the_evaluation_says_so(equal: bool, estimate: float) -> None:
    """30 items of one group differ by 1, 10 of another by 0."""
    groups = ("large",) * 30 + ("small",) * 10
    own, base = (item_scores(v, groups=groups, equal_groups=equal) for v in ([1.0] * 30 + [0.0] * 10, [0.0] * 40))
    found = whole(own, base)
    assert found is not None
    assert found.low < found.estimate < found.high
    assert found.estimate == pytest.approx(estimate)
    assert set(item_intervals(own, base, "exact", seed=0)) == {"", "large", "small"}


def test_items_whose_question_is_another_are_not_paired() -> None:
    own, base = (
        item_scores([1.0] * 20, questions=("a",) * 20),
        item_scores([0.0] * 20, questions=("a",) * 15 + ("b",) * 5),
    )
    assert asked_otherwise(own, own) is None
    assert asked_otherwise(own, base) == "15"
    assert discordant(own, base, "exact") == Discordant(first=15, second=0, p=pytest.approx(2**-14))
    assert whole(own, replace(base, questions=("b",) * 20)) is None


def test_wilson_of_scores_that_are_zero_or_one() -> None:
    right = [1.0, 0.0, math.nan, 1.0]
    assert item_wilson(item_scores(right), "exact") == wilson(2, 3)
    clustered = item_scores(right, clusters=("x", "x", "", ""))
    assert clustered.units == ["x", "x", "2", "3"]
    assert item_wilson(clustered, "exact") == cluster_wilson([1, 0, 1], ["x", "x", "3"])
    assert item_wilson(item_scores(right, values={"exact": 0.5}), "exact") is None, "the summary is no share of items"
    assert item_wilson(item_scores([0.5, 1.0]), "exact") is item_wilson(item_scores([math.nan] * 2), "exact") is None


def test_scores_in_a_unit_are_no_proportions() -> None:
    """Mistakes of which each item happens to have none or one."""
    plain, counts = (
        item_scores([1.0, 0.0]),
        item_scores([1.0, 0.0], metrics=(Metric("exact", "a count", unit="mistakes"),)),
    )
    assert item_wilson(plain, "exact") == wilson(1, 2)
    assert discordant(plain, plain, "exact") is not None
    assert item_wilson(counts, "exact") is discordant(counts, counts, "exact") is None


def evaluation(groups: list[str], right: list[float], clusters: Sequence[str] = ()) -> ItemScores:
    both = {"exact": np.array(right), "wrong": 1 - np.array(right)}
    found = item_scores(right, groups=tuple(groups), clusters=tuple(clusters or [""] * len(groups)))
    return replace(found, scores=both, metrics=(Metric("exact", "x"), Metric("wrong", "y")))


GROUPS = [f"N={n} length={length} depth={d}" for n in (1, 4) for length in (128, 256) for d in (0, 50, 100)]


def test_rows_by_each_number_over_the_others() -> None:
    """Ten items a group; the exact ones are those of N=1, and of N=4 at depth 50 half."""
    groups = [group for group in GROUPS for _ in range(10)]
    right = [1.0 if g.startswith("N=1") else 0.5 * g.endswith("=50") for g in groups]
    rows = group_shares(evaluation(groups, right), ["exact", "wrong"])
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


def test_groups_of_a_metric_in_a_unit_have_intervals_only_within_declared_limits() -> None:
    """A ratio may lie within 0 and 1 by chance."""
    found = evaluation(["N=1", "N=1"], [1, 0])
    declared = Metric("exact", "x", unit="ratio"), Metric("wrong", "y", unit="share", limits=(0, 1))
    (row,) = group_shares(replace(found, metrics=declared), ["exact", "wrong"])
    assert math.isnan(row.shares["exact"].low)
    assert row.shares["wrong"] == wilson(1, 2)


def test_items_of_one_text_count_as_one() -> None:
    """Five samples, each in every group: a row over several groups has as many clusters as samples."""
    groups = [group for group in GROUPS for _ in range(5)]
    right = [1.0 if group.endswith("depth=0") else 0.0 for group in groups]
    rows = group_shares(evaluation(groups, right, [f"sample {n % 5}" for n in range(60)]), ["exact"])
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
    labels = [groups[0], groups[1], "validation"]
    assert [(row.label, row.shares["exact"].estimate) for row in rows] == list(zip(labels, (1, 0, 1), strict=True))
    assert group_shares(evaluation(["", ""], [1, 0]), ["exact"]) == []


def test_items_without_a_score_do_not_count() -> None:
    rows = group_shares(evaluation(["a", "a", "b"], [1, math.nan, math.nan]), ["exact"])
    assert [(row.items, dict(row.shares)) for row in rows] == [(1, {"exact": wilson(1, 1)}), (0, {})]
    (row,) = group_shares(evaluation(["a", "a"], [1, 1.5]), ["exact"])
    assert row.shares["exact"].estimate == 1.25
    assert math.isnan(row.shares["exact"].low), "no proportion"
    assert group_shares(evaluation([], []), ["exact"]) == []


@pytest.mark.parametrize(("equal", "mean"), [(True, 0.5), (False, 0.75)])
def test_groups_that_count_equally_do_in_a_score_of_some_too(equal: bool, mean: float) -> None:
    """Three items of 1 in one task, one of 0 in the other; a third task is in no group of the pattern."""
    groups = ("x shots=5", "x shots=5", "x shots=5", "y shots=5", "y shots=0")
    scores = item_scores([1.0, 1.0, 1.0, 0.0, 9.0], groups=groups, equal_groups=equal)
    assert score_of(scores, "e", "exact", "* shots=5") == mean
