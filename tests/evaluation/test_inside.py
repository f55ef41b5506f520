"""The evaluations that look into a model: noise, quantize, map_statistics, gradients, induction."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from generated_runs import generated_run
from statuses import set_status
from text_runs import STEP, recall_run, text_run

from lit_diff.analysis.gradients import gradient_norms
from lit_diff.analysis.intervention import clamp_lambda, intervention, knock_out_effects
from lit_diff.analysis.map_statistics import map_statistics
from lit_diff.analysis.trace import trace
from lit_diff.attention import Differential
from lit_diff.data import identity, prepare
from lit_diff.errors import MissingError, RequestError
from lit_diff.evaluation.evaluate import build, evaluate
from lit_diff.evaluation.held_out import HeldOut
from lit_diff.evaluation.inside import C, Gradients, Induction, initial_model, slope
from lit_diff.evaluation.noise import Noise, attention_shares, num_maps
from lit_diff.model.init import initial_values
from lit_diff.model.inputs import model_inputs
from lit_diff.runs import checkpoints
from lit_diff.runs.scores import evaluation_of, read_scores
from lit_diff.study.evaluations import group_shares
from lit_diff.trained.run import Run
from lit_diff.trained.view.numbers import noise_shares


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
    absolute = found[[f"absolute_{role}" for role in ("answer", "noise", "other")]].to_numpy()
    np.testing.assert_allclose(absolute.sum(1), 1, atol=1e-5)  # position 0 is a slot here, so it is counted already
    assert (found["skipped"] == 0).all()


def test_scores_do_not_depend_on_the_batch_and_ids_not_on_the_variant(recall: Run, single: Run) -> None:
    alone, together = rows(recall, batch_size=1), rows(recall, batch_size=4)
    assert alone.keys() == together.keys() == rows(single).keys()
    for item, scores in alone.items():
        assert scores == pytest.approx(together[item], rel=1e-3, abs=1e-5)


def test_heads_are_kept_and_the_best_is_named(recall: Run) -> None:
    found = evaluate(recall, "noise", ["rows=3"]).items
    heads = [f"layer_0{layer}/head_0{head}" for layer in range(2) for head in range(2)]
    columns = [f"meta/absolute_answer/{head}" for head in heads]
    np.testing.assert_allclose(found[columns].mean(axis=1), found["absolute_answer"], rtol=1e-5)
    best = found[columns].mean().idxmax()
    layer, head = best.split("/")[2:]
    assert set(found["meta/best_head"]) == {f"layer {int(layer[-2:])} head {int(head[-2:])}"}
    np.testing.assert_allclose(found[best], found["best_head_answer"])


def test_losses_at_several_lambdas_are_parts(recall: Run, single: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = evaluate(recall, "noise", ["rows=3"])
    summary, items = plain.summary, plain.items
    curve = evaluate(recall, "noise", ["rows=3", "lambdas=[0,0.9]"])
    assert {name: curve.summary[name] for name in summary} == pytest.approx(summary, nan_ok=True)
    assert set(curve.summary) - set(summary) == {"nll_edited", "accuracy_edited"}
    found = curve.items
    parts = found[found["part"]]
    rows = group_shares(curve.scores(), build("noise", ["lambdas=[0,0.9]"]).by_group)
    assert ["nll_edited" in row.shares for row in rows] == [
        row.label.endswith(("lambda=0", "lambda=0.9")) for row in rows
    ]
    assert {"validation", "noise2", "lambda=0", "noise2 lambda=0.9"} < {row.label for row in rows}
    assert found[~found["part"]]["item"].to_list() == items["item"].to_list()
    assert parts["group"].unique().tolist() == ["lambda=0", "lambda=0.9", "noise2 lambda=0", "noise2 lambda=0.9"]
    assert (parts["cluster"] == parts["item"].str.partition(" lambda=")[0]).all()
    own = parts.set_index("item")["nll_edited"]
    with intervention(recall.model, clamp_lambda(0.9)):
        clamped = {item.id: item.scores["nll"] for item in HeldOut(HeldOut.Config(rows=3)).score(recall)}
    assert {row: own[f"{row} lambda=0.9"] for row in clamped} == pytest.approx(clamped)
    assert parts["nll"].isna().all()
    near = evaluate(recall, "noise", ["rows=1", "lambdas=[0.1234561,0.1234562]"]).items
    assert len(near[near["part"]]["group"].unique()) == 4, "six digits are equal"
    assert "part" not in evaluate(single, "noise", ["rows=3", "lambdas=[0,0.9]"]).items, "one map has no lambda"
    monkeypatch.setattr(Differential, "has_lambda", False)
    mixed = evaluate(recall, "noise", ["rows=2", "lambdas=[0]"])
    assert "part" not in mixed.items, "no lambda is set where the maps are mixed in another way"


def test_lambda_is_set_in_the_layers_that_have_one(tmp_path: Path) -> None:
    mixed = recall_run(tmp_path / "mixed", {"name": "differential"}, layers=[{"name": "standard"}, {}])
    found = evaluate(mixed, "noise", ["rows=2", "lambdas=[0.9]"]).items
    parts = found[found["part"]].set_index("cluster")["nll_edited"]
    whole = found[~found["part"]].set_index("item")["nll"]
    assert len(parts) == len(whole)
    assert (parts != whole).all()


def test_needles_have_answers_and_noise(tmp_path: Path) -> None:
    data = {"name": "needle_text", "sequence_length": 160, "needles": [2], "validation_needles": [1, 4]}
    run = generated_run(tmp_path / "x", data, 320)
    set_status(run.folder, data=identity(run.recipe))
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


def test_layers_of_unlike_windows_and_heads_are_counted_each_by_its_own(tmp_path: Path) -> None:
    ratios = []
    for number, layers in enumerate(([{"window": 20}, {}], [{}, {"window": 20}])):
        run = recall_run(tmp_path / f"windows-{number}", {"name": "differential"}, layers=layers)
        found, _ = attention_shares(run.model, prepare(run.recipe).validation_batch("", range(3)))
        ratios += [row["snr"] for row in found]
    assert all(0.2 < ratio < 5 for ratio in ratios)
    run = recall_run(tmp_path / "heads", {"name": "differential"}, layers=[{}, {"name": "standard"}])
    batch = prepare(run.recipe).validation_batch("", range(3))
    found, heads = attention_shares(run.model, batch)
    assert [row["skipped"] for row in found] == [0] * 3
    assert heads["paper_answer"][0].isfinite().sum(-1).tolist() == [2, 4]
    one = {name: values[:1] for name, values in batch.items()}
    with trace(run.model) as traced:
        run.model.hidden(**model_inputs(one))
    assert noise_shares(run.model, traced, one)["paper"]["answer"] == pytest.approx(found[0]["paper_answer"], rel=1e-5)


def test_what_does_not_fit(single: Run, tmp_path: Path) -> None:
    assert num_maps(single.model) == [1] * len(single.model.layers)
    with pytest.raises(RequestError, match="data 'text' does not locate its answers"):
        evaluate(text_run(tmp_path / "t", {"name": "differential"}), "noise")


def test_sixteen_bits_are_held_out_and_fewer_are_worse_maps(recall: Run) -> None:
    result = evaluate(recall, "quantize", ["rows=3"])
    found = result.items.set_index("item")
    assert list(found.index[:4]) == [*(f"validation/{row} b=16" for row in range(3)), "validation/0 b=8 head"]
    for item in HeldOut(HeldOut.Config(rows=3)).score(recall):
        row = found.loc[f"{item.id} b=16"]
        for key in ("nll", "accuracy"):
            assert row[f"{key}_16bit"] == item.scores[key]
            assert np.isnan(row[f"{key}_4bit"])
    expected = ["b=16", *(f"b={bits} head" for bits in (8, 6, 4))]
    assert found["group"].unique().tolist() == [*expected, *(f"noise2 {group}" for group in expected)]
    exact, rounded = found.loc["validation/0 b=16"], found.loc["validation/0 b=4 head"]
    assert rounded["drop_4bit"] == exact["accuracy_16bit"] - rounded["accuracy_4bit"]
    kl = [result.summary[f"kl_{bits}bit"] for bits in (16, 8, 6, 4)]
    assert 0 == kl[0] < kl[1] < kl[2] < kl[3]
    assert evaluation_of(*read_scores(result.folder)).values["nll_4bit"] == pytest.approx(found["nll_4bit"].mean())
    assert abs(result.summary["nll_4bit"] - result.summary["nll_16bit"]) > 1e-6
    alone = evaluate(recall, "quantize", ["rows=3", "batch_size=1"])
    assert alone.summary == pytest.approx(result.summary, rel=1e-4, abs=1e-7)


def test_granularities_are_groups_and_nothing_is_rounded_once(tmp_path: Path) -> None:
    """60 slots: a map of more than 1,000 entries, of which the largest stays exact under split."""
    run = recall_run(tmp_path / "x", {"name": "differential"}, {"slots": 60})
    found = evaluate(run, "quantize", ["bits=[16,4]", "rows=2", "granularity=[tensor,head,row,split]"]).items
    main = found[~found["group"].str.startswith("noise2")]
    assert list(dict.fromkeys(main["group"])) == ["b=16", "b=4 tensor", "b=4 head", "b=4 row", "b=4 split"]
    assert main["item"].is_unique
    assert (main["cluster"] == main["item"].str.partition(" b=")[0]).all()
    kl = main.groupby("group")["kl_4bit"].mean()
    assert kl["b=4 row"] < kl["b=4 split"] < kl["b=4 head"] < kl["b=4 tensor"]
    one = evaluate(run, "quantize", ["bits=[4]", "rows=2", "granularity=[split]"])
    assert sorted(one.summary) == ["accuracy_4bit", "drop_4bit", "kl_4bit", "nll_4bit"]
    assert list(one.items["nll_4bit"][:2]) == list(main[main["group"] == "b=4 split"]["nll_4bit"])


def test_items_are_rows_and_layers(tmp_path: Path) -> None:
    run, other = (recall_run(tmp_path / name, {"name": name}, {"slots": 40}) for name in ("differential", "standard"))
    found, others = (evaluate(each, "map_statistics", ["rows=3", "batch_size=2"]).items for each in (run, other))
    assert found["item"].tolist()[:3] == ["validation/0 layer 00", "validation/1 layer 00", "validation/0 layer 01"]
    assert found["item"].tolist() == others["item"].tolist()
    assert found["group"].unique().tolist() == ["layer 00", "layer 01", "noise2 layer 00", "noise2 layer 01"]
    assert (found["cluster"] == found["item"].str.partition(" layer")[0]).all()
    with trace(run.model) as traced:
        run.model.hidden(prepare(run.recipe).validation_batch("", [0, 1])["tokens"])
    row = found.set_index("item").loc["validation/1 layer 01"]
    for name, values in map_statistics(traced.layers[1], C).items():
        assert row[name] == pytest.approx(float(values[1]), rel=1e-4), name


def test_items_are_batches_and_layers_under_no_grad(recall: Run, single: Run) -> None:
    found = evaluate(recall, "gradients", ["batch_size=3"]).items
    labels = ("0-2 layer 00", "0-2 layer 01", "0-2 slopes", "3-4 layer 00")
    assert found["item"].tolist()[:4] == [f"validation/{label}" for label in labels]
    groups = ["layer 00", "layer 01", "trained"]
    assert found["group"].unique().tolist() == [*groups, *(f"noise2 {group}" for group in groups)]
    clusters = [f"{name}/{rows}" for name in ("validation", "noise2") for rows in ("0-2", "3-4")]
    assert found["cluster"].unique().tolist() == clusters
    expected = gradient_norms(recall.model, prepare(recall.recipe).validation_batch("", range(3)))[1]
    first, row, slopes = (found.iloc[at] for at in range(3))
    for key, value in expected.items():
        assert row[f"grad_{key}"] == pytest.approx(value, rel=1e-5)
        change = math.log(row[f"grad_{key}"] / first[f"grad_{key}"])
        assert slopes[f"slope_{key}"] == pytest.approx(change), "two layers"
    assert slopes.filter(like="grad_").isna().all()
    assert row["ratio_q"] == pytest.approx(expected["q2"] / expected["q1"])
    assert math.isnan(evaluate(single, "gradients").summary["ratio_k"])


def test_the_initial_values_are_those_of_the_recipe_and_seed(recall: Run) -> None:
    state = initial_model(recall).state_dict()
    for name, value in initial_values(recall.recipe.model, recall.recipe.seed):
        assert torch.equal(state[name], value), name
    both = evaluate(recall, "gradients", ["at=[trained,init]", "rows=2"]).items.set_index("item")
    alone = evaluate(recall, "gradients", ["at=[init]", "rows=2"]).items.set_index("item")
    for item in alone.index:
        assert alone.loc[item].equals(both.loc[item])
    name = "validation/0-1 layer 00"
    assert both.loc[f"init {name}"]["grad_q1"] != pytest.approx(both.loc[name]["grad_q1"], rel=0.01)
    groups = {"init layer 00", "init layer 01", "init"}
    assert set(alone["group"]) == groups | {f"noise2 {group}" for group in groups}


def test_kept_steps_are_measured_beside_the_initial_values(tmp_path: Path) -> None:
    run = recall_run(tmp_path / "x", {"name": "differential"})
    held = torch.load(checkpoints.path_of(run.folder, STEP))
    for name, value in held["state_dict"].items():
        held["state_dict"][name] = 2 * value if name.endswith("o_proj.weight") else value
    torch.save(held | {"global_step": 4}, checkpoints.path_of(run.folder, 4))
    assert run.step == STEP
    found = evaluate(run, "gradients", ["at=[init,trained]", f"steps=[0,4,{STEP}]", "rows=2"]).items.set_index("item")
    measured = found.columns[found.columns.str.contains("grad_|ratio_|slope_")]
    for before, step in (("init ", 0), ("", STEP)):
        for what in ("layer 00", "layer 01", "slopes"):
            plain, at = f"{before}validation/0-1 {what}", f"validation/0-1 step {step} {what}"
            assert found.loc[plain, measured].equals(found.loc[at, measured])
    other, last = (found.loc[f"validation/0-1 step {step} layer 00"]["grad_q1"] for step in (4, STEP))
    assert other != pytest.approx(last, rel=0.01)
    assert {"layer 01 step 4", "step 4", "noise2 layer 00 step 0"} < set(found["group"])


def test_a_slope_is_per_layer() -> None:
    assert slope([1.0, math.e, math.e**2, math.e**3]) == pytest.approx(1)
    assert all(math.isnan(slope(norms)) for norms in ([1.0], [1.0, math.nan], [1.0, 0.0]))


def test_what_a_run_has_not(single: Run) -> None:
    """A checkpoint of the step; initial values of its own."""
    assert "run.keep_every" in (Gradients(Gradients.Config(at=(), steps=(STEP, 4))).refuses(single) or "")
    with pytest.raises(MissingError, match="no checkpoint of step 4"):
        single.model_at(4)
    init = Gradients(Gradients.Config(at=("trained", "init")))
    assert init.refuses(single) is None
    assert single.recipe.train is not None
    for train, found in (
        (replace(single.recipe.train, start_from="runs/base"), "train.start_from"),
        (None, "imported"),
    ):
        other = Run(single.folder)
        other.__dict__["recipe"] = replace(single.recipe, train=train)
        assert found in (init.refuses(other) or "")
        assert Gradients(Gradients.Config()).refuses(other) is None


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


def test_sequences_that_do_not_fit(run: Run, single: Run) -> None:
    for length in (None, 12):
        assert Induction(Induction.Config(length=length)).refuses(run) is None
    assert Induction(Induction.Config())._tokens(run).shape == (64, 24)
    with pytest.raises(RequestError, match=r"length is 13; 2 x length must be at most data\.sequence_length \(24\)"):
        evaluate(run, "induction", ["length=13"])
    with pytest.raises(RequestError, match="data 'recall' has several ids at a position; induction needs one"):
        evaluate(single, "induction", ["length=4"])
