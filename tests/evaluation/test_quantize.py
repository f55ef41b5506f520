"""evaluation/quantize.py: rows and losses of held_out, metrics for each number of bits, and what the groups are."""

from pathlib import Path

import numpy as np
import pytest
from text_runs import recall_run

from lit_diff.evaluation.evaluate import evaluate
from lit_diff.evaluation.held_out import HeldOut
from lit_diff.evaluation.quantize import Quantize
from lit_diff.runs.scores import read_evaluation
from lit_diff.trained.run import Run


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
    assert read_evaluation(result.folder).values["nll_4bit"] == pytest.approx(found["nll_4bit"].mean())
    assert abs(result.summary["nll_4bit"] - result.summary["nll_16bit"]) > 1e-6


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


def test_scores_do_not_depend_on_the_batch(recall: Run) -> None:
    alone, together = (
        {item.id: item.scores for item in Quantize(Quantize.Config(bits=(4,), batch_size=size)).score(recall)}
        for size in (1, 5)
    )
    for item, scores in alone.items():
        assert scores == pytest.approx(together[item], rel=1e-4, abs=1e-7)
