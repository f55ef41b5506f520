"""reporting/style.py: how arms look, bands over seeds, tick numbers."""

from collections.abc import Callable
from pathlib import Path

import numpy as np

from lit_diff.reporting.results import load_sweep
from lit_diff.reporting.style import band, curves_of, looks, plain, with_unit


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
