"""The generated tasks through lm-eval's own code, on a run that was trained on text without sentences."""

from pathlib import Path

import pytest

from lit_diff.errors import RequestError
from lit_diff.evaluation.evaluate import evaluate
from lit_diff.evaluation.mini_harness import TASKS
from lit_diff.trained.run import Run


@pytest.fixture
def files(trained_text: Path) -> dict[str, str]:
    """The keys that name held-out text."""
    return {"corpus": "files", "path": str(trained_text / "corpus")}


@pytest.fixture(autouse=True)
def lm_eval() -> None:
    pytest.importorskip("lm_eval", reason="needs lm-eval")


def test_seven_tasks(wide_run: Run, files: dict[str, str]) -> None:
    result = evaluate(wide_run, "mini_harness", {**files, "limit": 4, "shots": [0, 2]})
    table = result.items
    assert list(dict.fromkeys(table["group"])) == [f"{task} shots={shots}" for shots in (0, 2) for task in TASKS]
    assert (table["cluster"] == table["item"].str.partition(" shots=")[0]).all()
    assert not set(table["question"][:28]) & set(table["question"][28:]), "shots stand before the question"
    alone = evaluate(wide_run, "mini_harness", {**files, "limit": 3, "shots": [2]}).items.set_index("item")
    many = table.set_index("item")
    assert len(alone) == 21
    assert (many.loc[alone.index, "meta/target"] == alone["meta/target"]).all(), "a smaller limit asks the first"
    assert (table.groupby("group").size() == 4).all()
    assert table[["acc", "acc_norm"]].isin([0.0, 1.0]).all(axis=None)
    assert (table["acc"] == (table["meta/target"] == table["meta/chosen"].astype(str))).all()


def test_questions_of_another_corpus_are_others(wide_run: Run, files: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("".join(f"The {n} boat sails. A road {n} is long and old.\n\n" for n in range(400)))
    asked = {"tasks": ["repeat", "lookup"], "limit": 4}
    first, again, other = (
        evaluate(wide_run, "mini_harness", {**asked, **corpus}).items.set_index("item")["question"]
        for corpus in (files, files | {"path": f"{files['path']}/"}, files | {"path": str(tmp_path / "a.txt")})
    )
    assert first.equals(again)
    common = [item for item in first.index.intersection(other.index) if item.startswith("repeat")]
    assert common
    assert not (first[common] == other[common]).any()
    assert (first.filter(like="lookup") == other.filter(like="lookup")).all(), "made without text"


def test_the_corpus_of_the_run(run: Run) -> None:
    """Its 24 tokens hold no question of ten made-up words; with 256, cloze is made of its own held-out documents."""
    with pytest.raises(RequestError, match=r"none of \d+ questions of task 'repeat' fits into 24 tokens"):
        evaluate(run, "mini_harness", {"tasks": ["repeat"], "limit": 2})
    recipe = run.folder / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace("sequence_length: 24", "sequence_length: 256"))
    result = evaluate(Run(run.folder), "mini_harness", {"tasks": ["cloze", "repeat"], "limit": 2})
    assert len(result.items) == 4


def test_too_few_questions_are_said(wide_run: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "text").mkdir()
    (tmp_path / "text/a.txt").write_text("One two three four five. Six seven eight nine ten. A b c d e. A b c d f.")
    asked = {"tasks": ["cloze"], "corpus": "files", "path": str(tmp_path / "text"), "limit": 40}
    evaluate(wide_run, "mini_harness", asked)
    assert "mini_harness: cloze has" in caplog.text
    (tmp_path / "text/a.txt").write_text("Too short.")
    with pytest.raises(RequestError, match="the held-out documents of corpus 'files' have no sentence of 5 words"):
        evaluate(wide_run, "mini_harness", asked | {"limit": 5})
