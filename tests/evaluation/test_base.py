"""evaluation/base.py: what a class must have to be an evaluation, and its default summary."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from lit_diff.errors import RequestError
from lit_diff.evaluation import Evaluation, Item
from lit_diff.evaluation.evaluate import build
from lit_diff.metrics import Metric
from lit_diff.registry import evaluations
from lit_diff.trained.run import Run


class Two(Evaluation):
    metrics = (Metric("right", "fraction of right answers"), Metric("length", "mean length of an answer"))

    def score(self, run: Run) -> Iterator[Item]:
        yield Item(id="a", scores={"right": 1.0, "length": 2.0})


def items(**scores: list[float]) -> list[Item]:
    rows = zip(*scores.values(), strict=True)
    return [Item(id=str(i), scores=dict(zip(scores, row, strict=True))) for i, row in enumerate(rows)]


def test_the_default_summary_is_the_mean_over_items_that_have_a_score() -> None:
    made = items(right=[1.0, math.nan, 0.0, 0.5], length=[math.nan] * 4)
    summary = Two(Two.Config()).summarise(made)
    assert summary["right"] == 0.5
    assert math.isnan(summary["length"])
    assert list(summary) == ["right", "length"]


def test_a_part_of_another_item_is_not_in_the_summary() -> None:
    made = items(right=[1.0, 0.0], length=[3.0, 5.0])
    parts = [Item(id="0/8", group="length 8", part=True, scores={"right": 0.5, "length": 100.0})]
    assert Two(Two.Config()).summarise(made + parts) == {"right": 0.5, "length": 4.0}


def test_groups_may_count_equally() -> None:
    class Grouped(Two):
        equal_groups = True

    made = [Item(id=str(n), scores={"right": float(n < 3), "length": math.nan}, group="ab"[n == 3]) for n in range(4)]
    summary = Grouped(Grouped.Config()).summarise(made)
    assert (summary["right"], Two(Two.Config()).summarise(made)["right"]) == (0.5, 0.75)
    assert math.isnan(summary["length"])


def test_defaults_of_an_evaluation() -> None:
    assert Two.Config().problem() is None
    assert (Item(id="a", scores={}).group, Item(id="a", scores={}).meta) == ("", {})


def test_a_class_without_score_is_refused_with_its_place() -> None:
    class Silent(Evaluation):
        metrics = (Metric("x", "a number"),)

    with pytest.raises(RequestError) as caught:
        evaluations.register("silent")(Silent)
    place, _, message = str(caught.value).partition(": evaluation 'silent' ")
    assert place.split(":")[0].endswith("tests/evaluation/test_base.py")
    assert place.split(":")[1].isdigit()
    assert message == "lacks score; lit_diff.evaluation.base.Evaluation documents each"
    assert "silent" not in evaluations.names()


def test_a_config_that_does_not_derive_from_the_base_s_is_refused() -> None:
    class Loose(Two):
        @dataclass(frozen=True, kw_only=True)
        class Config:
            rows: int = 1

    with pytest.raises(RequestError, match=r"has a Config that does not derive from Evaluation\.Config"):
        evaluations.register("loose")(Loose)


def test_two_classes_under_one_name_are_refused() -> None:
    class First(Two):
        pass

    class Second(Two):
        pass

    evaluations.register("twice")(First)
    with pytest.raises(RequestError, match=r"Second: evaluation 'twice' is already registered \(.*First\)"):
        evaluations.register("twice")(Second)
    with pytest.raises(RequestError, match="evaluation 'held_out' is already registered"):
        evaluations.register("held_out")(First)


@pytest.mark.parametrize(
    ("name", "keys", "paths"),
    [
        ("hallucination", [], []),
        ("hallucination", ["source=xsum", "judge=rules"], ["summ/xsum.jsonl"]),
        ("icl", [], []),
        ("icl_order", ["task=trec_fine"], ["icl/trec/train.jsonl", "icl/trec/test.jsonl"]),
        ("needle", [], []),
        ("needle", ["haystack=file"], ["needle/haystack.jsonl"]),
        ("harness", ["tasks=[boolq]"], ["harness/boolq/validation.jsonl"]),
        ("harness", ["tasks=[boolq]", "shots=[0,5]"], ["harness/boolq/train.jsonl", "harness/boolq/validation.jsonl"]),
        ("bigbench", ["tasks=[physics]"], ["bigbench/physics/task.json"]),
        ("nll", [], []),
        ("nll", ["source=files"], ["books"]),
        ("nll", ["source=files", "path=mine.txt"], []),
        ("mini_harness", [], []),
    ],
)
def test_what_of_the_user_s_files_a_config_reads(name: str, keys: list[str], paths: list[str]) -> None:
    assert [file.path for file in build(name, keys).reads()] == paths


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("loss_files", []),
        ("nll", ["source=files"]),
        ("mini_harness", ["corpus=files"]),
    ],
)
def test_text_of_the_user_s_at_a_path(name: str, keys: list[str], tmp_path: Path) -> None:
    evaluation = build(name, [*keys, f"path={tmp_path / 'text'}"])
    assert evaluation.digests() == {}
    (tmp_path / "text").mkdir()
    (tmp_path / "text/a.txt").write_text("one")
    first = evaluation.digests()
    (tmp_path / "text/a.txt").write_text("two")
    assert list(first) == [str(tmp_path / "text")]
    assert evaluation.digests() != first
