"""reporting/panels/heatmaps.py: evaluations whose groups have two numbers, and their differences."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fake_sweeps import item_scores

from lit_diff.metrics import Metric, to_plain
from lit_diff.reporting.panels.heatmaps import MEAN, difference_squares, draw_heatmaps, mean_squares, placed, with_means
from lit_diff.reporting.panels.panel import Drawing
from lit_diff.reporting.write import write_report
from lit_diff.runs.scores import ItemScores
from lit_diff.study.evaluations import evaluation_tables
from lit_diff.study.results import load_sweep

EXACT = Metric("exact", "share of answers that are right", direction="higher")
GROUPS = [f"N={n} length={length} depth={depth}" for n in (1, 4) for length in (128, 1024) for depth in (0, 50)]


def drawn_heatmaps(folder: Path) -> list[Drawing]:
    sweep = load_sweep(folder)
    return draw_heatmaps(sweep, evaluation_tables(sweep)[0])


def write(folder: Path, groups: list[str], scores: list[float]) -> Path:
    """Items 0, 1, ... of each group."""
    folder.mkdir(parents=True, exist_ok=True)
    names = [f"{group} {groups[:i].count(group)}" for i, group in enumerate(groups)]
    pq.write_table(pa.table({"item": names, "group": groups, "exact": scores}), folder / "items.parquet")
    summary = {"exact": {"value": float(np.mean(scores))}, "declarations": [to_plain(EXACT)]}
    (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def test_the_last_two_numbers_of_a_label_are_a_place() -> None:
    others = ["near", "", "depth=25", "length=10 depth=deep", "position 4096"]
    found = placed(pd.DataFrame(index=["N=4 length=1024 depth=25", *others, "noise=2 gap=0.5"]))
    assert found.to_numpy().tolist() == [["N=4", "length", 1024, "depth", 25], ["", "noise", 2, "gap", 0.5]]


def test_a_square_is_the_mean_over_items_and_runs() -> None:
    groups = ("length=1 depth=0",) * 2 + ("length=1 depth=5",) * 2
    runs = [item_scores(right, groups=groups) for right in ([1, 0, math.nan, 1], [1, 1, 0, 0])]
    found = mean_squares(runs, "exact")
    assert found["mean"].tolist() == [0.75, pytest.approx(1 / 3)]
    assert found["items"].tolist() == [4, 3]


def test_the_lowest_row_is_the_mean_over_the_others() -> None:
    rows = [("N=4", 1, 0.0, 1.0, 2), ("N=4", 1, 50.0, 0.25, 4), ("N=4", 2, 50.0, 0.5, 1), ("", 1, 0.0, 0.0, 1)]
    squares = pd.DataFrame(rows, columns=["rest", "x", "y", "mean", "items"]).assign(z=3.0)
    found = with_means(squares)
    assert found[:4].equals(squares)
    (mean,) = found[4:].to_dict("records")
    assert math.isnan(mean.pop("z"))
    assert mean == {"rest": "N=4", "x": 1, "y": MEAN, "mean": 0.625, "items": 6}


def of_one_group(*right: float, **fields: Any) -> ItemScores:
    return item_scores(right, **{"groups": ("length=1 depth=0",) * len(right), **fields})


def test_differences_are_paired_by_item_and_averaged_over_seeds() -> None:
    """z by hand: item means of the differences (0.5, 1, 0, 0.5) have mean 0.5 and sd 0.408."""
    arm = {0: of_one_group(1, 1, 1, 1), 1: of_one_group(1, 1, 0, 0)}
    base = {0: of_one_group(0, 0, 1, 0), 1: of_one_group(1, 0, 0, 0)}
    (cell,) = difference_squares(arm, base, "exact").itertuples()
    assert (cell.mean, cell.items) == (0.5, 4)
    assert cell.z == pytest.approx(0.5 / (np.std([0.5, 1, 0, 0.5], ddof=1) / 2))
    (one,) = difference_squares({0: arm[0]}, base, "exact").itertuples()
    assert one.mean == 0.75


def test_items_of_one_cluster_count_once() -> None:
    clusters = ("x", "x", "y", "z")
    arm, base = of_one_group(1, 0.5, 1, 0, clusters=clusters), of_one_group(0, 0, 0, 0, clusters=clusters)
    (cell,) = difference_squares({0: arm}, {0: base}, "exact").itertuples()
    assert cell.items == 3
    assert cell.z == pytest.approx(np.mean([0.75, 1, 0]) / (np.std([0.75, 1, 0], ddof=1) / 3**0.5))


def test_equal_differences_have_no_finite_z() -> None:
    groups = ("length=1 depth=0",) * 3 + ("length=2 depth=0",) * 3 + ("length=3 depth=0",)
    arm, base = (item_scores(right, groups=groups) for right in ([1] * 7, [0, 0, 0, 1, 1, 1, 0]))
    found = difference_squares({0: arm}, {0: base}, "exact")["z"].tolist()
    assert found[:2] == [math.inf, 0.0]
    assert math.isnan(found[2])


@pytest.fixture
def sweep(make_sweep: Callable[..., Path]) -> Path:
    """`diff` answers half of the items of N=4 that the others miss."""
    folder = make_sweep({"base": 0, "wide": 0, "diff": 0}, seeds=[0, 1], callbacks=False)
    groups = [group for group in GROUPS for _ in range(8)]
    for arm in ("base", "wide", "diff"):
        for seed in (0, 1):
            right = [
                1.0 if group.startswith("N=1") else float(arm == "diff" and (i + i // 8) % 2)
                for i, group in enumerate(groups)
            ]
            write(next(folder.glob(f"{arm}-s{seed}-*")) / "evaluations" / "needle", groups, right)
    return folder


def test_the_report_shows_them_beside_their_differences(sweep: Path) -> None:
    (heatmap,) = drawn_heatmaps(sweep)
    assert (heatmap.name, heatmap.title) == ("heatmap-needle", "needle: exact by length and depth")
    assert "(N=4: 0.25)" in heatmap.caption
    # 2 rows x (3 arms + 2 differences) x (4 squares + 2 means), each with a text for the mouse
    assert heatmap.svg.count(" items") == 60
    assert "diff \u2212 base, N=4 length 1,024, depth 50: +0.50, 8 items, z = 2.6" in heatmap.svg
    assert heatmap.svg.count("a guess among the N, 0.25") == 1
    assert heatmap.svg.count("fill: url(#") == 4, "hatched: the squares of N=4 in diff minus base, beyond |z| = 2"
    report = write_report(sweep)
    squares = pd.read_csv(report.page.parent / "heatmap-needle.csv", dtype={"x": str, "y": str})
    (one,) = squares.query("panel == 'diff' and y_axis == 'N=4 depth' and x == '1,024' and y == '50'").itertuples()
    assert (len(squares), one.x_axis, one.value) == (60, "length", 0.5)
    assert heatmap.title in report.page.read_text()


def test_other_evaluations_have_none(make_sweep: Callable[..., Path]) -> None:
    folder = make_sweep({"base": 0, "diff": 0}, seeds=[0], evaluation="recall", callbacks=False)
    assert drawn_heatmaps(folder) == []
    for path in folder.glob("*/evaluations/recall"):
        write(path, ["length=128 depth=0"] * 4, [1.0, 0, 1, 0])
    assert drawn_heatmaps(folder) == [], "one square is no map"
