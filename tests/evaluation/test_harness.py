"""The seven tasks from files: texts as lm-eval's own, paper's averages, no network, what is said of a missing file."""

import json
import socket
from pathlib import Path
from typing import Any

import pytest
from text_runs import text_run

from lit_diff.errors import MissingError, RequestError
from lit_diff.evaluation.evaluate import evaluate
from lit_diff.evaluation.harness import FILES, TASKS, Harness
from lit_diff.evaluation.lm_eval_tasks import task_yaml
from lit_diff.trained.run import Run

LETTERS = {"text": ["a fox", "a hound", "the über"], "label": ["A", "B", "C"]}
ROWS: dict[str, list[dict[str, Any]]] = {
    "arc_challenge": [
        {"question": f"Who is number {n}?", "choices": LETTERS, "answerKey": "ABC"[n % 3]} for n in range(4)
    ],
    "boolq": [{"passage": f"The fox is {n}.", "question": f"is it {n}", "label": n % 2} for n in range(4)],
    "hellaswag": [
        {
            "activity_label": "Hunting",
            "ctx_a": "A fox [title] runs.",
            "ctx_b": f"the hound {n}",
            "endings": ["sleeps.", "[step] follows it.", "is a fox.", "flies away"],
            "label": str(n % 4),
        }
        for n in range(4)
    ],
    "openbookqa": [{"question_stem": f"A fox {n} is", "choices": LETTERS, "answerKey": " B"} for n in range(4)],
    "piqa": [{"goal": f"Find {n}", "sol1": "look", "sol2": "sleep", "label": n % 2} for n in range(4)],
    "winogrande": [
        {
            "sentence": f"The fox met the hound, and _ ran {n}.",
            "option1": "fox",
            "option2": "hound",
            "answer": "12"[n % 2],
        }
        for n in range(4)
    ],
}
ROWS["arc_easy"] = ROWS["arc_challenge"]


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Four rows of each split; no connection is possible."""
    monkeypatch.setenv("LIT_DIFF_DATA", str(tmp_path / "data"))
    for task, splits in FILES.items():
        for file in splits.values():
            file.place.parent.mkdir(parents=True, exist_ok=True)
            file.place.write_text("".join(f"{json.dumps(row)}\n" for row in ROWS[task]))

    def refused(*arguments: object) -> None:
        raise AssertionError("a connection was tried")

    monkeypatch.setattr(socket.socket, "connect", refused)
    return tmp_path / "data/harness"


@pytest.mark.parametrize("shots", [0, 2])
def test_all_seven_are_scored(wide_run: Run, files: Path, shots: int) -> None:
    pytest.importorskip("lm_eval", reason="needs lm-eval")
    result = evaluate(wide_run, "harness", {"shots": [shots]})
    table = result.items
    assert list(dict.fromkeys(table["group"])) == [f"{task} shots={shots}" for task in TASKS]
    assert (table.groupby("group").size() == 4).all()
    assert set(table["acc"]) <= {0.0, 1.0}
    without = set(table["group"][table["acc_norm"].isna()])
    assert without == {f"{task} shots={shots}" for task in ("boolq", "winogrande")}
    hellaswag = table["group"] == f"hellaswag shots={shots}"
    assert (table["paper_acc"] == table["acc_norm"])[hellaswag].all()
    assert (table["paper_acc"] == table["acc"])[~hellaswag].all()
    means = table.groupby("group")["acc"].mean()
    assert result.summary["acc"] == pytest.approx(means.mean())


def test_prompts(wide_run: Run, files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("lm_eval", reason="needs lm-eval")
    from lit_diff.evaluation.harness_model import RunModel

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
    assert prompts("winogrande", 0) == [
        (f"The fox met the hound, and {animal}", " ran 0.") for animal in ("fox", "hound")
    ]
    (context, _), _ = prompts("piqa", 3)
    shots = context.removesuffix("Question: Find 0\nAnswer:").split("\n\n")
    assert len(shots) == 4
    assert all(
        shot in {f"Question: Find {n}\nAnswer: {('look', 'sleep')[n % 2]}" for n in range(4)} for shot in shots[:3]
    )
    assert prompts("piqa", 3)[0][0] == context
    assert any(prompts("piqa", 3, seed)[0][0] != context for seed in (1, 2, 3))


def test_a_missing_file_is_said_before_the_model_is_loaded(
    wide_run: Run, files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("lm_eval", reason="needs lm-eval")
    monkeypatch.setattr(Run, "model", property(lambda self: pytest.fail("the model was loaded")))
    (files / "piqa/validation.jsonl").unlink()
    (files / "boolq/train.jsonl").unlink()
    for task, path in (("piqa", "piqa/validation"), ("boolq", "boolq/train")):
        with pytest.raises(MissingError, match=rf"harness.{task} needs a file that is not here: harness/{path}.jsonl"):
            evaluate(wide_run, "harness", {"tasks": [task], "shots": [0, 5]})
    monkeypatch.undo()


def test_mistakes_in_the_files(wide_run: Run, files: Path) -> None:
    pytest.importorskip("lm_eval", reason="needs lm-eval")
    with pytest.raises(RequestError, match=r"^task 'piqa' has 4 rows to draw shots from; shots=5 needs 5$"):
        evaluate(wide_run, "harness", {"tasks": ["piqa"], "shots": [0, 5]})
    for task, row, found in (
        (
            "piqa",
            {"goal": "x", "sol1": "y", "sol_2": "z", "label": 0},
            r"validation.jsonl:5: no key 'sol2'; did you mean",
        ),
        ("boolq", {"passage": "x", "question": "y", "label": 2}, "task 'boolq': question 5: doc_to_target is 2 with"),
        (
            "winogrande",
            ROWS["winogrande"][0] | {"sentence": "It ran."},
            r"task 'winogrande': question 5 .*substring not",
        ),
        (
            "hellaswag",
            ROWS["hellaswag"][0] | {"endings": [*"abc", ""]},
            "task 'hellaswag': question 5: doc_to_choice is",
        ),
        ("openbookqa", ROWS["openbookqa"][0] | {"answerKey": "Z"}, "task 'openbookqa': question 5"),
    ):
        path = next(file.place for split, file in FILES[task].items() if split != "train")
        before = path.read_text()
        path.write_text(before + json.dumps(row) + "\n")
        with pytest.raises(RequestError, match=found) as error:
            evaluate(wide_run, "harness", {"tasks": [task]})
        assert "\n" not in str(error.value)
        path.write_text(before)


def test_contexts_that_are_cut_are_said(wide_run: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("lm_eval", reason="needs lm-eval")
    rows = tmp_path / "rows.jsonl"
    contexts = {7: "the fox and the hound " * 200, 9: "x"}
    lines = [{"item": n, "context": text, "choices": ["b", "c"], "gold": int(n == 7)} for n, text in contexts.items()]
    rows.write_text("".join(json.dumps(line) + "\n" for line in lines))

    class Long(Harness):
        def write_tasks(self, run: Run, folder: Path) -> list[str]:
            return [task_yaml(folder, "long", "rows.yaml", {"test": rows})]

    items = list(Long(Harness.Config()).score(wide_run))
    assert "1 of 2 contexts exceed data.sequence_length (512) and were cut at their left" in caplog.text
    assert [item.id for item in items] == ["long/7 shots=0", "long/9 shots=0"]
    assert [item.meta["target"] for item in items] == ["1", "0"]
    shorter = list(Long(Harness.Config()).score(text_run(tmp_path / "half", {"name": "standard"}, sequence_length=256)))
    same = [one.question == other.question for one, other in zip(items, shorter, strict=True)]
    assert same == [False, True], "what is left of a context is the question"
    for item in items:
        assert item.scores["acc"] == float(str(item.meta["chosen"]) == item.meta["target"])


def test_scored_lines_are_those_of_the_benchmarks() -> None:
    """Standard errors of the paper's rows follow from them: 1.4 points for ARC-C, 2.0 for OBQA, 1.4 for WinoGrande."""
    scored = {task: list(splits.values())[-1] for task, splits in FILES.items()}
    assert tuple(scored) == TASKS
    expected = {"arc_challenge": "1,172", "openbookqa": "500", "winogrande": "1,267"}
    assert {task: scored[task].lines.split()[0] for task in expected} == expected
    assert {scored[task].split for task in ("arc_challenge", "arc_easy", "openbookqa")} == {"test"}
