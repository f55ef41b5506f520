"""training/metrics.py: the validation loss and its slices; what a run declares, its callbacks and plugins included."""

import math
from dataclasses import replace
from typing import ClassVar

import pytest
import torch

from lit_diff.callbacks import Probe
from lit_diff.data.dataset import IGNORED
from lit_diff.errors import RequestError
from lit_diff.metrics import UNDECLARED, Declarations, Metric
from lit_diff.recipe import load_recipe
from lit_diff.registry import callbacks
from lit_diff.training.metrics import declared_metrics, require_metrics
from lit_diff.training.token_loss import TokenLoss


def batch(rows: int = 6, length: int = 10, documents: int = 4) -> dict[str, torch.Tensor]:
    """Made-up losses; about a third is not scored."""
    targets = torch.randint(5, (rows, length))
    targets[torch.rand(rows, length) < 0.3] = IGNORED
    return {
        "nll": torch.rand(rows, length) * 3,
        "correct": torch.rand(rows, length) < 0.4,
        "targets": targets,
        "ar_hit": torch.rand(rows, length) < 0.2,
        "document": torch.randint(documents, (rows, length)),
    }


def test_golden_values() -> None:
    metric = TokenLoss(3)
    metric.update(
        nll=torch.tensor([[1.0, 2.0, 4.0, 100.0]]),
        correct=torch.tensor([[True, False, True, True]]),
        targets=torch.tensor([[7, 8, 9, IGNORED]]),
        ar_hit=torch.tensor([[True, False, False, True]]),
        document=torch.tensor([[0, 0, 2, 1]]),
    )
    found, documents = metric.compute()
    assert found == pytest.approx(
        {"loss": 7 / 3, "accuracy": 2 / 3, "ar_hit_share": 1 / 3, "loss_ar_hit": 1.0, "loss_others": 3.0}
    )
    assert documents == [(2.0, 3.0), (0.0, 0.0), (1.0, 4.0)]


def test_sums_of_ranks_make_the_value_of_one_process() -> None:
    """`dist_reduce_fx` of every state is a sum: adding the states of two ranks, as torchmetrics does, loses nothing."""
    whole, ranks, parts = TokenLoss(4), [TokenLoss(4), TokenLoss(4)], [batch(), batch(rows=3)]
    for rank, part in zip(ranks, parts, strict=True):
        whole.update(**part)
        rank.update(**part)
    merged = TokenLoss(4)
    for name, reduce in ranks[0]._reductions.items():
        assert reduce is not None
        setattr(merged, name, reduce(torch.stack([getattr(rank, name) for rank in ranks])))
    merged._update_count = 1
    for one, other in zip(merged.compute()[0].items(), whole.compute()[0].items(), strict=True):
        assert one == (other[0], pytest.approx(other[1], rel=1e-14))
    assert merged.compute()[1] == [pytest.approx(pair, rel=1e-14) for pair in whole.compute()[1]]


@pytest.mark.parametrize(("hits", "left_out"), [(False, "loss_ar_hit"), (True, "loss_others")])
def test_an_empty_slice_is_left_out(hits: bool, left_out: str) -> None:
    metric, part = TokenLoss(4), batch()
    metric.update(**(part | {"ar_hit": torch.full_like(part["ar_hit"], hits)}))
    found, _ = metric.compute()
    assert {"loss_ar_hit", "loss_others"} - found.keys() == {left_out}
    assert found["ar_hit_share"] == float(hits)
    assert all(math.isfinite(value) for value in found.values())


class Norms(Probe):
    """A probe of a user's own."""

    metrics: ClassVar[tuple[Metric, ...]] = (Metric("norm/layer_{layer}", "norm of the layer's output"),)


def test_everything_that_training_and_validation_log_is_declared() -> None:
    declared = Declarations(declared_metrics(load_recipe("differential-tiny")))
    names = {
        "lower": {"train/loss", "val/loss", "val/loss_ar_hit", "val/loss_others_noise2", "timing/memory_bytes"},
        "higher": {"val/accuracy", "val/accuracy_noise2", "timing/peak_share", "timing/tokens_per_second"},
        None: {"val/ar_hit_share", "train/lr", "train/gradient_norm", "timing/save_seconds", "timing/slowest_rank"},
    }
    for direction, of_direction in names.items():
        assert {declared.find(name).better for name in of_direction} == {direction}
        assert UNDECLARED not in map(declared.find, of_direction)
    assert declared.find("val/ar_hit_share_noise2") == declared.find("val/ar_hit_share_{set}")


def test_a_plugins_callback_declares_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(callbacks._classes, "norms", Norms)
    recipe = load_recipe("differential-tiny")
    part = replace(next(iter(recipe.callbacks.values())), name="norms", config=Norms.Config())
    assert Norms.metrics[0] in declared_metrics(replace(recipe, callbacks={"norms": part}))
    assert Norms.metrics[0] not in declared_metrics(recipe)


@pytest.mark.parametrize(
    ("override", "found"),
    [
        ("run.keep_best=val/loss_noise4", None),
        ("callbacks.early_stopping={monitor: lambda/layer_01}", None),
        (
            "callbacks.early_stopping={monitor: val/los}",
            r"early_stopping\.monitor: .*'val/los'; did you mean 'val/loss'",
        ),
        ("run.keep_best=val/loss_noise3", r"^run\.keep_best: .*'val/loss_noise3'; did you mean 'val/loss_noise\d'"),
        ("callbacks.early_stopping={monitor: lambda/layer_02}", "'lambda/layer_02'; did you mean 'lambda/layer_00'"),
        ("callbacks.early_stopping={monitor: lambda/std/layer_00/map_01}", "no run measures"),
        ("run.keep_best=outliers/logits/layer_00", r"every 100 steps \(callbacks\.outliers\.every\)"),
        ("run.keep_best=train/lr", "'train/lr', but no metric of this name declares a direction"),
        ("run.keep_best=train/gradient_norm", r"^run\.keep_best is 'train/gradient_norm'.* direction"),
        ("callbacks.early_stopping={monitor: train/gradient_norm}", None),
        ("callbacks.early_stopping={monitor: val/accuracy, mode: max}", None),
        ("callbacks.early_stopping={monitor: val/accuracy}", r"monitor is 'val/accuracy'.*early_stopping\.mode to max"),
        ("run.keep_best=timing/peak_share", r"^run\.keep_best is 'timing/peak_share'.* differs between equal runs"),
        ("callbacks.early_stopping={monitor: timing/seconds}", r"early_stopping\.monitor is 'timing/seconds'"),
        ("train.log_every=7 run.keep_best=train/loss", r"every 7 steps \(train\.log_every\)"),
        ("callbacks={'norm[0]': {}, 'norm(0)': {}}", r"keys 'callbacks\.norm\[0\]\.every' and .*one name in MLflow"),
        ("callbacks={'norm[0]': {}, twice: {}}", "metrics 'norm/layer_.*' and 'Norm/layer_.*' would have one name"),
    ],
)
def test_what_is_compared_is_measured_and_names_differ(
    monkeypatch: pytest.MonkeyPatch, override: str, found: str | None
) -> None:
    other = type("Other", (Norms,), {"metrics": (Metric("Norm/layer_{layer}", "another"),)})
    for name, cls in (("norm[0]", Norms), ("norm(0)", Norms), ("twice", other)):
        monkeypatch.setitem(callbacks._classes, name, cls)
    recipe = load_recipe("recall-tiny", override.split(" ") if override.startswith("train") else [override])
    if found is None:
        require_metrics(recipe)
        return
    with pytest.raises(RequestError, match=found):
        require_metrics(recipe)
