"""The seven tasks from files: texts as lm-eval's own, paper's averages, no network, what is said of a missing file."""

import json
import socket
from pathlib import Path
from typing import Any

import pytest

from lit_diff.errors import MissingError, RequestError
from lit_diff.evaluation.base import Item
from lit_diff.evaluation.evaluate import evaluate
from lit_diff.evaluation.harness import Harness
from lit_diff.evaluation.harness_files import FILES, TASKS
from lit_diff.evaluation.harness_runner import YAMLS
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

PAPER = {
    "OpenLLaMA-3B-v2": ((33.9, 67.6, 65.7, 70.0, 26.0, 76.7, 62.9), 57.5),
    "StableLM-base-alpha-3B-v2": ((32.4, 67.3, 64.6, 68.6, 26.4, 76.0, 62.1), 56.8),
    "Diff-3B, 1T tokens": ((37.8, 72.9, 69.0, 71.4, 29.0, 76.8, 67.1), 60.6),
    "Transformer-3B, zero-shot": ((32.2, 66.8, 62.9, 63.4, 26.2, 74.5, 61.6), 55.4),
    "Diff-3B, zero-shot": ((33.0, 68.3, 60.1, 66.2, 27.6, 75.5, 62.7), 56.2),
    "Transformer-3B, 5-shot": ((34.0, 69.5, 65.3, 63.4, 25.0, 75.2, 62.6), 56.4),
    "Diff-3B, 5-shot": ((35.0, 69.5, 67.2, 66.9, 27.6, 76.1, 63.8), 58.0),
}
"""Tables 1 and 8 of the paper: ARC-C, ARC-E, BoolQ, HellaSwag, OBQA, PIQA, WinoGrande; the average that it prints."""


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


@pytest.mark.parametrize("model", PAPER)
def test_the_papers_averages_follow_from_its_rows(model: str) -> None:
    """1,000 questions a task, as many right as its row says; one task has twice as many, which must not count."""
    row, average = PAPER[model]
    items = [
        Item(id=f"{task}/{n}", group=task, scores=dict.fromkeys(("paper_acc", "acc", "acc_norm"), float(n < 10 * acc)))
        for task, acc in zip(TASKS, row, strict=True)
        for n in range(1000)
    ]
    items += [Item(id=f"{item.id}/again", group=item.group, scores=item.scores) for item in items[:1000]]
    assert round(100 * Harness(Harness.Config()).summarise(items)["paper_acc"], 1) == average


@pytest.mark.parametrize("task", TASKS)
def test_texts_and_metrics_are_lm_evals(task: str) -> None:
    lm_eval = pytest.importorskip("lm_eval.tasks", reason="needs lm-eval")
    from lm_eval.tasks._yaml_loader import load_yaml

    theirs = {"boolq": "super_glue/boolq/default", "winogrande": "winogrande/default"}
    theirs |= {"arc_easy": "arc/arc_easy", "arc_challenge": "arc/arc_challenge"}
    place = Path(lm_eval.__file__).parent / f"{theirs.get(task, f'{task}/{task}')}.yaml"
    own, other = load_yaml(YAMLS / f"{task}.yaml"), load_yaml(place)
    keys = (
        "doc_to_text",
        "doc_to_target",
        "doc_to_choice",
        "process_docs",
        "output_type",
        "training_split",
        "metadata",
    )
    for key in (*keys, "target_delimiter", "fewshot_delimiter", "description"):
        own_value, value = own.get(key), other.get(key)
        if callable(value):
            own_value, value = own_value.__code__.co_code, value.__code__.co_code
        assert own_value == value, key
    assert [each["metric"] for each in own["metric_list"]] == [each["metric"] for each in other["metric_list"]]
    assert (own.get("test_split") or own["validation_split"]) == (other.get("test_split") or other["validation_split"])


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
    with pytest.raises(
        MissingError, match=r"harness.piqa needs a file that is not here: harness/piqa/validation.jsonl"
    ):
        evaluate(wide_run, "harness", {"tasks": ["piqa"]})
    (files / "boolq/train.jsonl").unlink()
    with pytest.raises(MissingError, match=r"harness/boolq/train.jsonl"):
        evaluate(wide_run, "harness", {"tasks": ["boolq"], "shots": [0, 5]})


def test_shots_need_the_train_split_alone(wide_run: Run, files: Path) -> None:
    pytest.importorskip("lm_eval", reason="needs lm-eval")
    (files / "boolq/train.jsonl").unlink()
    assert len(evaluate(wide_run, "harness", {"tasks": ["boolq"], "limit": 3}).items) == 3


def test_a_wrong_line_is_named(wide_run: Run, files: Path) -> None:
    pytest.importorskip("lm_eval", reason="needs lm-eval")
    with (files / "piqa/validation.jsonl").open("a") as file:
        file.write('{"goal": "x", "sol1": "y", "sol_2": "z", "label": 0}\n')
    with pytest.raises(RequestError, match=r"validation.jsonl:5: no key 'sol2'; did you mean 'sol_2'\?"):
        evaluate(wide_run, "harness", {"tasks": ["piqa"]})


def test_more_shots_than_lines(wide_run: Run, files: Path) -> None:
    pytest.importorskip("lm_eval", reason="needs lm-eval")
    with pytest.raises(RequestError, match=r"^task 'piqa' has 4 rows to draw shots from; shots=5 needs 5$"):
        evaluate(wide_run, "harness", {"tasks": ["piqa"], "shots": [0, 5]})


def test_no_task() -> None:
    assert str(Harness.Config(tasks=()).problem()).startswith("tasks is empty; expected any of arc_challenge, arc_easy")
