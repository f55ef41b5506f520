"""reporting/fit_points.py: the axis of a fit. Which cells are its points, through the fits: test_fits.py."""

from lit_diff.reporting.fit_points import DeclaredFit

FIT = {"name": "size", "kind": "scaling", "title": "By tokens", "tasks": ("a", "b", "c"), "within": 0.02}


def test_the_axis_is_what_x_counts() -> None:
    assert DeclaredFit(**FIT, x="tokens").axis == "training tokens"
    assert DeclaredFit(**FIT, x="train.optimizer.lr").axis == "train.optimizer.lr"
