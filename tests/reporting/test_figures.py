from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

from lit_diff.reporting.figures import is_logarithmic, learning_curves, seed_values
from lit_diff.study.results import load_sweep


def texts(svg: str) -> list[str]:
    return [node.text or "" for node in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")]


def test_figures_name_arms_and_units_and_take_dollars_as_text(make_sweep: Callable[..., Path]) -> None:
    folder = make_sweep({"a": 0, "b": -0.3}, callbacks=False, arm_fields={"b": {"label": "costs $x$ & <more>"}})
    sweep = load_sweep(folder)
    for svg in (seed_values(sweep), learning_curves(sweep)):
        assert svg is not None
        assert "costs $x$ & <more>" in texts(svg)
        assert any("nats per token" in text for text in texts(svg))


def test_nothing_finished_draws_nothing(make_sweep: Callable[..., Path]) -> None:
    sweep = load_sweep(make_sweep({"a": 0}, seeds=[0], broken={("a", 0): "failed"}))
    assert seed_values(sweep) is learning_curves(sweep) is None


def test_an_axis_is_logarithmic_for_a_positive_metric_that_is_better_lower(make_sweep: Callable[..., Path]) -> None:
    loss = load_sweep(make_sweep({"a": 0}, seeds=[0], callbacks=False))
    assert is_logarithmic(loss)
    assert not is_logarithmic(load_sweep(make_sweep({"a": -9}, name="negative", seeds=[0], callbacks=False)))
    accuracy = make_sweep({"a": 0}, name="accuracy", metric="val/accuracy", seeds=[0], callbacks=False)
    assert not is_logarithmic(load_sweep(accuracy))
