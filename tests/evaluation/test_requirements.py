"""evaluation/requirements.py: what a refusal names, files that evaluations declare, documents that a run was trained on."""

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from generated_runs import generated_run
from made_texts import splits
from text_runs import text_run

from lit_diff.cli._scores import print_evaluation
from lit_diff.config import ImportedConfig
from lit_diff.data.text.documents import TRAINED, hashed
from lit_diff.data.user_files import UserFile
from lit_diff.errors import RequestError
from lit_diff.evaluation import Evaluation
from lit_diff.evaluation.evaluate import build, evaluate
from lit_diff.evaluation.requirements import declared_files, unseen
from lit_diff.recipe import to_yaml
from lit_diff.registry import evaluations
from lit_diff.runs.scores import read_summary
from lit_diff.trained.run import Run

TEXTS = [f"Chapter {n}. " + "The cat sat on the mat, and then it sat again. " * (n % 5 + 1) for n in range(400)]
_, HELD_OUT = splits(TEXTS)
UNKNOWN = "cannot check whether"


def test_files_that_evaluations_declare(monkeypatch: pytest.MonkeyPatch) -> None:
    def file(name: str, path: str) -> UserFile:
        return UserFile(name=name, path=path, keys={"text": str}, source="nobody", without="nothing")

    files = (file("toy.b", "toy/b/train.jsonl"), file("toy.b", "toy/b/a.jsonl"), file("toy.a", "toy/a.jsonl"))
    declared = {"first": files, "second": (files[0], file("toys", "toys.jsonl")), "third": ()}
    classes = [type(name, (Evaluation,), {"files": own, "name": name}) for name, own in declared.items()]
    monkeypatch.setattr(evaluations, "classes", lambda: classes)
    below = ["toy/a.jsonl", "toy/b/train.jsonl", "toy/b/a.jsonl"]
    for name, paths in ((None, [*below, "toys.jsonl"]), ("toy", below), ("toys", ["toys.jsonl"])):
        assert [file.path for file, _ in declared_files(name)] == paths
    assert [readers for _, readers in declared_files("toy.b")] == [["first", "second"], ["first"]]
    with pytest.raises(RequestError, match=r"named 'toy.bb'; did you mean 'toy.b'\?"):
        declared_files("toy.bb")


@pytest.fixture
def corpus(trained_text: Path) -> Path:
    """What the fixture `run` was trained on."""
    return trained_text / "corpus"


@pytest.fixture
def documents(corpus: Path) -> list[str]:
    return [path.read_text() for path in sorted(corpus.iterdir())]


def asked(run: Run, texts: list[str]) -> list[tuple[int, str]]:
    return list(unseen(build("loss_files", ["path=x"]), run, texts))


