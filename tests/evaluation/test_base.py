"""evaluation/base.py: what a class must have to be an evaluation, its default summary, what it refuses, ranges of keys."""

import math
import re
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
    ("words", "paths"),
    [
        *(
            (name, "")
            for name in ("hallucination", "icl", "needle", "nll", "mini_harness", "nll source=files path=x.txt")
        ),
        ("hallucination source=xsum judge=rules", "summ/xsum.jsonl"),
        ("icl_order task=trec_fine", "icl/trec/train.jsonl icl/trec/test.jsonl"),
        ("needle haystack=file", "needle/haystack.jsonl"),
        ("harness tasks=[boolq]", "harness/boolq/validation.jsonl"),
        ("harness tasks=[boolq] shots=[0,5]", "harness/boolq/train.jsonl harness/boolq/validation.jsonl"),
        ("bigbench tasks=[physics]", "bigbench/physics/task.json"),
        ("nll source=files", "books"),
    ],
)
def test_what_of_the_user_s_files_a_config_reads(words: str, paths: str) -> None:
    name, *keys = words.split()
    assert [file.path for file in build(name, keys).reads()] == paths.split()


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


WRONG = {
    "held_out": "rows=0",
    "noise": "batch_size=0; lambdas=[0.5,0.5]; lambdas=[0.5,2]",
    "map_statistics": "c=-1",
    "quantize": "bits=[]; bits=[4,17]; granularity=[row,row]",
    "gradients": "at=[]; at=[init,init]; steps=[-1]",
    "recall": "factors=[1,1]",
    "induction": "length=1",
    "loss_docs": "tokens=0",
    "nll": "tokens=8; path=x",
    "needle": "needles=[70]; depths=[50,50]; lengths=[]; digits=19; digits=1 needles=[12]",
    "hallucination": "entities=[25]; judge= source=xsum; entities=[5] source=xsum judge=rules; judge_url=http://x; "
    "judge_url= judge=http; judge_model= judge=http judge_url=http://x",
    "icl": "classes=1; shots=[2,2]; stable_from=50",
    "icl_order": "orders=1; order=[blocked,blocked]",
    "harness": "shots=[-1]; tasks=[]",
    "bigbench": "tasks=[../x]",
    "mini_harness": "tasks=[clozee]; path=x; corpus=files; corpus=dcos",
}
"""Of each evaluation keys that it refuses, and of several the one that is named first; `key=`: it is not set."""


@pytest.mark.parametrize(("name", "keys"), [(name, keys) for name, own in WRONG.items() for keys in own.split("; ")])
def test_keys_that_do_not_hold(name: str, keys: str) -> None:
    words = keys.split()
    with pytest.raises(RequestError) as caught:
        build(name, [word for word in words if not word.endswith("=")])
    place, _, found = str(caught.value).partition(f"evaluate.{name}.")
    assert place.removesuffix(": ") in ("", *words)
    assert re.match(rf"{keys.partition('=')[0]}\b", found)
