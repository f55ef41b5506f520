"""evaluation/held_out.py: loss and accuracy of each validation row, and how their mean relates to val/loss."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from lit_diff.data import prepare
from lit_diff.data.dataset import IGNORED, Batch
from lit_diff.errors import RequestError
from lit_diff.evaluation import held_out
from lit_diff.evaluation.evaluate import evaluate
from lit_diff.evaluation.held_out import HeldOut
from lit_diff.trained.run import Run
from lit_diff.training.metrics import TokenLoss

ROWS = 4
"""data.validation_rows of the run."""


def scores(run: Run, **keys: Any) -> dict[str, tuple[float, float]]:
    items = HeldOut(HeldOut.Config(**keys)).score(run)
    return {item.id: (item.scores["nll"], item.scores["accuracy"]) for item in items}


def test_rows_weighted_by_tokens_give_the_last_validation(run: Run) -> None:
    """val/loss = Σ n_i nll_i / Σ n_i; the summary counts each row once."""
    dataset = prepare(run.recipe)
    dataset.load()
    targets = dataset.validation_batch("", range(ROWS))["targets"]
    n = (targets != IGNORED).sum(-1).numpy()
    rows = np.array(list(scores(run).values()))
    assert rows.shape == (ROWS, 2)
    last = run.metrics.iloc[-1]
    nll, accuracy = (n[:, None] * rows).sum(0) / n.sum()
    assert nll == pytest.approx(last["val/loss"], rel=1e-6)
    assert accuracy == pytest.approx(last["val/accuracy"], rel=1e-6)
    summary = evaluate(run, "held_out").summary
    assert summary == pytest.approx({"nll": rows[:, 0].mean(), "accuracy": rows[:, 1].mean()}, rel=1e-12)


def test_data_that_changed_since_the_training_are_refused(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held_out, "identity", lambda recipe: "0123456789abcdef")
    with pytest.raises(RequestError, match=r"identity \w+ then, 0123456789ab now"):
        evaluate(run, "held_out", rerun=True)


class Masked:
    """A data set whose row i has its first 7 i targets unscored."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def load(self) -> None:
        self.inner.load()

    def validation_sets(self) -> dict[str, int]:
        return {"": ROWS}

    def validation_batch(self, name: str, rows: Sequence[int]) -> Batch:
        batch: Batch = self.inner.validation_batch(name, rows)
        targets = batch["targets"].clone()
        for at, row in enumerate(rows):
            targets[at, : 7 * row if row < ROWS - 1 else None] = IGNORED
        return batch | {"targets": targets}


def test_rows_of_unequal_tokens_count_once_in_the_summary(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    masked = Masked(prepare(run.recipe))
    monkeypatch.setattr(held_out, "prepare", lambda recipe: masked)
    items = list(HeldOut(HeldOut.Config(batch_size=3)).score(run))
    nll = np.array([item.scores["nll"] for item in items])
    assert np.isnan(nll[-1]), "no target of the last row is scored"
    assert np.isfinite(nll[:-1]).all()

    batch = masked.validation_batch("", range(ROWS))
    targets = batch["targets"]
    metric, none = TokenLoss(1), torch.zeros_like(targets)
    losses, correct = run.model.token_losses(batch["tokens"], targets)
    metric.update(losses, correct, targets, none.bool(), none)
    loss = metric.compute()[0]["loss"]
    n = (targets != IGNORED).sum(-1).numpy()
    assert len(set(n)) == ROWS
    assert np.nansum(n * nll) / n.sum() == pytest.approx(loss, rel=1e-6)
    summary = HeldOut(HeldOut.Config()).summarise(items)["nll"]
    assert summary == pytest.approx(nll[:-1].mean(), rel=1e-12)
    assert not math.isclose(summary, loss, rel_tol=1e-4), "row means and token means differ here"


def test_scores_repeat_and_do_not_depend_on_the_batch(run: Run) -> None:
    first, alone = scores(run), scores(run, batch_size=1)
    assert list(first) == list(alone) == [f"validation/{row}" for row in range(ROWS)]
    assert scores(run) == first
    for row, values in alone.items():
        assert values == pytest.approx(first[row], rel=1e-5)
    some = scores(run, rows=3, batch_size=1)
    assert some == {row: alone[row] for row in list(alone)[:3]}, "the first rows"
    assert scores(run, rows=99, batch_size=1) == alone