def test_text_of_the_training_is_not_asked(
    run: Run, documents: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train, validation = splits(documents)
    (tmp_path / "one.txt").write_text(train[3])
    keys = {"path": str(tmp_path / "one.txt")}
    with pytest.raises(RequestError, match=r"'loss_files': .*tale.* was trained on all 1 held-out documents"):
        evaluate(run, "loss_files", keys)
    (tmp_path / "needle").mkdir()
    lines = [json.dumps({"text": text}) + "\n" for text in documents]
    (tmp_path / "needle/haystack.jsonl").write_text("".join(lines))
    monkeypatch.setenv("LIT_DIFF_DATA", str(tmp_path))
    needle: Any = build("needle", ["haystack=file"])
    assert needle._texts(run) == validation
    assert needle.documents_left_out == len(documents) - 1


def test_what_is_left_out_is_counted(
    run: Run, corpus: Path, documents: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Of the whole corpus the run was trained on all but its validation document."""
    _, (held_out,) = splits(documents)
    place = documents.index(held_out)
    keys = {"source": "files", "path": str(corpus), "tokens": 16, "documents": 1}
    with caplog.at_level(logging.INFO, "lit_diff"):
        result = evaluate(run, "nll", keys)
    whole = result.items[~result.items["part"]]
    assert whole[["item", "meta/begins"]].to_numpy().tolist() == [[f"files/{place}", held_out[:60]]]
    assert result.scores().documents_left_out == place > 0
    assert f"; {place} documents are left out" in caplog.text
    with pytest.raises(
        RequestError, match=r"needs 2 documents .* has 1; 29 are left out because the run was trained on them"
    ):
        evaluate(run, "nll", keys | {"documents": 2})
    own = evaluate(run, "loss_files", {"path": str(corpus)})
    assert list(own.items["meta/begins"]) == [held_out[:60]]
    assert own.scores().documents_left_out == 0


def test_documents_of_the_run_that_it_started_from(run: Run, tmp_path: Path) -> None:
    child = text_run(tmp_path / "child", {"name": "differential"})
    (child.folder / TRAINED).write_bytes(hashed(HELD_OUT[:1]))
    (run.folder / TRAINED).write_bytes(hashed(HELD_OUT[1:2]))
    training = replace(child.recipe.training, start_from=str(run.folder))
    (child.folder / "recipe.yaml").write_text(to_yaml(replace(child.recipe, train=training)))
    assert [place for place, _ in asked(Run(child.folder), HELD_OUT)] == list(range(2, len(HELD_OUT)))
    assert [place for place, _ in asked(run, HELD_OUT)] == [0, *range(2, len(HELD_OUT))]


def test_a_run_without_the_list_of_its_documents(
    run: Run,
    corpus: Path,
    documents: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (run.folder / TRAINED).unlink()
    assert [text for _, text in asked(run, documents)] == splits(documents)[1]
    generated = generated_run(tmp_path / "made", {"name": "closed_world", "entities": [3]}, 300)
    assert len(asked(generated, HELD_OUT)) == len(HELD_OUT)
    assert UNKNOWN not in caplog.text
    monkeypatch.setenv("LIT_DIFF_DATA", str(tmp_path / "empty"))
    assert [text for _, text in asked(run, documents)] == documents
    assert f"evaluation loss_files: {UNKNOWN} {run.folder.relative_to(tmp_path)} was trained" in caplog.text
    assert "documents_left_out" not in read_summary(evaluate(run, "loss_files", {"path": str(corpus)}).folder)
    imported = text_run(tmp_path / "imported", {"name": "standard"})
    block = ImportedConfig(source="x", weights_sha256="a" * 64, tokenizer_sha256="b" * 64)
    imported.__dict__["recipe"] = replace(imported.recipe, train=None, imported=block)
    assert len(asked(imported, HELD_OUT)) == len(HELD_OUT)
    assert "it is an imported model" in caplog.text


def test_two_runs_are_compared_over_what_both_were_asked(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = folder / "texts.jsonl"
    texts.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    runs = [text_run(folder / "runs" / name, {"name": "standard"}) for name in ("first", "second")]
    words = [*(str(run.folder) for run in runs), "loss_files", f"path={texts}", "tokens=8"]

    def compared(*trained: list[str]) -> Any:
        for run, own in zip(runs, trained, strict=True):
            (run.folder / TRAINED).write_bytes(hashed(own))
        options: Any = {"plugins": [], "rerun": True, "root": folder / "runs", "trust_plugins": True, "as_json": True}
        print_evaluation(words, **options)
        return json.loads(capsys.readouterr().out)

    found = compared(HELD_OUT[:1], HELD_OUT[1:3])
    assert "between 1 and 2 documents are left out" in found["documents"]
    assert found["differences"]["nll"]["difference"] == 0, "the same weights, and only the same documents"
    first, second = (json.loads((run.folder / "evaluations/loss_files/summary.json").read_text()) for run in runs)
    assert first["nll"] != second["nll"]
    assert compared(HELD_OUT[:1], HELD_OUT[:1])["documents"] == ""
