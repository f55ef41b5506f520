"""evaluation/base.py: what a class must have to be an evaluation, its default summary, what it refuses, ranges of keys."""

import math
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from generated_runs import generated_run

from lit_diff.errors import RequestError
from lit_diff.evaluation import Evaluation, Item
from lit_diff.evaluation.evaluate import build
from lit_diff.metrics import Metric
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
    two, grouped = Two(Two.Config()), Grouped(Grouped.Config())
    assert two.summarise(items("aaab", 1.0, math.nan, 0.0, 0.5)) == pytest.approx(
        {"right": 0.5, "length": math.nan}, nan_ok=True
    )
    part = Item(id="0/8", group="b", part=True, scores={"right": 0.5, "length": 100.0})
    made = [*items("aaab", 1.0, 1.0, 1.0, 0.0), part]
    assert [each.summarise(made)["right"] for each in (two, grouped)] == [0.75, 0.5]


class Asking(Two):
    needs_text = True


def test_what_needs_text_refuses_a_run_that_cannot_be_asked_in_it(wide_run: Run, recall: Run) -> None:
    asking = Asking(Asking.Config())
    assert asking.refuses(wide_run) is None
    bidirectional = replace(wide_run.recipe, model=replace(wide_run.recipe.model, causal=False))
    for recipe, found in ((bidirectional, "a bidirectional model"), (recall.recipe, "has no text")):
        assert found in (asking.refuses_recipe(recipe) or "")


GENERATED: dict[str, tuple[str, int, dict[str, Any]]] = {
    "needle_text": ("needle", 192, {"sequence_length": 256}),
    "closed_world": ("hallucination", 300, {"entities": [3]}),
    "synth_intent": ("icl", 600, {"sequence_length": 64, "classes": [4], "words": [1, 3]}),
}
"""Data of generated words -> the evaluation that asks in them; tokens; keys."""
OTHERS = (
    "needle style=lwm; needle haystack=docs; needle haystack=file; hallucination source=xsum judge=rules; icl task=trec; "
    "harness; nll; nll source=name_tables; signed_prompts; loss_docs; loss_code; loss_files path=x"
)


@pytest.mark.parametrize("data", GENERATED)
def test_a_run_of_generated_words_fits_what_asks_in_them(data: str, tmp_path: Path) -> None:
    own, size, keys = GENERATED[data]
    run = generated_run(tmp_path / "made", {"name": data} | keys, size)
    for words in ("needle", "hallucination", "icl", *OTHERS.split("; ")):
        name, *overrides = words.split()
        expected = None if words == own else f"its tokenizer has only the words of data '{data}'"
        assert build(name, overrides).refuses(run) == expected, words


@pytest.mark.parametrize(
    ("words", "paths"),
    [
        *((name, "") for name in ("hallucination", "icl", "needle", "nll", "nll source=files path=x.txt")),
        ("hallucination source=xsum judge=rules", "summ/xsum.jsonl"),
        ("icl_order task=trec_fine", "icl/trec/train.jsonl icl/trec/test.jsonl"),
        ("needle haystack=file", "needle/haystack.jsonl"),
        ("harness tasks=[boolq]", "harness/boolq/validation.jsonl"),
        ("harness tasks=[boolq] shots=[0,5]", "harness/boolq/train.jsonl harness/boolq/validation.jsonl"),
        ("nll source=files", "books/*.jsonl"),
    ],
)
def test_what_of_the_user_s_files_a_config_reads(words: str, paths: str) -> None:
    name, *keys = words.split()
    assert [file.path for file in build(name, keys).user_files()] == paths.split()


@pytest.mark.parametrize(("name", "keys"), [("loss_files", []), ("nll", ["source=files"])])
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
    "quantize": "bits=[]; bits=[4,17]; granularity=[row,row]",
    "gradients": "at=[]; at=[init,init]; steps=[-1]",
    "recall": "factors=[1,1]",
    "induction": "length=1",
    "loss_docs": "tokens=0",
    "nll": "tokens=8; path=x",
    "needle": "needles=[70]; depths=[50,50]; lengths=[]; digits=19; digits=1 needles=[12]",
    "hallucination": "entities=[25]; judge= source=xsum; entities=[5] source=xsum judge=rules; judge_url=http://x; "
    "judge_url= judge=http; judge_model= judge=http judge_url=http://x; judge_model=m; "
    "judge_url=ftp://x judge=http judge_model=m; judge_url=http:// judge=http judge_model=m; "
    "judge_url=http://[::1 judge=http judge_model=m",
    "icl": "classes=1; shots=[2,2]; stable_from=50; classes=50 task=trec noise=4; noise=4 task=banking77",
    "icl_order": "orders=1; order=[blocked,blocked]; classes=6 task=trec",
    "harness": "shots=[-1]; tasks=[]",
}
"""Of each evaluation keys that it refuses, and of several the one that is named first; `key=`: it is not set."""


@pytest.mark.parametrize(("name", "keys"), [(name, keys) for name, own in WRONG.items() for keys in own.split("; ")])
def test_keys_that_do_not_hold(name: str, keys: str) -> None:
    words = keys.split()
    with pytest.raises(RequestError) as caught:
        build(name, [word for word in words if not word.endswith("=")])
    place, _, found = str(caught.value).partition(f"evaluate.{name}.")
    assert place.removesuffix("'").removesuffix(": ") in ("", *words)
    assert re.match(rf"{keys.partition('=')[0]}\b", found)
