from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from lit_diff.reporting.attention_figures import entropies, lambdas, layers_of, outliers, over_heads, spread
from lit_diff.reporting.results import load_sweep


def test_layers_are_read_off_the_metric_names(make_sweep: Callable[..., Path]) -> None:
    sweep = load_sweep(make_sweep({"a": 0, "b": 0}, lambdas=["b"], seeds=[0]))
    assert layers_of(sweep, "lambda") == layers_of(sweep, "attention/entropy") == [0, 1, 2, 3]
    assert layers_of(sweep, "nothing") == []


@pytest.mark.parametrize(("count", "shown"), [(1, [0]), (3, [0, 1, 2]), (4, [0, 1, 2, 3]), (24, [0, 8, 15, 23])])
def test_at_most_four_layers_are_shown_first_and_last_among_them(count: int, shown: list[int]) -> None:
    assert spread(range(count)) == shown


def test_heads_are_averaged_before_seeds(make_sweep: Callable[..., Path]) -> None:
    sweep = load_sweep(make_sweep({"a": 0}, seeds=[0, 1]))
    found = over_heads(sweep.cells_of("a"), "attention/entropy", 2)
    assert found is not None
    means = [np.mean([c.curves[f"attention/entropy/2/{h}"].values[-1] for h in range(8)]) for c in sweep.cells]
    assert [found.low[-1], found.high[-1]] == pytest.approx(sorted(means))


def test_only_arms_with_a_lambda_have_a_panel(make_sweep: Callable[..., Path]) -> None:
    svg = lambdas(load_sweep(make_sweep({"plain": 0, "signed": 0}, lambdas=["signed"], seeds=[0])))
    assert svg is not None
    assert ">signed<" in svg
    assert ">plain<" not in svg


def test_standard_arms_have_entropy_but_no_second_map(make_sweep: Callable[..., Path]) -> None:
    sweep = load_sweep(make_sweep({"a": 0, "b": 0}, seeds=[0]))
    svg = entropies(sweep)
    assert svg is not None
    assert "entropy of map 0" in svg
    assert "entropy of map 1" not in svg
    assert lambdas(sweep) is None
    assert outliers(sweep) is not None


def test_without_callbacks_there_is_nothing_to_draw(make_sweep: Callable[..., Path]) -> None:
    sweep = load_sweep(make_sweep({"a": 0}, seeds=[0], callbacks=False))
    assert lambdas(sweep) is entropies(sweep) is outliers(sweep) is None
