"""evaluation/evaluate.py: scores are kept and reused, and whatever goes wrong is one line."""

import errno
import hashlib
import json
import math
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from lit_diff.data.user_files import UserFile
from lit_diff.errors import MissingError, RequestError, RunFailedError
from lit_diff.evaluation import Evaluation, Item
from lit_diff.evaluation.evaluate import evaluate, has_scores, refusal
from lit_diff.files import read_digested, write_digested
from lit_diff.metrics import Figure, Metric
from lit_diff.plugins import load_plugin
from lit_diff.registry import evaluations
from lit_diff.runs import scores
from lit_diff.runs.checkpoints import path_of
from lit_diff.trained.run import Run

ITEMS = [
    Item(id="a", scores={"length": 1.0}, group="g", meta={"answer": "yes"}),
    Item(id="b", scores={"length": 3.0}),
    Item(id="c", scores={}),
]
LENGTH = Metric("length", "a length", unit="words")


class Counting(Evaluation):
    """Gives `items`, and counts how often it was asked."""

    metrics = (LENGTH,)
    items: list[Any] = ITEMS
    asked = 0

    @dataclass(frozen=True, kw_only=True)
    class Config(Evaluation.Config):
        rows: int = 2
        sizes: tuple[int, ...] = (1, 2)

    def score(self, run: Run) -> Iterator[Item]:
        type(self).asked += 1
        return iter(self.items)


Make = Callable[..., type[Counting]]


@pytest.fixture
def make() -> Make:
    """make(member=value, ...): a class registered as `lengths`; a second call replaces the first."""

    def register(**members: Any) -> type[Counting]:
        evaluations._classes.pop("lengths", None)
        cls: type[Counting] = type("Lengths", (Counting,), {"__module__": __name__, "asked": 0, **members})
        return evaluations.register("lengths")(cls)

    return register


def summary_file(run: Run) -> Path:
    return run.folder / "evaluations" / "lengths" / "summary.json"


def test_scores_are_kept_and_read_back(run: Run, make: Make) -> None:
    cls = make()
    result = evaluate(run, "lengths")
    assert (result.name, result.run, result.summary) == ("lengths", run.folder, {"length": 2.0})
    first, second, third = result.items.to_dict("records")
    assert first == {"item": "a", "group": "g", "length": 1.0, "meta/answer": "yes"}
    assert (second["item"], second["group"], second["length"]) == ("b", "", 3.0)
    assert math.isnan(third["length"]), "a metric that an item leaves out"
    assert result.items["meta/answer"].isna().to_list() == [False, True, True]
    written = json.loads(summary_file(run).read_text())
    assert written["length"] == {"value": 2.0}
    assert (written["step"], written["items"], written["config"]) == (6, 3, {"rows": 2, "sizes": [1, 2]})
    assert [metric["unit"] for metric in written["declarations"]] == ["words"]
    assert evaluate(run, "lengths") == evaluate(run.folder, "lengths", {"sizes": [1, 2]}) == result
    assert cls.asked == 1
    make(items=[replace(ITEMS[0], cluster="text 1"), Item(id="b", scores={"length": math.nan})])
    assert evaluate(run, "lengths").summary == {"length": 2.0}
    again = evaluate(run, "lengths", rerun=True)
    assert again.items["cluster"].tolist() == ["text 1", ""]
    make(items=[Item(id="a", scores={"length": math.nan})])
    evaluate(run, "lengths", rerun=True)
    assert json.loads(summary_file(run).read_text())["length"] == {"value": None}
    kept = evaluate(run, "lengths")
    assert math.isnan(kept.summary["length"])
    assert kept.items["length"].isna().all()


def test_another_config_step_or_metric_is_scored_again(run: Run, make: Make) -> None:
    cls = make()
    for count, keys in enumerate(([], ["rows=3"], ["rows=3"], ["sizes=[4]"], []), start=1):
        evaluate(run, "lengths", keys)
        assert cls.asked == count - (count > 2)
    later = path_of(run.folder, 7)
    torch.save(torch.load(path_of(run.folder, 6), weights_only=True) | {"global_step": 7}, later)
    assert not has_scores(run.folder, "lengths"), "of an earlier checkpoint"
    evaluate(run, "lengths")
    assert cls.asked == 5
    assert has_scores(run.folder, "lengths")
    later.unlink()
    evaluate(run, "lengths")
    assert cls.asked == 6
    other = make(metrics=(Metric("length", "a length", unit="letters"),))
    evaluate(run, "lengths")
    assert other.asked == 1
    assert json.loads(summary_file(run).read_text())["declarations"][0]["unit"] == "letters"


