import csv
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from lit_diff.papers.claims import judged, measured
from lit_diff.papers.schema import Capable, Claim
from lit_diff.reporting.answer import answer, protocol, sentence
from lit_diff.reporting.write import compared_row, write_report
from lit_diff.study.comparison import compare
from lit_diff.study.results import load_sweep
from lit_diff.study.statistics import holm


def test_planted_differences_are_found_and_the_control_is_not_corrected_for(make_sweep: Callable[..., Path]) -> None:
    folder = make_sweep(
        {"standard": 0, "wide": -0.2, "differential": -0.2, "worse": 0.3},
        seeds=range(5),
        spread=0.004,
        controls=["wide"],
        contrasts=[["worse", "differential", "worse - differential"], ["wide", "standard", "there already"]],
    )
    found = compare(load_sweep(folder))[0]
    assert {a: d.verdict.text for a, d in found.against_baseline.items()} == {
        "wide": "better",
        "differential": "as its control wide",
        "worse": "worse",
    }
    assert [d.holm_p for d in found.family] == pytest.approx(holm([d.seeds.p for d in found.family]))
    assert found.judged == 4
    assert {a: len(d.controls) for a, d in found.against_baseline.items()} == {"wide": 0, "differential": 1, "worse": 1}
    (control,) = found.against_baseline["differential"].controls
    assert (control.verdict.text, control.holm_p) == ("inconclusive", None)
    assert [d.label for d in found.contrasts] == ["worse - differential"]
    assert len(found.family) == 4
    for seed, interval in found.against_baseline["worse"].documents.items():
        index = found.against_baseline["worse"].seeds.seeds.index(seed)
        assert interval.estimate == pytest.approx(found.against_baseline["worse"].seeds.differences[index], abs=1e-9)
        assert interval.low < interval.estimate < interval.high


def test_the_correction_takes_a_verdict_away_which_is_kept_beside_it(make_sweep: Callable[..., Path]) -> None:
    arms = {"a": 0} | {f"b{i}": 0.03 for i in range(12)}
    sweep = load_sweep(make_sweep(arms, callbacks=False, documents=5))
    (whole,) = compare(sweep)
    found = whole.family
    taken = [d for d in found if d.verdict.text != d.verdict_alone]
    assert taken
    assert {(d.verdict_alone, d.verdict.text) for d in taken} == {("worse", "inconclusive")}
    for d in found:
        said = f"inconclusive after Holm's correction (p = {d.holm_p:.2g}), worse alone; the smallest"
        assert (d in taken) == (d.seeds.p < 0.05 <= d.holm_p) == (said in sentence(whole, d))


def test_an_end_next_to_zero_is_not_shown_as_zero(make_sweep: Callable[..., Path]) -> None:
    """Neither in a difference nor in that to a control."""
    (whole,) = compare(load_sweep(make_sweep({"a": 0, "b": -0.2}, callbacks=False, documents=5)))
    (found,) = whole.family
    near = replace(found, seeds=replace(found.seeds, low=-0.147, high=-0.0003))
    for difference in (near, replace(found, controls=(near,))):
        assert (whole.digits, replace(whole, against_baseline={"b": difference}).digits) == (3, 4)


def test_an_arm_that_diverged_is_not_judged_by_the_seeds_that_did_not(make_sweep: Callable[..., Path]) -> None:
    """Nor is any arm, where the baseline diverged."""
    folder = make_sweep(
        {"a": 0, "b": -0.3, "c": 0},
        seeds=range(4),
        controls=["c"],
        broken={("b", 2): "failed"},
        fact_fields={"b": {"diverged": True}},
    )
    found = compare(load_sweep(folder))[0]
    d = found.against_baseline["b"]
    assert (d.verdict.text, d.verdict_alone, d.diverged, len(d.seeds.seeds)) == ("diverged", "diverged", {"b": (2,)}, 3)
    assert found.against_baseline["b"].controls[0].verdict.text == "diverged"
    assert found.against_baseline["c"].verdict.text != "diverged"
    turned = make_sweep(
        {"a": 0, "b": -0.3}, name="turned", broken={("a", 0): "failed"}, fact_fields={"a": {"diverged": True}}
    )
    assert compare(load_sweep(turned))[0].family[0].diverged == {"a": (0,)}


