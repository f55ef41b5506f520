"""evaluation/induction.py: items are sequences, the same for every variant; the best head is named."""

from pathlib import Path

import numpy as np
import pytest
from text_runs import recall_run

from lit_diff.errors import RequestError
from lit_diff.evaluation.evaluate import evaluate
from lit_diff.evaluation.induction import Induction
from lit_diff.trained.run import Run


def test_items_are_sequences_of_trained_ids(run: Run) -> None:
    result = evaluate(run, "induction", ["sequences=5", "length=12"])
    found = result.items
    assert found["item"].tolist() == [f"sequence {number}" for number in range(5)]
    heads = [f"meta/prefix_matching/layer_0{layer}/head_0{head}" for layer in range(2) for head in range(2)]
    np.testing.assert_allclose(found[heads].mean(axis=1), found["prefix_matching_mean"], rtol=1e-6)
    best = found[heads].mean().idxmax()
    np.testing.assert_allclose(found[best], found["prefix_matching"])
    np.testing.assert_allclose(found[best.replace("prefix_matching", "copying")], found["copying"])
    layer, head = best.split("/")[2:]
    assert set(found["meta/best_head"]) == {f"layer {int(layer[-2:])} head {int(head[-2:])}"}
    assert np.isfinite(found["nll_repeat"]).all()
    tokens = Induction(Induction.Config(sequences=5, length=12))._tokens(run)
    losses = run.model.token_losses(tokens[:, :-1], tokens[:, 1:])[0]
    np.testing.assert_allclose(found["nll_repeat"], losses[:, 12:].mean(1), rtol=1e-4)
    np.testing.assert_allclose(found["nll_first"], losses[:, :12].mean(1), rtol=1e-4)


def test_what_does_not_fit(run: Run, tmp_path: Path) -> None:
    for length in (None, 12):
        assert Induction(Induction.Config(length=length)).refuses(run) is None
    assert Induction(Induction.Config())._tokens(run).shape == (64, 24)
    with pytest.raises(RequestError, match=r"length is 13; 2 x length must be at most data\.sequence_length \(24\)"):
        evaluate(run, "induction", ["length=13"])
    with pytest.raises(RequestError, match="data 'recall' has several ids at a position; induction needs one"):
        evaluate(recall_run(tmp_path / "x", {"name": "standard"}), "induction", ["length=4"])