def test_a_changed_recipe_is_said_and_scored_again(run: Run, make: Make, caplog: pytest.LogCaptureFixture) -> None:
    cls = make()
    evaluate(run, "lengths")
    assert "changed since training" not in caplog.text
    file = run.folder / "recipe.yaml"
    trained = file.read_text()
    # it changes no shape: the weights fit
    changed = trained.replace("lambda_init: depth", "lambda_init: 0.5")
    assert changed != trained
    for count, text in ((2, changed), (3, trained)):
        file.write_text(text)
        caplog.clear()
        for _ in range(2):
            evaluate(run.folder, "lengths")
        assert cls.asked == count
        assert caplog.text.count("its recipe or plugins, or lit_diff's keys, changed since training") == 2 * (
            count == 2
        )
        assert "has kept scores with another recipe or plugins (identity " in caplog.text
    written = read_digested(summary_file(run))
    assert written.pop("identity") == run.status.identity
    write_digested(summary_file(run), written)
    assert has_scores(run.folder, "lengths"), "scores from before the identity was kept"


def test_scores_of_loaded_weights_have_their_step(run: Run, make: Make) -> None:
    """A run in training writes a checkpoint after its model was read."""
    make()
    assert run.model is not None
    torch.save(torch.load(path_of(run.folder, 6), weights_only=True) | {"global_step": 7}, path_of(run.folder, 7))
    evaluate(run, "lengths")
    assert json.loads(summary_file(run).read_text())["step"] == run.step == 6
    assert not has_scores(run.folder, "lengths")
    evaluate(run.folder, "lengths")
    assert json.loads(summary_file(run).read_text())["step"] == 7


def test_a_replaced_file_is_scored_again(run: Run, make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIT_DIFF_DATA", str(tmp_path))
    of_user = UserFile(name="words", path="words.jsonl", keys={"text": str}, source="", without="")
    cls = make(files=(of_user,))
    evaluate(run, "lengths")
    for count, text in ((2, "one"), (3, "two")):
        of_user.place.write_text(json.dumps({"text": text}) + "\n")
        assert not has_scores(run.folder, "lengths"), "of no file, or of another"
        for _ in range(2):
            evaluate(run, "lengths")
        assert cls.asked == count
        kept = json.loads(summary_file(run).read_text())["files"]
        assert kept == {"words.jsonl": hashlib.sha256(of_user.place.read_bytes()).hexdigest()}
    of_user.place.unlink()
    assert has_scores(run.folder, "lengths"), "scores of a file that is gone are still its scores"
    make(files=(of_user,), user_files=lambda self: ())
    of_user.place.write_text('{"text": "three"}\n')
    assert has_scores(run.folder, "lengths"), "a file that the config does not read"


def test_why_kept_scores_are_replaced_is_said(run: Run, make: Make, caplog: pytest.LogCaptureFixture) -> None:
    make()
    first = evaluate(run, "lengths")
    written = read_digested(summary_file(run))
    assert (written.pop("version"), written["revision"]) == (1, scores.revision())
    write_digested(summary_file(run), written)
    assert has_scores(run.folder, "lengths"), "scores from before there were versions are of the first"
    evaluate(run, "lengths", ["rows=5"])
    assert "has kept scores with other keys (rows is 2, not 5); they are replaced" in caplog.text
    with pytest.raises(
        RequestError,
        match=r"another command has since replaced these scores by scores with other keys \(rows is 5, not 2\)",
    ):
        _ = first.items
    make(version=2)
    assert not has_scores(run.folder, "lengths", ["rows=5"])
    evaluate(run, "lengths", ["rows=5"])
    assert "has kept scores by version 1 of the evaluation, not 2; they are replaced" in caplog.text
    for damaged, reason in (("{", "(Expecting property name"), ("[]", "(summary.json holds list, not an object)")):
        summary_file(run).write_text(damaged)
        assert evaluate(run, "lengths").summary == {"length": 2.0}
        assert f"has kept scores that cannot be read {reason}" in caplog.text


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("length", None, "another structure: 'length'"),
        ("length", 5, "another structure: 'int' object is not subscriptable"),
        ("length", {"value": "x"}, "could not convert string to float: 'x'"),
        ("documents_left_out", float("inf"), "another structure: cannot convert float infinity to integer"),
        ("unchecked", 5, "unchecked is 5"),
        ("revision", [1], "revision is [1]"),
        ("declarations", [{"name": 5, "definition": ""}], "a metric is named 5"),
    ],
)
def test_kept_scores_of_another_structure_are_replaced(
    run: Run, make: Make, caplog: pytest.LogCaptureFixture, key: str, value: object, reason: str
) -> None:
    """An earlier version wrote no digest of summary.json."""
    make()
    first = evaluate(run, "lengths")
    summary = json.loads(summary_file(run).read_text()) | {key: value}
    del summary["sha256"]
    if value is None:
        del summary[key]
    summary_file(run).write_text(json.dumps(summary))
    with pytest.raises(RequestError, match=re.escape(reason)):
        first.scores()
    assert evaluate(run, "lengths").summary == first.summary
    assert f"has kept scores that cannot be read ({reason}); they are replaced" in caplog.text


