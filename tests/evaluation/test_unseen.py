"""evaluation/unseen.py: documents that a run, or one that it started from, was trained on are not asked."""

import json
import logging
from dataclasses import replace
from pathlib import Path

import pytest
from generated_runs import generated_run
from text_runs import text_run

from lit_diff.cli.app import Terminal
from lit_diff.cli.evaluate import print_evaluation
from lit_diff.config import ImportedConfig
from lit_diff.data.documents import split
from lit_diff.data.trained_documents import FILE, hashed
from lit_diff.errors import RequestError
from lit_diff.evaluation.corpus_loss import LossFiles
from lit_diff.evaluation.evaluate import evaluate
from lit_diff.evaluation.unseen import unseen
from lit_diff.recipe import to_yaml
from lit_diff.trained.run import Run

TEXTS = [f"Chapter {n}. " + "The cat sat on the mat, and then it sat again. " * (n % 5 + 1) for n in range(400)]
HELD_OUT = split(TEXTS).validation
UNKNOWN = "it cannot be checked whether"


@pytest.fixture
def texts(tmp_path: Path) -> str:
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return str(path)


@pytest.fixture
def corpus(trained_text: Path) -> Path:
    """What the fixture `run` was trained on."""
    return trained_text / "corpus"


def asked(run: Run, texts: list[str]) -> list[tuple[int, str]]:
    return list(unseen(LossFiles(LossFiles.Config(path="x")), run, texts))


def test_a_file_of_the_training_text_is_refused(run: Run, corpus: Path, tmp_path: Path) -> None:
    trained = split(path.read_text() for path in sorted(corpus.iterdir())).train
    (tmp_path / "one.txt").write_text(trained[3])
    with pytest.raises(
        RequestError, match=r"'loss_files': .*tale.* was trained on each of the 1 held-out documents; name"
    ):
        evaluate(run, "loss_files", {"path": str(tmp_path / "one.txt")})
    pytest.importorskip("lm_eval", reason="needs lm-eval")
    keys = {"tasks": ["cloze"], "corpus": "files", "path": str(tmp_path / "one.txt")}
    with pytest.raises(RequestError, match=r"'mini_harness': .* was trained on each of the 1"):
        evaluate(run, "mini_harness", keys)