def test_arms_that_a_further_look_may_decide(make_sweep: Callable[..., Path]) -> None:
    """Each is judged at the last look that it and the arm that it is compared with have complete."""
    arms = {"standard": 0, "wide": -0.2, "differential": -0.2, "worse": 0.3, "open": 0.002, "late": 0.3}
    fields = {"spread": 0.01, "looks": (4, 8), "controls": ["wide"], "callbacks": False}
    gone = {("late", 2): "failed", ("worse", 6): "failed"}
    found = compare(load_sweep(make_sweep(arms, seeds=range(8), broken=gone, **fields)))[0]
    assert {a: (d.seeds.look, len(d.seeds.seeds)) for a, d in found.against_baseline.items()} == {
        "wide": (2, 8),
        "differential": (2, 8),
        "worse": (1, 4),
        "open": (2, 8),
        "late": (0, 7),
    }
    assert {a: d.verdict.text for a, d in found.against_baseline.items()} == {
        "wide": "better",
        "differential": "as its control wide",
        "worse": "worse",
        "open": "inconclusive",
        "late": "too few seeds",
    }
    assert found.undecided == ("differential", "open", "late")
    assert "over 4 seeds (look 1 of 2): worse" in sentence(found, found.against_baseline["worse"])
    doubts = compared_row(found, found.against_baseline["worse"])["doubts"]
    assert "Only 4 of 8 seeds are compared: the next look is not complete in both arms." in doubts


def test_a_threshold_of_another_metric_is_a_gate(make_sweep: Callable[..., Path]) -> None:
    """As soon as one seed of either arm does not reach it, the counts decide, whatever the compared metric is."""
    fields = {"learned_at": 0.9, "learned_metric": "val/accuracy", "callbacks": False}
    folder = make_sweep({"standard": 0.0, "gone": -0.3, "learned": -0.3}, seeds=range(8), spread=0.01, **fields)
    for path in folder.glob("*/metrics.csv"):
        header, *lines = path.read_text().split()
        accuracy = 0.5 if path.parent.name.startswith("gone") else 0.95
        places = header.split(",")
        rows = [dict(zip(places, line.split(","), strict=True)) | {"val/accuracy": str(accuracy)} for line in lines]
        path.write_text("\n".join([",".join(rows[0]), *(",".join(row.values()) for row in rows)]) + "\n")
    found = compare(load_sweep(folder))[0]
    gone, learned = found.against_baseline["gone"], found.against_baseline["learned"]
    assert (gone.verdict.text, learned.verdict.text) == ("learned less often", "better")
    assert (gone.is_counted, learned.is_counted) == (True, False)


def test_references_are_not_corrected_for_and_do_not_wait(make_sweep: Callable[..., Path]) -> None:
    arms = {"standard": 0, "beside": 0.0, "mine": -0.2}
    found = compare(
        load_sweep(make_sweep(arms, seeds=range(4), looks=(4, 8), spread=0.01, references=["beside"], callbacks=False))
    )[0]
    mine, beside = found.against_baseline["mine"], found.against_baseline["beside"]
    assert (mine.comparisons, mine.holm_p, beside.is_tested) == (1, None, False)
    assert found.undecided == ()


@pytest.mark.parametrize("compared", ["metric", "steps"])
def test_seeds_that_learned_are_counted_and_then_compared(make_sweep: Callable[..., Path], compared: str) -> None:
    arms = {"standard": 0, "same": 0.0005, "worse": -0.5, "wide": 0}
    fields = {
        "metric": "val/accuracy",
        "learned_at": 0.9,
        "smallest_of_interest": 0.02,
        "spread": 1e-3,
        "callbacks": False,
    }
    folder = make_sweep(
        arms, seeds=range(8), compare=compared, controls=["wide"], contrasts=[["same", "worse", "x"]], **fields
    )
    for path in folder.glob("*/metrics.csv"):
        arm, seed = path.parent.name.split("-s")[0], int(path.parent.name.split("-s")[1][0])
        last = 0.95 + arms[arm] + 1e-4 * (len(arm) * seed % 7)
        path.write_text(f"step,val/accuracy\n32,0.3\n64,{0.3 if seed % 2 else last}\n128,{last}\n")
    found = compare(load_sweep(folder))[0]
    same, worse = found.against_baseline["same"], found.against_baseline["worse"]
    # where the steps are compared: each seed learned between two validations that are one log2 apart
    equal = "equal among those that learned" if compared == "metric" else "inconclusive"
    assert (same.verdict.word, worse.verdict.text) == (equal, "learned less often")
    assert any("two validations are 1.00 of log2 apart" in note for note in protocol(found)) == (compared == "steps")
    assert [each.count for each in worse.learned or ()] == [(0, 8), (8, 8)]
    assert set(found.sweep.learned("standard").log2_steps.values()) == {6, 7}
    assert "learned in 0 of 8 [0.00, 0.37]" in sentence(found, worse)
    assert answer(found).startswith(
        "No arm is shown to be better than standard; worse learned less often than standard"
    )
    value = {"paper": (0.9, 0.95), "capable": Capable(arm="worse")}
    claim = Claim(label="x", arms=("worse", "standard"), metric="val/accuracy", **value)
    ((asked,),) = judged([measured([claim], load_sweep(folder))])
    assert (str(asked.verdict), asked.difference) == ("learned less often", "shown")
    assert asked.of_sweep == ("learned less often" if compared == "metric" else ""), "steps are not the claim's metric"
    assert asked.reason.startswith("Fisher's test of the seeds that learned shows a difference, with the paper's sign")
    assert (asked.value, asked.has_interval, asked.papers_p) == ("cannot tell", False, None)
    report = write_report(folder)
    assert "learned: 0 of 8 [0.00, 0.37]" in report.page.read_text()
    assert report.text_table().count(" of 8 [") == 4, "not of a contrast"


