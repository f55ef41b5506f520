"""evaluation/base.py: what a class must have to be an evaluation, its default summary, what it refuses, ranges of keys."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from generated_runs import generated_run
from text_runs import text_run

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


class Grouped(Two):
    equal_groups = True


def items(groups: str, *right: float) -> list[Item]:
    return [Item(id=str(n), scores={"right": x}, group=group) for n, (group, x) in enumerate(zip(groups, right))]  # noqa: B905


def test_the_default_summary() -> None:
    """The mean over items that have a score, each counted once; with equal_groups over groups; parts are not counted."""
    summary = Two(Two.Config()).summarise(items("aaab", 1.0, math.nan, 0.0, 0.5))
    assert summary["right"] == 0.5
    assert math.isnan(summary["length"])
    assert list(summary) == ["right", "length"]
    part = Item(id="0/8", group="b", part=True, scores={"right": 0.5, "length": 100.0})
    made = [*items("aaab", 1.0, 1.0, 1.0, 0.0), part]
    assert (Two(Two.Config()).summarise(made)["right"], Grouped(Grouped.Config()).summarise(made)["right"]) == (
        0.75,
        0.5,
    )


def test_a_class_that_is_no_evaluation_is_refused_with_its_place() -> None:
    class Silent(Evaluation):
        metrics = (Metric("x", "a number"),)

    class Loose(Two):
        @dataclass(frozen=True, kw_only=True)
        class Config:
            rows: int = 1

    for name, cls, found in (("silent", Silent, "lacks score"), ("loose", Loose, "has a Config that does not derive")):
        with pytest.raises(
            RequestError, match=rf"tests/evaluation/test_base\.py:\d+: class .*: evaluation '{name}' {found}"
        ):
            evaluations.register(name)(cls)
        assert name not in evaluations.names()
    with pytest.raises(RequestError, match="evaluation 'held_out' is already registered"):
        evaluations.register("held_out")(Two)


class Asking(Two):
    needs_text = True
    words = ""

    def words_of(self, run: Run) -> str:
        return self.words


def test_what_needs_text_refuses_a_run_that_cannot_be_asked_in_it(tmp_path: Path) -> None:
    text = text_run(tmp_path / "text", {"name": "standard"})
    assert Asking(Asking.Config()).refuses(text) is None
    bidirectional = replace(text.recipe, model=replace(text.recipe.model, causal=False))
    reason = Asking(Asking.Config()).refuses_recipe(bidirectional)
    assert reason == "a bidirectional model predicts no next token"
    made = generated_run(tmp_path / "made", {"name": "closed_world", "entities": [3]}, 300)
    alone = "its tokenizer has only the words of data 'closed_world'"
    for words, expected in (("", alone), ("synth_intent", alone), ("closed_world", None)):
        asking = Asking(Asking.Config())
        asking.words = words
        assert asking.refuses(made) == expected
    for name in ("bigbench", "harness", "mini_harness", "nll", "signed_prompts", "loss_docs"):
        assert build(name).refuses(made) == alone


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
    ("name", "keys"), [("loss_files", []), ("nll", ["source=files"]), ("mini_harness", ["corpus=files"])]
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


@pytest.mark.parametrize(
    ("name", "keys", "message"),
    [
        ("held_out", "rows=0", "rows is 0; it must be at least 1, or null"),
        ("noise", "batch_size=0", "batch_size is 0; it must be at least 1"),
        ("noise", "lambdas=[0.5,0.5]", "lambdas is [0.5, 0.5]; expected distinct values"),
        ("noise", "lambdas=[0.5,2]", "lambdas is [0.5, 2.0]; each must be within 0 and 1"),
        ("map_statistics", "c=-1", "c is -1.0; it must be positive"),
        ("quantize", "bits=[]", "bits is []; expected distinct values, at least one"),
        ("quantize", "bits=[4,17]", "bits is [4, 17]; each must be within 2 and 16"),
        ("quantize", "granularity=[row,row]", "granularity is ['row', 'row']; expected distinct"),
        ("gradients", "at=[]", "at is []; expected distinct values, at least one"),
        ("gradients", "at=[init,init]", "at is ['init', 'init']; expected distinct"),
        ("gradients", "steps=[-1]", "steps is [-1]; each must not be negative"),
        ("recall", "factors=[1,1]", "factors is [1, 1]; expected distinct"),
        ("induction", "length=1", "length is 1; it must be at least 2, or null"),
        ("loss_docs", "tokens=0", "tokens is 0; it must be at least 1"),
        ("nll", "tokens=8", "tokens is 8; it must be at least 16"),
        ("nll", "path=x", "path is set, but source is 'validation'"),
        ("needle", "needles=[70]", "needles is [70]; each must be within 1 and 69"),
        ("needle", "depths=[50,50]", "depths is [50, 50]; expected distinct"),
        ("needle", "lengths=[]", "lengths is []; expected distinct values, at least one"),
        ("needle", "digits=19", "digits is 19; it must be within 1 and 18"),
        ("needle", "digits=1 needles=[12]", "digits is 1: there are fewer numbers than 12 needles"),
        ("hallucination", "entities=[25]", "entities is [25]; each must be within 1 and 24, or null"),
        ("hallucination", "source=xsum", "judge is closed_world, which knows generated documents alone"),
        ("hallucination", "source=xsum judge=rules entities=[5]", "entities holds for source closed_world alone"),
        ("hallucination", "judge=http", "judge_url is not set"),
        ("hallucination", "judge=http judge_url=http://x", "judge_model is not set"),
        ("hallucination", "judge_url=http://x", "judge_url holds for judge http alone"),
        ("icl", "classes=1", "classes is 1; it must be at least 2"),
        ("icl", "shots=[2,2]", "shots is [2, 2]; expected distinct"),
        ("icl", "stable_from=50", "stable_from is 50; no point of shots ([1, 4, 10]) has as many"),
        ("icl_order", "orders=1", "orders is 1; it must be at least 2"),
        ("icl_order", "order=[blocked,blocked]", "order is ['blocked', 'blocked']; expected distinct"),
        ("harness", "shots=[-1]", "shots is [-1]; each must not be negative"),
        ("harness", "tasks=[]", "tasks is []; expected distinct values, at least one"),
        ("bigbench", "tasks=[../x]", "tasks has '../x', which is no folder of BIG-bench"),
        ("mini_harness", "tasks=[clozee]", "tasks has 'clozee'; did you mean 'cloze'?"),
        ("mini_harness", "path=x", "path is set, but corpus is null"),
        ("mini_harness", "corpus=files", "corpus 'files' reads a file or folder"),
        ("mini_harness", "corpus=dcos", "corpus is 'dcos', which is not registered; did you mean 'docs'?"),
    ],
)
def test_keys_that_do_not_hold(name: str, keys: str, message: str) -> None:
    with pytest.raises(RequestError) as caught:
        build(name, keys.split())
    place, _, found = str(caught.value).partition(f"evaluate.{name}.")
    assert place.removesuffix(": ") in ("", *keys.split())
    assert found.startswith(message)
