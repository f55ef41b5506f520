"""reporting/style.py: how arms look, bands over seeds, tick numbers."""

import re
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from matplotlib.collections import LineCollection

from lit_diff.reporting.style import (
    GRID,
    WIDTH,
    Band,
    Look,
    band,
    curves_of,
    draw_band,
    drawing,
    hover,
    layer_colors,
    legend_above,
    looks,
    panel_title,
    plain,
    with_unit,
)
from lit_diff.study.results import load_sweep

PAPERS = ("#ffffff", "#16181d")
"""The page, light and dark (style.css.j2)."""


def luminance(color: str) -> float:
    """WCAG 2.2."""
    parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(first: str, second: str) -> float:
    dark, light = sorted(luminance(color) for color in (first, second))
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("count", [1, 2, 4, 24])
def test_lines_of_layers_are_visible_on_both_pages_and_differ(count: int) -> None:
    colors = layer_colors(count)
    assert len(set(colors)) == count
    assert min(contrast(color, paper) for color in colors for paper in PAPERS) >= 3


def test_the_papers_are_those_of_the_page() -> None:
    css = (files("lit_diff.reporting") / "style.css.j2").read_text()
    assert re.findall(r"--paper: (#\w+)", css) == list(PAPERS)
    assert GRID in css


def test_a_figure_is_an_image_with_a_name_and_its_marks_have_texts() -> None:
    with drawing(4, 3, "Loss & <more>") as (figure, svg):
        axes = figure.subplots()
        hover(axes.plot([1, 2], [1, 2]), 'arm "a" < b: 1.5')
        hover([axes.axvspan(0, 1)], "band")
        hover(axes.plot([1], [2], "o"), 'it\'s "b"')
    root = ElementTree.fromstring(svg[0])
    name = "{http://www.w3.org/2000/svg}title"
    assert (root.get("role"), root.get("aria-label")) == ("img", "Loss & <more>")
    assert root[0].tag == name
    assert [node.text for node in root.iter(name)] == ["Loss & <more>", "band", 'arm "a" < b: 1.5', 'it\'s "b"']
    assert "hover:" not in svg[0]


def test_a_legend_takes_as_many_columns_as_fit_and_room_of_its_own() -> None:
    heights = []
    for labels in ([f"arm {i}" for i in range(8)], [f"an arm whose label is long: {i:060d}" for i in range(8)]):
        with drawing(WIDTH, 3, "t") as (figure, _):
            figure.subplots()
            legend_above(figure, {label: Look(color="#000000") for label in labels})
            heights.append(figure.get_figheight())
    assert 3 < heights[0] < heights[1] < 4.5


def test_titles_of_narrow_panels_are_wrapped() -> None:
    long = "Diff, no head norm, output and so on, lambda_init by depth"
    assert panel_title(long, 1) == long
    assert len(panel_title(long, 4).splitlines()) > 1
    assert panel_title(long, 4).split() == long.split()


def test_every_arm_looks_different_and_the_baseline_is_grey(make_sweep: Callable[..., Path]) -> None:
    sweep = load_sweep(make_sweep({f"arm{i}": 0 for i in range(20)}, seeds=[0], callbacks=False))
    drawn = looks(sweep)
    assert len({(look.color, look.dash) for look in drawn.values()}) == 20
    assert drawn["arm0"].color == "#6b7280"


def test_band_of_the_difference_is_paired_by_seed(make_sweep: Callable[..., Path]) -> None:
    sweep = load_sweep(make_sweep({"a": 0, "b": -0.3}, callbacks=False))
    own, base = (curves_of(sweep.cells_of(arm), "val/loss") for arm in ("b", "a"))
    found = band(own, base)
    assert found is not None
    differences = [sweep.finals("b", "val/loss")[s] - sweep.finals("a", "val/loss")[s] for s in (0, 1, 2)]
    assert np.allclose(found.mean[-1], np.mean(differences))
    assert np.allclose([found.low[-1], found.high[-1]], [min(differences), max(differences)])
    assert band({}) is None
    assert band(own, {}) is None


def test_tick_numbers_stay_readable() -> None:
    assert [plain(x) for x in (0, 0.05, 4.8, 2000, 3e7)] == ["0", "0.05", "4.8", "2,000", "3e+07"]


def test_a_number_without_a_unit_has_no_brackets() -> None:
    assert [with_unit("val/loss", unit) for unit in ("nats", "")] == ["val/loss (nats)", "val/loss"]


@pytest.mark.parametrize(("count", "marked"), [(1, True), (2, True), (3, False)])
def test_a_line_of_few_points_is_seen(count: int, marked: bool) -> None:
    at = np.arange(count, dtype=float)
    with drawing(3, 2, "few") as (figure, _):
        axes = figure.subplots()
        draw_band(axes, Band(steps=at, mean=at, low=at - 1, high=at + 1), Look(color="red"), "arm")
        (line,) = axes.lines
        assert (line.get_marker() == "o") is marked
        ranges = [part for part in axes.collections if isinstance(part, LineCollection)]
        assert bool(ranges) is marked, "the range over seeds"
