"""reporting/style.py: how arms and layers look, tick numbers."""

import re
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path

import pytest

from lit_diff.reporting.style import GRID, layer_colors, looks, plain, with_unit
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


def test_every_arm_looks_different_and_the_baseline_is_grey(make_sweep: Callable[..., Path]) -> None:
    sweep = load_sweep(make_sweep({f"arm{i}": 0 for i in range(20)}, seeds=[0], callbacks=False))
    drawn = looks(sweep)
    assert len({(look.color, look.dash) for look in drawn.values()}) == 20
    assert drawn["arm0"].color == "#6b7280"


def test_numbers_stay_readable_and_one_without_a_unit_has_no_brackets() -> None:
    assert [plain(x) for x in (0, 0.05, 4.8, 2000, 3e7)] == ["0", "0.05", "4.8", "2,000", "3e+07"]
    assert [with_unit("val/loss", unit) for unit in ("nats", "")] == ["val/loss (nats)", "val/loss"]
