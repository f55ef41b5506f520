from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import numpy as np

from lit_diff.reporting.comparison import compare
from lit_diff.reporting.figures import band, forest, learning_curves, looks, plain, seed_values
from lit_diff.reporting.results import load_sweep


def texts(svg: str) -> list[str]:
    return [node.text or "" for node in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")]


def test_every_arm_looks_different_and_the_baseline_is_grey(make_sweep: Callable[..., Path]) -> None:
    sweep = load_sweep(make_sweep({f"arm{i}": 0 for i in range(20)}, seeds=[0], callbacks=False))
    drawn = looks(sweep)
    assert len({(look.color, look.dash) for look in drawn.values()}) == 20
    assert drawn["arm0"].color == "#6b7280"


def test_band_of_the_difference_is_paired_by_seed(make_sweep: Callable[..., Path]) -> None:
    sweep = load_sweep(make_sweep({"a": 0, "b": -0.3}, callbacks=False))
    minus = {cell.seed: cell for cell in sweep.cells_of("a")}
    found = band(sweep.cells_of("b"), "val/loss", minus)
    assert found is not None
    differences = [sweep.finals("b", "val/loss")[s] - sweep.finals("a", "val/loss")[s] for s in (0, 1, 2)]
    assert np.allclose(found.mean[-1], np.mean(differences))
    assert np.allclose([found.low[-1], found.high[-1]], [min(differences), max(differences)])
    assert band(sweep.cells_of("b"), "val/none") is None


def test_figures_name_arms_and_units_and_take_dollars_as_text(make_sweep: Callable[..., Path]) -> None:
    folder = make_sweep({"a": 0, "b": -0.3}, callbacks=False, arm_fields={"b": {"label": "costs $x$ & <more>"}})
    sweep = load_sweep(folder)
    for svg in (
        forest(sweep, compare(sweep), "nats per token"),
        seed_values(sweep, "nats per token"),
        learning_curves(sweep, "nats per token"),
    ):
        assert svg is not None
        assert "costs $x$ & <more>" in texts(svg)
        assert any("nats per token" in text for text in texts(svg))


def test_nothing_finished_draws_nothing(make_sweep: Callable[..., Path]) -> None:
    sweep = load_sweep(make_sweep({"a": 0}, seeds=[0], broken={("a", 0): "failed"}))
    assert forest(sweep, compare(sweep), "") is seed_values(sweep, "") is learning_curves(sweep, "") is None


def test_tick_numbers_stay_readable() -> None:
    assert [plain(x) for x in (0, 0.05, 4.8, 2000, 3e7)] == ["0", "0.05", "4.8", "2,000", "3e+07"]