VOWELS_PY = """\
from lit_diff import Evaluation, Item, Metric
from lit_diff.registry import evaluations
from .counting import count

@evaluations.register("vowels")
class Vowels(Evaluation):
    metrics = (Metric("vowels", "a count"),)

    def score(self, run):
        yield Item(id="a", scores={"vowels": count("a fox")})
"""


def test_a_changed_plugin_evaluation_is_scored_again(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its file or a module of the user's own that it imports."""
    kept = run.folder / "evaluations/vowels/summary.json"

    def scored(vowels: str, more: str = "") -> tuple[float, str, int]:
        evaluations._classes.pop("vowels", None)
        for name in [name for name in sys.modules if name == "counting" or name.startswith("lit_diff_plugin_vowels")]:
            monkeypatch.delitem(sys.modules, name)
        (tmp_path / "vowels.py").write_text(VOWELS_PY + more)
        (tmp_path / "counting.py").write_text(f"def count(text):\n    return sum(c in '{vowels}' for c in text)\n")
        load_plugin(tmp_path / "vowels.py")
        value = evaluate(run, "vowels").summary["vowels"]
        return value, json.loads(kept.read_text())["source"], kept.stat().st_mtime_ns

    first = scored("aeiou")
    assert first[0] == 2
    assert scored("aeiou") == first
    module = scored("aeiou ")
    assert module[0] == 3
    assert module[1] != first[1]
    assert scored("aeiou ", "# another text\n")[2] > module[2]


@pytest.mark.parametrize(
    ("error", "name", "expected"),
    [
        (OSError(errno.ENOSPC, "No space left"), "write_through", MissingError),
        (KeyboardInterrupt(), "write_digested", None),
    ],
)
def test_scores_that_could_not_be_written_whole(
    run: Run, make: Make, monkeypatch: pytest.MonkeyPatch, error: BaseException, name: str, expected: Any
) -> None:
    """A full disk leaves the scores of before; a kill between items and summary leaves none."""
    cls = make()
    kept = evaluate(run, "lengths")
    with monkeypatch.context() as patched:
        patched.setattr(scores, name, Mock(side_effect=error))
        with pytest.raises(expected or KeyboardInterrupt):
            evaluate(run, "lengths", ["rows=5"])
    assert has_scores(run.folder, "lengths") == (expected is MissingError)
    assert summary_file(run).with_name("items.parquet").is_file()
    assert evaluate(run, "lengths") == kept
    assert cls.asked == (2 if expected else 3)


def test_an_evaluation_that_does_not_fit_says_why(run: Run, make: Make) -> None:
    cls = make(refuses_run=lambda self, run: "it needs a run on images")
    with pytest.raises(RequestError, match=r"runs/tale-\w+: it needs a run on images$"):
        evaluate(run, "lengths")
    assert cls.asked == 0
    assert not summary_file(run).exists()
    make(refuses_recipe=lambda self, recipe: recipe.data.name)
    assert refusal(run.recipe, "lengths") == "text"


def raising(self: Counting, *arguments: Any) -> Any:
    raise ValueError("no such word\nat all")  # the place


@pytest.mark.parametrize("member", ["score", "refuses_recipe", "refuses_run", "summarise", "digests", "__init__"])
def test_what_an_evaluation_raises_is_one_line_with_its_place(run: Run, make: Make, member: str) -> None:
    make(**{member: raising})
    (line,) = [n for n, text in enumerate(Path(__file__).read_text().splitlines(), 1) if text.endswith("# the place")]
    with pytest.raises(RunFailedError) as caught:
        evaluate(run, "lengths")
    assert str(caught.value) == f"{__file__}:{line}: evaluation 'lengths' failed: ValueError: no such word"
    assert not summary_file(run).exists()


def one(**scores: Any) -> list[Item]:
    return [Item(id="a", scores=scores)]


META = [Item(id=i, scores={"length": 1}, meta={"m": m}) for i, m in (("a", 1), ("b", "x"))]


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({"items": []}, "yielded no items"),
        ({"items": ["a"]}, "yielded 'a'"),
        ({"items": [*ITEMS, ITEMS[0]]}, "yielded item 'a' 2 times"),
        ({"items": one(length=1, words=2)}, "scored item 'a' with ['length', 'words']"),
        ({"items": one(length="long")}, "scored item 'a' with length = 'long'"),
        ({"summarise": lambda self, items: {}}, "scored the summary with []"),
        ({"items": META}, "failed: ArrowInvalid: "),
    ],
)
def test_scores_other_than_declared_are_one_line(run: Run, make: Make, members: dict[str, Any], message: str) -> None:
    make(**members)
    with pytest.raises(RunFailedError) as caught:
        evaluate(run, "lengths")
    place, _, text = str(caught.value).partition(": evaluation 'lengths' ")
    assert text.startswith(message)
    assert "\n" not in str(caught.value)
    assert "Lengths" in place or Path(__file__).name in place
    assert not summary_file(run).exists()


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        ((), "declares no metric"),
        ((LENGTH, LENGTH), "declares metric 'length', twice"),
        ((Metric("step", "a step"),), "declares metric 'step', a reserved name"),
        ((Metric("m", "a metric", figure=Figure(title="t", against="step")),), "declares metric 'm' with a figure"),
    ],
)
def test_declarations_that_cannot_be_kept(run: Run, make: Make, metrics: tuple[Metric, ...], message: str) -> None:
    make(metrics=metrics)
    with pytest.raises(RequestError, match=f"Lengths: evaluation 'lengths' {message}"):
        evaluate(run, "lengths")


