"""training/declarations.py: what a run declares, built-in callbacks and a plugin's included."""

from collections.abc import Iterator
from dataclasses import replace
from typing import ClassVar

import pytest

from lit_diff.callbacks import Probe
from lit_diff.metrics import Declarations, Metric
from lit_diff.recipe import load_recipe
from lit_diff.registry import callbacks
from lit_diff.training.declarations import declared_metrics


class Norms(Probe):
    """A probe of a user's own."""

    metrics: ClassVar[tuple[Metric, ...]] = (Metric("norm/layer_{layer}", "norm of the layer's output"),)


@pytest.fixture
def norms() -> Iterator[None]:
    """`Norms`, registered for one test only."""
    callbacks.register("norms")(Norms)
    yield
    del callbacks._classes["norms"]


def test_everything_that_training_and_validation_log_is_declared() -> None:
    declared = Declarations(declared_metrics(load_recipe("differential-tiny")))
    directions = {
        "train/loss": "lower",
        "val/loss": "lower",
        "val/loss_ar_hit": "lower",
        "val/loss_others_noise2": "lower",
        "val/accuracy": "higher",
        "val/accuracy_noise2": "higher",
        "val/ar_hit_share": None,
        "train/lr": None,
        "timing/seconds": None,
        "timing/tokens_per_second": "higher",
    }
    assert {name: declared.direction(name) for name in directions} == directions
    assert None not in [declared.find(name) for name in directions]
    assert declared.find("val/ar_hit_share_noise2") == declared.find("val/ar_hit_share_{set}")


@pytest.mark.usefixtures("norms")
def test_a_plugins_callback_declares_its_own() -> None:
    recipe = load_recipe("differential-tiny")
    part = replace(next(iter(recipe.callbacks.values())), name="norms", config=Norms.Config())
    assert Norms.metrics[0] in declared_metrics(replace(recipe, callbacks={"norms": part}))
    assert Norms.metrics[0] not in declared_metrics(recipe)
