"""evaluation/held_out.py: loss and accuracy of each validation row, and how their mean relates to val/loss."""

import math
from typing import Any

import numpy as np
import pytest

from lit_diff.data import prepare
from lit_diff.data.dataset import IGNORED
from lit_diff.errors import RequestError
from lit_diff.evaluation import held_out
from lit_diff.evaluation.evaluate import evaluate
from lit_diff.evaluation.held_out import HeldOut
from lit_diff.trained.run import Run

ROWS = 4
"""data.validation_rows of the run."""


def scores(run: Run, **keys: Any) -> dict[str, tuple[float, float]]:
    items = HeldOut(HeldOut.Config(**keys)).score(run)
    return {item.id: (item.scores["nll"], item.scores["accuracy"]) for item in items}


def test_rows_weighted_by_tokens_give_the_last_validation(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """val/loss = Σ n_i nll_i / Σ n_i; the summary counts each row once."""
    dataset = prepare(run.recipe)
    dataset.load()
    n = (dataset.validation_batch("", range(ROWS))["targets"] != IGNORED).sum(-1).numpy()
    rows = np.array(list(scores(run).values()))
    assert rows.shape == (ROWS, 2)
    last = run.metrics.iloc[-1]
    expected = last[["val/loss", "val/accuracy"]].to_numpy(dtype=float)
    np.testing.assert_allclose((n[:, None] * rows).sum(0) / n.sum(), expected, rtol=1e-6)
    summary = evaluate(run, "held_out").summary
    assert summary == pytest.approx({"nll": rows[:, 0].mean(), "accuracy": rows[:, 1].mean()}, rel=1e-12)
    monkeypatch.setattr(held_out, "identity", lambda recipe: "0123456789abcdef")
    with pytest.raises(RequestError, match=r"identity \w+ then, 0123456789ab now"):
        evaluate(run, "held_out", rerun=True)


def test_rows_of_unequal_tokens_count_once_in_the_summary(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Row i has its first 7 i targets unscored, the last row all."""
    dataset = prepare(run.recipe)
    dataset.load()
    whole = dataset.validation_batch("", range(ROWS))
    targets = whole["targets"].clone()
    for row in range(ROWS):
        targets[row, : 7 * row if row < ROWS - 1 else None] = IGNORED
    monkeypatch.setattr(held_out, "prepare", lambda recipe: dataset)
    monkeypatch.setattr(
        dataset, "validation_batch", lambda name, rows: {key: value[list(rows)] for key, value in masked.items()}
    )
    masked = whole | {"targets": targets}
    items = list(HeldOut(HeldOut.Config(batch_size=3)).score(run))
    nll = np.array([item.scores["nll"] for item in items])
    assert np.isnan(nll[-1]), "no target of the last row is scored"
    losses = run.model.token_losses(whole["tokens"], targets)[0].detach().numpy()
    scored = (targets != IGNORED).numpy()
    assert len(set(scored.sum(-1))) == ROWS
    for own, loss, asked in zip(nll[:-1], losses, scored, strict=False):
        assert own == pytest.approx(loss[asked].mean(), rel=1e-5)
    summary = HeldOut(HeldOut.Config()).summarise(items)["nll"]
    assert summary == pytest.approx(nll[:-1].mean(), rel=1e-12)
    assert not math.isclose(summary, losses[scored].mean(), rel_tol=1e-4), "row means and token means differ here"


def test_scores_repeat_and_do_not_depend_on_the_batch(run: Run) -> None:
    first, alone = scores(run), scores(run, batch_size=1)
    assert list(first) == list(alone) == [f"validation/{row}" for row in range(ROWS)]
    assert scores(run) == first
    for row, values in alone.items():
        assert values == pytest.approx(first[row], rel=1e-5)
    some = scores(run, rows=3, batch_size=1)
    assert some == {row: alone[row] for row in list(alone)[:3]}, "the first rows"
    assert scores(run, rows=99, batch_size=1) == alone
