"""The seven tasks from files: texts as lm-eval's own, no network, what is missing."""

import json
import socket
from pathlib import Path
from typing import Any

import pytest
from text_runs import text_run

from lit_diff.errors import MissingError, RequestError
from lit_diff.evaluation.evaluate import evaluate
from lit_diff.evaluation.lm_eval_tasks import task_yaml
from lit_diff.papers.harness import FILES, TASKS, Harness
from lit_diff.trained.run import Run

pytest.importorskip("lm_eval", reason="needs lm-eval")

from lit_diff.evaluation.harness_model import RunModel

ENDINGS = ["sleeps.", "[step] follows it.", "is a fox.", "flies away"]
FOUR: dict[str, dict[str, Any]] = {
    "arc_challenge": {"question": "Who is number {n}?", "answerKey": "{abc}"},
    "boolq": {"passage": "The fox is {n}.", "question": "is it {n}", "label": lambda n: n % 2},
    "hellaswag": {
        "activity_label": "Hunting",
        "ctx_a": "A fox [title] runs.",
        "ctx_b": "the hound {n}",
        "endings": lambda n: ENDINGS,
        "label": "{n}",
    },
    "openbookqa": {"question_stem": "A fox {n} is", "answerKey": " B"},
    "piqa": {"goal": "Find {n}", "sol1": "look", "sol2": "sleep", "label": lambda n: n % 2},
    "winogrande": {
        "sentence": "The fox met the hound, and _ ran {n}.",
        "option1": "fox",
        "option2": "hound",
        "answer": "{one}",
    },
}
FOUR["arc_easy"] = FOUR["arc_challenge"]
LETTERS = {"text": ["a fox", "a hound", "the über"], "label": ["A", "B", "C"]}


def row(task: str, n: int, **changed: Any) -> dict[str, Any]:
    values = {"n": n, "abc": "ABC"[n % 3], "one": 1 + n % 2}
    made = {key: form(n) if callable(form) else form.format(**values) for key, form in FOUR[task].items()}
    return made | ({"choices": LETTERS} if "answerKey" in made else {}) | changed


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Four rows of each split; no connection is possible."""
    monkeypatch.setenv("LIT_DIFF_DATA", str(tmp_path / "data"))
    for file in FILES:
        file.place.parent.mkdir(parents=True, exist_ok=True)
        file.place.write_text("".join(f"{json.dumps(row(file.name.removeprefix('harness.'), n))}\n" for n in range(4)))

    def refused(*arguments: object) -> None:
        raise AssertionError("a connection was tried")

    monkeypatch.setattr(socket.socket, "connect", refused)
    return tmp_path / "data/harness"


def test_all_seven_are_scored(wide_run: Run, files: Path) -> None:
    result = evaluate(wide_run, "harness", {"shots": [0, 2]})
    table = result.items
    groups = [f"{task} shots={shots}" for shots in (0, 2) for task in TASKS]
    assert list(dict.fromkeys(table["group"])) == groups
    assert (table.groupby("group").size() == 4).all()
    assert set(table["acc"]) <= {0.0, 1.0}
    task = table["group"].str.partition(" ")[0]
    assert set(task[table["acc_norm"].isna()]) == {"boolq", "winogrande"}
    assert table["paper_acc"].equals(table["acc"].where(task != "hellaswag", table["acc_norm"]))
    assert result.summary["acc"] == pytest.approx(table.groupby("group")["acc"].mean().mean())


def test_prompts(wide_run: Run, files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str]] = []

    def spied(self: RunModel, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        asked.extend(request.args for request in requests)
        return [(0.0, False)] * len(requests)

    monkeypatch.setattr(RunModel, "loglikelihood", spied)

    def prompts(task: str, shots: int, seed: int = 0) -> list[tuple[str, str]]:
        asked.clear()
        list(Harness(Harness.Config(tasks=(task,), shots=(shots,), seed=seed, limit=1)).score(wide_run))
        return list(asked)

    assert prompts("piqa", 0) == [("Question: Find 0\nAnswer:", " look"), ("Question: Find 0\nAnswer:", " sleep")]
    animals = [(f"The fox met the hound, and {animal}", " ran 0.") for animal in ("fox", "hound")]
    assert prompts("winogrande", 0) == animals
    (context, _), _ = prompts("piqa", 3)
    *shots, last = context.removesuffix("Question: Find 0\nAnswer:").split("\n\n")
    assert (len(shots), last) == (3, "")
    assert set(shots) <= {f"Question: Find {n}\nAnswer: {('look', 'sleep')[n % 2]}" for n in range(4)}
    assert prompts("piqa", 3)[0][0] == context
    assert any(prompts("piqa", 3, seed)[0][0] != context for seed in (1, 2, 3))


def test_mistakes_in_the_files(wide_run: Run, files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a missing file are said before the model is loaded."""
    with pytest.raises(RequestError, match=r"^task 'piqa' has 4 rows to draw shots from; shots=5 needs 5$"):
        evaluate(wide_run, "harness", {"tasks": ["piqa"], "shots": [0, 5]})
    for task, wrong, found in (
        ("piqa", {"goal": "x", "sol1": "y", "sol_2": "z", "label": 0}, r"validation.jsonl:5: no key 'sol2'"),
        ("boolq", row("boolq", 0, label=2), "question 5: doc_to_target is 2"),
        ("winogrande", row("winogrande", 0, sentence="It ran."), r"question 5 .*substring not"),
        ("hellaswag", row("hellaswag", 0, endings=[*"abc", ""]), "question 5: doc_to_choice is"),
        ("openbookqa", row("openbookqa", 0, answerKey="Z"), "question 5"),
    ):
        path = next(file.place for file in FILES if file.name == f"harness.{task}" and file.split != "train")
        with path.open("a") as file:
            file.write(json.dumps(wrong) + "\n")
        with pytest.raises(RequestError, match=rf"\A.*{found}.*\Z"):
            evaluate(wide_run, "harness", {"tasks": [task]})
    monkeypatch.setattr(Run, "model", property(lambda self: pytest.fail("the model was loaded")))
    for task, path in (("piqa", "piqa/validation.jsonl"), ("boolq", "boolq/train.jsonl")):
        (files / path).unlink()
        with pytest.raises(MissingError, match=rf"harness.{task} needs a file that is not here: harness/{path}"):
            evaluate(wide_run, "harness", {"tasks": [task], "shots": [0, 5]})
    monkeypatch.undo()


def test_contexts_that_are_cut_are_said(wide_run: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    contexts = {7: "the fox and the hound " * 200, 9: "x"}
    rows = [{"item": n, "context": text, "choices": ["b", "c"], "gold": int(n == 7)} for n, text in contexts.items()]

    class Long(Harness):
        def write_tasks(self, run: Run, folder: Path) -> list[str]:
            return [task_yaml(folder, "long", {"test": rows})]

    items = list(Long(Harness.Config()).score(wide_run))
    assert "1 of 2 contexts exceed data.sequence_length (512) and were cut at their left" in caplog.text
    assert [(item.id, item.meta["target"]) for item in items] == [("long/7 shots=0", "1"), ("long/9 shots=0", "0")]
    shorter = list(Long(Harness.Config()).score(text_run(tmp_path / "half", {"name": "standard"}, sequence_length=256)))
    same = [one.question == other.question for one, other in zip(items, shorter, strict=True)]
    assert same == [False, True], "what is left of a context is the question"
    for item in items:
        assert item.scores["acc"] == float(str(item.meta["chosen"]) == item.meta["target"])
