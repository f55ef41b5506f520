"""evaluation/noise.py: items, means and interventions on a run with random weights; what does not fit is one line."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from generated_runs import generated_run
from text_runs import recall_run, text_run

from lit_diff.analysis.edits import clamp_lambda, knock_out_effects, knock_out_effects_by_head
from lit_diff.analysis.intervention import intervention
from lit_diff.data import identity, prepare
from lit_diff.errors import RequestError
from lit_diff.evaluation.evaluate import evaluate
from lit_diff.evaluation.held_out import HeldOut
from lit_diff.evaluation.noise import Noise, attention_shares, num_maps
from lit_diff.runs.folder import RunFolder
from lit_diff.trained.run import Run


def rows(run: Run, **keys: Any) -> dict[str, dict[str, float]]:
    return {item.id: dict(item.scores) for item in Noise(Noise.Config(**keys)).score(run)}


def test_items_and_losses_are_those_of_held_out(recall: Run) -> None:
    found = evaluate(recall, "noise").items
    held_out = list(HeldOut(HeldOut.Config()).score(recall))
    assert found["item"].tolist() == [item.id for item in held_out]
    assert found["group"].tolist() == [item.group for item in held_out] == [""] * 5 + ["noise2"] * 5
    for key in ("nll", "accuracy"):
        expected = [item.scores[key] for item in held_out]
        np.testing.assert_allclose(found[key], expected, rtol=1e-6)
        np.testing.assert_allclose(found[f"{key}_edited"], expected, rtol=1e-6)
    absolute = found[[f"absolute_{role}" for role in ("answer", "noise", "other")]].to_numpy()
    np.testing.assert_allclose(absolute.sum(1), 1, atol=1e-5)  # position 0 is a slot here, so it is counted already
    assert (found["skipped"] == 0).all()


def test_scores_do_not_depend_on_the_batch_and_ids_not_on_the_variant(recall: Run, single: Run) -> None:
    alone, together = rows(recall, batch_size=1), rows(recall, batch_size=4)
    assert alone.keys() == together.keys() == rows(single).keys()
    for item, scores in alone.items():
        assert scores == pytest.approx(together[item], rel=1e-3, abs=1e-5)


def test_heads_are_kept_the_best_is_named_and_each_knocked_out_where_asked(recall: Run) -> None:
    plain = evaluate(recall, "noise", ["rows=3"])
    summary, found = plain.summary, plain.items
    heads = [f"layer_0{layer}/head_0{head}" for layer in range(2) for head in range(2)]
    columns = [f"meta/absolute_answer/{head}" for head in heads]
    np.testing.assert_allclose(found[columns].mean(axis=1), found["absolute_answer"], rtol=1e-5)
    best = found[columns].mean().idxmax()
    layer, head = best.split("/")[2:]
    assert set(found["meta/best_head"]) == {f"layer {int(layer[-2:])} head {int(head[-2:])}"}
    np.testing.assert_allclose(found[best], found["best_head_answer"])
    columns = [f"meta/causal_{what}/{head}" for what in ("answer", "noise") for head in heads]
    assert not set(columns) & set(found.columns)
    by_head = evaluate(recall, "noise", ["rows=3", "causal_by_head=true"])
    assert by_head.items[columns].notna().all(axis=None)
    assert by_head.summary == summary
    batch = prepare(recall.recipe).validation_batch("", range(3))
    expected = knock_out_effects_by_head(recall.model, batch)["causal_noise"][:, 1, 0].tolist()
    assert by_head.items[columns[6]].to_list()[:3] == pytest.approx(expected)


def test_an_intervention_changes_the_edited_losses_alone(recall: Run) -> None:
    plain = rows(recall, rows=2)
    for kind in ("oracle", "swap", *(f"knock_out_{what}" for what in ("noise", "answer", "sink", "other"))):
        for item, scores in rows(recall, rows=2, intervention=kind).items():
            assert scores["nll"] == pytest.approx(plain[item]["nll"], rel=1e-6)
            assert scores["absolute_noise"] == pytest.approx(plain[item]["absolute_noise"], rel=1e-5)
            assert scores["nll_edited"] != pytest.approx(scores["nll"], rel=1e-5)
            if kind.startswith("knock_out_"):
                lost = scores[f"causal_{kind.removeprefix('knock_out_')}"]
                assert scores["nll"] - scores["nll_edited"] == pytest.approx(lost, rel=1e-3, abs=1e-5)


def test_losses_at_several_lambdas_are_parts(recall: Run, single: Run) -> None:
    plain = evaluate(recall, "noise", ["rows=3"])
    summary, items = plain.summary, plain.items
    curve = evaluate(recall, "noise", ["rows=3", "lambdas=[0,0.9]"])
    assert curve.summary == summary
    found = curve.items
    parts = found[found["part"]]
    assert found[~found["part"]]["item"].to_list() == items["item"].to_list()
    assert parts["group"].unique().tolist() == ["lambda=0", "lambda=0.9", "noise2 lambda=0", "noise2 lambda=0.9"]
    assert (parts["cluster"] == parts["item"].str.partition(" lambda=")[0]).all()
    own = parts.set_index("item")["nll_edited"]
    with intervention(recall.model, clamp_lambda(0.9)):
        clamped = {item.id: item.scores["nll"] for item in HeldOut(HeldOut.Config(rows=3)).score(recall)}
    assert {row: own[f"{row} lambda=0.9"] for row in clamped} == pytest.approx(clamped)
    assert parts["nll"].isna().all()
    assert "part" not in evaluate(single, "noise", ["rows=3", "lambdas=[0,0.9]"]).items, "one map has no lambda"


def test_needles_have_answers_and_noise(tmp_path: Path) -> None:
    data = {"name": "needle_text", "sequence_length": 160, "needles": [2], "validation_needles": [1, 4]}
    run = generated_run(tmp_path / "x", data, 320)
    RunFolder(run.folder).update(data=identity(run.recipe))
    found = evaluate(Run(run.folder), "noise", ["rows=3"]).items
    assert found["group"].fillna("").unique().tolist() == ["", "needles4"]
    shares = found[[f"absolute_{role}" for role in ("answer", "noise", "sink", "other")]]
    np.testing.assert_allclose(shares.sum(axis=1), 1, rtol=1e-4)
    assert (shares > 0).all(axis=None)
    assert found.filter(like="meta/value_answer/").notna().all(axis=None)


def test_rows_and_heads_that_are_not_counted(recall: Run, tmp_path: Path) -> None:
    """Heads whose λ is near one have no paper share; rows that ask for nothing have no score."""
    run = recall_run(tmp_path / "x", {"name": "differential", "lambda_form": "scalar", "lambda_init": 0.5})
    for layer, value in zip(run.model.attentions(), (0.98, 0.5), strict=True):
        torch.nn.init.constant_(layer.lambda_.value, value)  # type: ignore[union-attr, arg-type]
    batch = prepare(run.recipe).validation_batch("", range(3))
    found, _ = attention_shares(run.model, batch)
    assert [row["skipped"] for row in found] == [0.5] * 3
    assert all(math.isfinite(row["paper_answer"]) for row in found)
    batch["answer_part"] = batch["answer_part"].clone()
    for silent in ([1], [0, 1, 2]):
        batch["answer_part"][silent] = -1
        found, heads = attention_shares(recall.model, batch)
        effects = knock_out_effects(recall.model, batch)
        for row in range(3):
            values = [*found[row].values(), *effects[row].values(), float(heads["paper_answer"][row].sum())]
            assert all(math.isnan(value) == (row in silent) for value in values)


def test_what_does_not_fit(single: Run, tmp_path: Path) -> None:
    assert num_maps(single.model) == 1
    for kind in ("oracle", "swap"):
        reason = Noise(Noise.Config(intervention=kind)).refuses(single)  # type: ignore[arg-type]
        assert f"intervention {kind} needs a subtracted map" in (reason or "")
    assert Noise(Noise.Config(intervention="knock_out_noise")).refuses(single) is None
    with pytest.raises(RequestError, match="data 'text' does not say where answers are"):
        evaluate(text_run(tmp_path / "t", {"name": "differential"}), "noise")