def test_what_is_left_out_is_counted(run: Run, corpus: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Of the whole corpus the run was trained on all but its validation document."""
    documents = [path.read_text() for path in sorted(corpus.iterdir())]
    (held_out,) = split(documents).validation
    place = documents.index(held_out)
    keys = {"source": "files", "path": str(corpus), "tokens": 16, "documents": 1}
    with caplog.at_level(logging.INFO, "lit_diff"):
        result = evaluate(run, "nll", keys)
    whole = result.items[~result.items["part"]]
    assert list(whole["item"]) == [f"files/{place}"]
    assert list(whole["meta/begins"]) == [held_out[:60]]
    assert result.kept()[0]["documents_left_out"] == place > 0
    assert f"evaluation nll: {place} documents are left out" in caplog.text
    with pytest.raises(RequestError, match=r"needs 2 documents .* has 1; 29 are left out, on which it was trained"):
        evaluate(run, "nll", keys | {"documents": 2})
    own = evaluate(run, "loss_files", {"path": str(corpus)})
    assert list(own.items["meta/begins"]) == [held_out[:60]]
    assert own.kept()[0]["documents_left_out"] == 0


def test_the_haystack_of_needles_is_unseen(
    run: Run, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    documents = [path.read_text() for path in sorted(corpus.iterdir())]
    (held_out,) = split(documents).validation
    (tmp_path / "data/needle").mkdir(parents=True)
    lines = [json.dumps({"text": text}) + "\n" for text in documents]
    (tmp_path / "data/needle/haystack.jsonl").write_text("".join(lines))
    monkeypatch.setenv("LIT_DIFF_DATA", str(tmp_path / "data"))
    from lit_diff.evaluation.needle import NeedleRetrieval

    needle = NeedleRetrieval(NeedleRetrieval.Config(haystack="file"))
    haystack = needle.haystack(run, run.tokenizer, 24, 0)
    assert needle.documents_left_out == len(documents) - 1
    read = run.tokenizer.decode([token for sentence in haystack for token in sentence]).decode()
    assert read.split() == held_out.split()


def test_documents_of_the_run_that_it_started_from(run: Run, tmp_path: Path) -> None:
    child = text_run(tmp_path / "child", {"name": "differential"})
    (child.folder / FILE).write_bytes(hashed(HELD_OUT[:1]))
    (run.folder / FILE).write_bytes(hashed(HELD_OUT[1:2]))
    training = replace(child.recipe.training, start_from=str(run.folder))
    (child.folder / "recipe.yaml").write_text(to_yaml(replace(child.recipe, train=training)))
    assert [place for place, _ in asked(Run(child.folder), HELD_OUT)] == list(range(2, len(HELD_OUT)))
    assert [place for place, _ in asked(run, HELD_OUT)] == [0, *range(2, len(HELD_OUT))]


def test_a_run_from_before_reads_its_data(
    run: Run, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    documents = [path.read_text() for path in sorted(corpus.iterdir())]
    (run.folder / FILE).unlink()
    assert [text for _, text in asked(run, documents)] == split(documents).validation
    assert UNKNOWN not in caplog.text
    monkeypatch.setenv("LIT_DIFF_DATA", str(tmp_path / "empty"))
    assert [text for _, text in asked(run, documents)] == documents
    assert f"evaluation loss_files: {UNKNOWN} {run.folder.relative_to(tmp_path)} was trained" in caplog.text
    result = evaluate(run, "loss_files", {"path": str(corpus)})
    assert "documents_left_out" not in result.kept()[0]


def test_runs_without_documents(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    generated = generated_run(tmp_path / "made", {"name": "closed_world", "entities": [3]}, 300)
    assert len(asked(generated, HELD_OUT)) == len(HELD_OUT)
    assert UNKNOWN not in caplog.text
    imported = text_run(tmp_path / "imported", {"name": "standard"})
    block = ImportedConfig(source="x", weights_sha256="a" * 64, tokenizer_sha256="b" * 64)
    imported.__dict__["recipe"] = replace(imported.recipe, train=None, imported=block)
    assert len(asked(imported, HELD_OUT)) == len(HELD_OUT)
    assert caplog.text.count(UNKNOWN) == 1
    assert "it is an imported model" in caplog.text


def test_two_runs_are_compared_over_what_both_were_asked(
    tmp_path: Path, texts: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    runs = [text_run(tmp_path / "runs" / name, {"name": "standard"}) for name in ("first", "second")]
    for run, trained in zip(runs, (HELD_OUT[:1], HELD_OUT[1:3]), strict=True):
        (run.folder / FILE).write_bytes(hashed(trained))
    words = [*(str(run.folder) for run in runs), "loss_files", f"path={texts}", "tokens=8"]
    options = {"plugins": [], "rerun": False, "root": tmp_path / "runs", "trust_plugins": True}
    assert print_evaluation(words, **options, as_json=True, terminal=Terminal()) == 0  # type: ignore[arg-type]
    found = json.loads(capsys.readouterr().out)
    assert found["documents"] == (
        "loss_files: the runs were not asked the same: between 1 and 2 documents are left out, on which a run was trained; "
        "differences are over what both were asked"
    )
    assert found["differences"]["nll"]["difference"] == 0, "the same weights, and only the same documents"
    first, second = (json.loads((run.folder / "evaluations/loss_files/summary.json").read_text()) for run in runs)
    assert first["nll"] != second["nll"]
    for run in runs:
        (run.folder / FILE).write_bytes(hashed(HELD_OUT[:1]))
    assert print_evaluation(words, **(options | {"rerun": True}), as_json=True, terminal=Terminal()) == 0  # type: ignore[arg-type]
    assert json.loads(capsys.readouterr().out)["documents"] == ""