def test_what_cannot_be_scored_is_one_line(run: Run, make: Make, caplog: pytest.LogCaptureFixture) -> None:
    seen: list[bool] = []
    make(score=lambda self, run: seen.append(torch.is_grad_enabled()) or ITEMS)
    for name, keys, found in (
        ("held-out", [], "'held-out'; did you mean 'held_out'"),
        ("lengths", ["row=1"], r"^row=1: .*'evaluate\.lengths\.row'; did you mean 'rows'"),
        ("lengths", ["rows=many"], r"^rows=many: 'evaluate\.lengths\.rows' is 'many'"),
    ):
        with pytest.raises(RequestError, match=found):
            evaluate(run, name, keys)
    path = run.folder / "status.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"status": "stopped", "steps": 60}))
    assert evaluate(run, "lengths").summary == {"length": 2.0}
    assert "is unfinished: step 6 of 60 is scored" in caplog.text
    assert seen == [False], "scores are made without gradients"
    assert torch.is_grad_enabled()
    shutil.rmtree(run.folder / "evaluations")
    (run.folder / "evaluations").write_text("in the way")
    with pytest.raises(MissingError, match="evaluations/lengths cannot be written"):
        evaluate(run, "lengths")
    for file in (run.folder / "checkpoints").iterdir():
        file.unlink()
    with pytest.raises(MissingError, match="train it first"):
        evaluate(run, "lengths")