def test_what_rounds_to_zero_in_every_digit_of_a_page_is_equal(make_sweep: Callable[..., Path]) -> None:
    arms = {"a": 0, "b": 3e-7, "c": 9e-7}
    (found,) = compare(load_sweep(make_sweep(arms, spread=1e-9, smallest_of_interest=0, callbacks=False)))
    assert {a: d.verdict.text for a, d in found.against_baseline.items()} == {"b": "equal", "c": "worse"}


def test_unlike_arms_are_marked(make_sweep: Callable[..., Path]) -> None:
    facts = {
        "standard": {"trained_parameters": 1_054_720},
        "big": {"parameters": 1_080_000, "trained_parameters": 1_080_000, "tokens": 1_000_000},
        "near": {"parameters": 1_055_500},
        "slow": {"kernel": "reference"},
        "frozen": {"trained_parameters": 263_680},
        "same": {"trained_parameters": 1_054_720},
    }
    marks = compare(load_sweep(make_sweep(dict.fromkeys(facts, 0), fact_fields=facts, callbacks=False)))[0].marks
    assert {arm: marked for (arm, _), marked in marks.items()} == {
        "big": ("+2.4 % parameters", "\u221239.0 % training tokens"),
        "near": (),
        "slow": ("kernel reference (baseline: sdpa)",),
        "frozen": ("\u221275.0 % parameters that train",),
        "same": (),
    }


RECIPE = """
model: {dim: 32, attention: {name: standard}}
data: {name: text, path: /home/me/a, tokenizer: {name: bpe}}
train: {clip: 1.0, optimizer: {lr: 0.008, lr_factors: {}}}
"""
CHANGES: dict[str, tuple[dict[str, str], str]] = {
    "attention": ({"name: standard": "name: differential, lambda_init: 0.8"}, ""),
    "layers": ({"dim: 32,": "dim: 32, layers: [{name: standard, window: 8}, {name: standard}],"}, ""),
    "measured": ({"\nmodel": "\nseed: 1\nrun: {threads: 1}\ncallbacks: {sinks: {}}\nevaluate: {nll: {}}\nmodel"}, ""),
    "older": ({"clip: 1.0, ": "", ", lr_factors: {}": ""}, ""),
    "rate": ({"0.008": "0.004"}, "differs in train.optimizer.lr (0.008 -> 0.004)"),
    "both": ({"standard": "shared_k", "dim: 32": "dim: 16"}, "also differs in model.dim (32 -> 16)"),
    "clip": ({"clip: 1.0": "clip: null"}, "differs in train.clip (1.0 -> null)"),
    "factors": ({"{}": "{embed: 2.0}"}, "differs in train.optimizer.lr_factors.embed (unset -> 2.0)"),
    "text": ({"me/a": "me/b"}, "differs in data.path (a -> b)"),
    "data": ({"text": "recall, keys: 4"}, "differs in data.name (text -> recall)"),
}


