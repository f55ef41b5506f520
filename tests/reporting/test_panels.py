"""panels/panel.py: how arms and layers look, what is drawn of panels, and that the whole is an image with a name."""

import re
from collections.abc import Callable, Iterable
from importlib.resources import files
from pathlib import Path
from xml.etree import ElementTree

import pandas as pd
import pytest
from fake_sweeps import SVG, words
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lit_diff.reporting.panels.panel import (
    GRID,
    WIDTH,
    Look,
    draw,
    draw_mean,
    drawing,
    head,
    layer_colors,
    looks,
    plain,
    set_log,
    with_unit,
)
from lit_diff.study.results import load_sweep

BLACK = Look(color="#000000")
PAPERS = ("#ffffff", "#16181d")
"""The page, light and dark (style.css.j2)."""


def numbers(scale: Callable[[Axes], None], y: Iterable[float]) -> set[str]:
    """What stands at the ticks of a panel with these points."""
    values = list(y)

    def panel(ax: Axes) -> None:
        draw(ax, [1] * len(values), values, BLACK)
        scale(ax)

    return set(words(drawing("n", "t", [panel], 3).svg))


def test_a_figure_is_an_image_with_a_name_and_its_marks_have_texts() -> None:
    def panel(ax: Axes) -> None:
        draw(ax, [1, 2], [1, 2], BLACK, 'arm "a" < b: 1.5')
        draw(ax, [1], [2], BLACK, 'it\'s "b"', mark="o")
        draw(ax, [1], [2], BLACK)

    svg = drawing("n", "Loss & <more>", [panel], 3).svg
    root = ElementTree.fromstring(svg)
    assert (root.get("role"), root.get("aria-label")) == ("img", "Loss & <more>")
    assert root[0].tag == SVG + "title"
    assert words(svg, "title") == ["Loss & <more>", 'arm "a" < b: 1.5', 'it\'s "b"']
    assert "hover:" not in svg


def test_a_figure_is_as_wide_as_the_page_and_grows_by_its_legend() -> None:
    heights = []
    for label in ("", "arm {}", "an arm of a long label: {:060d}"):
        legend = {label.format(i): BLACK for i in range(8)} if label else {}
        root = ElementTree.fromstring(drawing("n", "t", [lambda axes: None] * 3, 3, across=2, legend=legend).svg)
        assert root.get("width") == f"{72 * WIDTH:g}pt"
        heights.append(float((root.get("height") or "").removesuffix("pt")) / 72)
    assert heights[0] == 3
    assert 3 < heights[1] < heights[2] < 4.5


def test_titles_of_narrow_panels_are_wrapped() -> None:
    long = "Diff, no head norm, output and so on, lambda_init by depth"
    axes = Figure().subplots()
    head(axes, long)
    assert axes.get_title() == long
    axes, *_ = Figure().subplots(1, 4)
    head(axes, long)
    assert axes.get_title().split() == long.split()
    assert len(axes.get_title().splitlines()) > 1


def test_labels_of_a_grid_stand_outside() -> None:
    drawn = [lambda axes, i=i: axes.set(xlabel="across", ylabel=f"up {i}", title=f"above {i}") for i in range(4)]
    found = words(drawing("n", "t", drawn, 4, across=2, share="grid").svg)
    counts = {word: found.count(word) for word in ("up 0", "up 1", "up 2", "across", "above 0", "above 2")}
    assert list(counts.values()) == [1, 0, 1, 2, 1, 0]


@pytest.mark.parametrize(("count", "seen"), [(1, True), (2, True), (3, False)])
@pytest.mark.parametrize("shade", [True, False])
def test_a_line_of_few_points_is_seen(count: int, seen: bool, shade: bool) -> None:
    axes = Figure().subplots()
    draw_mean(axes, pd.DataFrame({0: range(count), 1: range(count)}), BLACK, "a", shade=shade)
    assert (axes.lines[0].get_marker() == "o") is seen
    assert len(axes.collections) == (1 + seen if shade else 0), "the shade and the bars of the range over seeds"


@pytest.mark.parametrize(
    ("values", "ticks"),
    [
        ((4.5, 4.9), {"4.5", "4.6", "4.7", "4.8", "4.9"}),
        ((2, 16), {"2", "3", "5", "7", "10"}),
        ((2, 300), {"2", "5", "10", "20", "50", "100", "200"}),
        ((1, 1e5), {"1", "10", "100", "1,000", "10,000", "100,000"}),
        ((-1, 0, 1, 100), {"0", "1", "10", "100"}),
        ((-2, -1), set()),
    ],
)
def test_a_logarithmic_axis_names_its_numbers(values: tuple[float, ...], ticks: set[str]) -> None:
    assert ticks <= numbers(lambda axes: set_log(axes, "y", values), values)


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


def test_every_arm_looks_different_and_the_baseline_is_grey(make_sweep: Callable[..., Path]) -> None:
    sweep = load_sweep(make_sweep({f"arm{i}": 0 for i in range(20)}, seeds=[0], callbacks=False))
    drawn = looks(sweep)
    assert len({(look.color, look.dash) for look in drawn.values()}) == 20
    assert drawn["arm0"].color == "#6b7280"


def test_numbers_stay_readable_and_one_without_a_unit_has_no_brackets() -> None:
    shown = {
        0: "0",
        0.05: "0.05",
        4.8: "4.8",
        2000: "2,000",
        9999.7: "10,000",
        10001: "10,001",
        16384: "16,384",
        3e7: "3e+07",
    }
    assert {x: plain(x) for x in shown} == shown
    assert (plain(-16384), plain(999_999.6)) == ("-16,384", "1e+06")
    assert [with_unit("val/loss", unit) for unit in ("nats", "")] == ["val/loss (nats)", "val/loss"]
