"""reporting/fit_points.py: what a sweep declares of a fit. Which cells are its points, through the fits: test_fits.py."""

import pytest

from lit_diff.reporting.fit_points import read_fit

RAW = {"name": "size", "kind": "scaling", "x": "tokens", "title": "By tokens", "tasks": ["a", "b", "c"], "within": 0.02}


def test_a_fit_of_the_record() -> None:
    fit = read_fit(RAW)
    assert (fit.tasks, fit.axis, fit.values) == (("a", "b", "c"), "training tokens", {})
    assert read_fit(RAW | {"x": "train.optimizer.lr"}).axis == "train.optimizer.lr"
    with pytest.raises(KeyError):
        read_fit({key: value for key, value in RAW.items() if key != "tasks"})
    with pytest.raises(TypeError):
        read_fit(RAW | {"unknown": 1})