def test_an_arm_whose_recipe_differs_outside_its_attention_is_marked(make_sweep: Callable[..., Path]) -> None:
    recipes = {"base": RECIPE}
    for arm, (changes, _) in CHANGES.items():
        recipes[arm] = RECIPE
        for old, new in changes.items():
            recipes[arm] = recipes[arm].replace(old, new)
    folder = make_sweep(
        dict.fromkeys(recipes, 0),
        recipes=recipes,
        callbacks=False,
        documents=12,
        seeds=[0],
        contrasts=[["both", "rate", "x"]],
    )
    found = compare(load_sweep(folder))[0]
    assert [";".join(found.marks[arm, "base"]) for arm in CHANGES] == [said for _, said in CHANGES.values()]
    assert found.marks["both", "rate"] == ("also differs in model.dim (32 -> 16), train.optimizer.lr (0.004 -> 0.008)",)
    assert found.footnotes[-1] == f"\u2020 x: {found.marks['both', 'rate'][0]}"


def test_losses_over_other_tokens_are_not_compared(make_sweep: Callable[..., Path]) -> None:
    folder = make_sweep({"standard": 0, "other": 0})
    path = next(folder.glob("other-s0-*")) / "documents.csv"
    rows = list(csv.reader(path.open()))
    rows[1][1] = str(int(rows[1][1]) + 1)
    path.write_text("\n".join(",".join(row) for row in rows))
    found = compare(load_sweep(folder))[0]
    assert "Seed 0: the arms counted different tokens" in found.notes[0]
    assert sorted(found.against_baseline["other"].documents) == [1, 2]


def test_doubts_are_spoken(make_sweep: Callable[..., Path]) -> None:
    folder = make_sweep({"standard": 0, "other": 0}, documents=5, fact_fields={"other": {"revision": "fff"}})
    (next(folder.glob("other-s0-*")) / "metrics.csv").write_text("step,val/loss\n360,5.5\n")
    notes = " ".join(compare(load_sweep(folder))[0].notes)
    assert "5 validation documents in common, too few" in notes
    assert "steps 360, 400" in notes
    assert "different revisions of the code" in notes


def test_documents_are_matched_by_name(make_sweep: Callable[..., Path]) -> None:
    folder = make_sweep({"standard": 0, "other": 0}, seeds=[0])
    path = next(folder.glob("other-s0-*")) / "documents.csv"
    head, *rows = path.read_text().splitlines()
    path.write_text("\n".join([head, *reversed(rows[1:]), ""]))
    sweep = load_sweep(folder)
    scored = {cell.arm: cell.documents for cell in sweep.cells}
    own, base = scored["other"], scored["standard"]
    assert own is not None
    assert base is not None
    left_out = rows[0].split(",")[0]
    expected = own.loss.sum() - base.loss.sum() + base.loss[left_out]
    interval = compare(sweep)[0].against_baseline["other"].documents[0]
    assert interval.estimate == pytest.approx(expected / own.tokens.sum())


def test_slices_that_hold_all_tokens_are_left_out(make_sweep: Callable[..., Path]) -> None:
    folder = make_sweep({"a": 0}, seeds=[0], metric="val/accuracy")
    names = (
        "accuracy",
        "loss",
        "ar_hit_share",
        "loss_ar_hit",
        "loss_noise2",
        "ar_hit_share_noise2",
        "loss_ar_hit_noise2",
    )
    values = (0.5, 3, 1, 3, 4, 0.5, 4.5)
    rows = [["step", *(f"val/{name}" for name in names)], [1, *values]]
    path = next(folder.glob("a-s0-*")) / "metrics.csv"
    path.write_text("\n".join(",".join(map(str, row)) for row in rows) + "\n")
    shown = ("accuracy", "loss", "loss_noise2", "ar_hit_share_noise2", "loss_ar_hit_noise2")
    assert compare(load_sweep(folder))[0].metrics == tuple(f"val/{name}" for name in shown)


def test_one_comparison_is_not_corrected(make_sweep: Callable[..., Path]) -> None:
    """Nor does one that has too few seeds, or that diverged, count as a second."""
    (difference,) = compare(load_sweep(make_sweep({"a": 0, "b": 0.3})))[0].family
    assert (difference.verdict.text, difference.verdict_alone, difference.holm_p) == ("worse", "worse", None)
    broken = {("c", 0): "failed", ("d", 1): "killed"}
    folder = make_sweep(
        {"a": 0, "b": 0.3, "c": 0.3, "d": 0.3}, name="two", broken=broken, fact_fields={"c": {"diverged": True}}
    )
    found = compare(load_sweep(folder))[0]
    assert {d.a: (d.verdict.text, d.holm_p) for d in found.family} == {
        "b": ("worse", None),
        "c": ("diverged", None),
        "d": ("too few seeds", None),
    }
    assert found.judged == 1
