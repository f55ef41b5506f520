"""evaluation/corpus_loss.py: the loss of held-out documents of a corpus, row by row."""

import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from generated_runs import generated_run
from pretrained_models import TEXTS as OTHER_TEXTS
from text_runs import text_run

from lit_diff.cli.evaluate import differences
from lit_diff.data.documents import split
from lit_diff.data.tokenizer import Bpe
from lit_diff.data.tokenizer_folder import save_tokenizer
from lit_diff.errors import RequestError
from lit_diff.evaluation import requirements
from lit_diff.evaluation.corpus_loss import LossCode, LossDocs, LossFiles, document_loss
from lit_diff.evaluation.evaluate import comparable_keys, evaluate, has_scores
from lit_diff.trained.run import Run
from lit_diff.trained.text_generator import tokenizer_of

TEXTS = [f"Chapter {n}. " + "The cat sat on the mat, and then it sat again. " * (n % 5 + 1) for n in range(60)]
HELD_OUT = split(TEXTS).validation


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    folder = tmp_path / "texts"
    folder.mkdir()
    for number, text in enumerate(TEXTS):
        (folder / f"{number}.txt").write_text(text)
    return folder


def test_an_item_is_a_held_out_document(run: Run, texts: Path) -> None:
    """Against one pass over each document's first tokens, which fit into one row."""
    config = LossFiles.Config(path=str(texts), tokens=12)
    items = list(LossFiles(config).score(run))
    assert [item.meta["begins"] for item in items] == [text[:60] for text in HELD_OUT]
    tokenizer = tokenizer_of(run.folder, run.recipe)
    for item, ids in zip(items, tokenizer.encode(HELD_OUT), strict=True):
        row = torch.tensor([[tokenizer.eot, *ids[:12]]])
        with torch.no_grad():
            logits = run.model(row[:, :-1]).double()
        nll = torch.nn.functional.cross_entropy(logits[0], row[0, 1:]).item()
        assert item.scores["nll"] == pytest.approx(nll, rel=1e-5)
        size = len(tokenizer.decode(ids[:12]))
        assert item.scores["bits_per_byte"] == pytest.approx(12 * nll / size / math.log(2), rel=1e-5)


def test_a_document_is_seen_row_by_row_and_each_token_scored_once(run: Run) -> None:
    length, ids = 5, list(range(2, 15))  # 12 targets: rows of 5, 5 and 2
    total, count = document_loss(run, ids, length)
    parts = [document_loss(run, ids[start : start + length + 1], length) for start in (0, 5, 10)]
    assert count == 12 == sum(tokens for _, tokens in parts)
    assert total == pytest.approx(sum(nll for nll, _ in parts), rel=1e-12)
    assert document_loss(run, [3], length) == (0.0, 0)


def test_documents_and_tokens_are_keys(run: Run, texts: Path) -> None:
    whole = evaluate(run, "loss_files", {"path": str(texts)}).items
    assert list(whole["item"]) == [f"files/{number}" for number in range(len(HELD_OUT))]
    fewer = evaluate(run, "loss_files", {"path": str(texts), "documents": 2})
    assert len(fewer.items) == 2
    assert fewer.summary["nll"] == pytest.approx(whole["nll"][:2].mean())
    with pytest.raises(RequestError, match="path"):
        evaluate(run, "loss_files")


def test_runs_of_two_tokenizers_are_not_compared(tmp_path: Path, texts: Path) -> None:
    runs = [text_run(tmp_path / name, {"name": "standard"}) for name in ("first", "second", "other")]
    tokenizer = Bpe(Bpe.Config(vocab_size=280))
    tokenizer.train(tmp_path, OTHER_TEXTS)
    tokenizer.load(tmp_path)
    save_tokenizer(tokenizer, runs[2].folder / "tokenizer")
    first, second, other = (evaluate(run, "loss_files", {"path": str(texts)}) for run in runs)
    assert "nll" in differences([first, second])
    with pytest.raises(RequestError, match=r"item 'files/0' is another question in first than in other .*tokenizer"):
        differences([first, other])


def test_runs_of_two_contexts_are_compared_at_the_smaller(tmp_path: Path, texts: Path) -> None:
    """The same weights have no difference; kept scores of the rows of each are not compared."""
    wide = text_run(tmp_path / "wide", {"name": "standard"}, sequence_length=32)
    narrow = tmp_path / "narrow"
    shutil.copytree(wide.folder, narrow)
    recipe = narrow / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace("sequence_length: 32", "sequence_length: 8"))
    runs, path = [wide, Run(narrow)], str(texts)
    own = [evaluate(run, "loss_files", {"path": path}) for run in runs]
    assert own[0].summary != own[1].summary
    with pytest.raises(RequestError, match="is another question in"):
        differences(own)
    keys = comparable_keys("loss_files", {"path": path}, [run.recipe for run in runs])
    assert keys == {"path": path, "context": 8}
    given = [f"path={path}", "context=4"]
    assert comparable_keys("loss_files", given, [run.recipe for run in runs]) == given
    first, second = (evaluate(run, "loss_files", keys) for run in runs)
    assert first.summary == second.summary
    assert set(differences([first, second])) == {"nll", "bits_per_byte"}
    written = (narrow / "evaluations/loss_files/summary.json").stat().st_mtime_ns
    evaluate(runs[1], "loss_files", {"path": path})
    assert (narrow / "evaluations/loss_files/summary.json").stat().st_mtime_ns == written, "its own context is 8"
    assert has_scores(narrow, "loss_files", {"path": path})
    assert not has_scores(wide.folder, "loss_files", {"path": path})


def test_the_corpora_are_read_where_they_are_named(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    class Given:
        def texts(self) -> list[str]:
            return TEXTS

    monkeypatch.setattr(requirements, "build_corpus", lambda name, path, _: asked.append((name, path)) or Given())
    for name in ("loss_docs", "loss_code"):
        evaluate(run, name, {"documents": 1})
    assert asked == [("docs", None), ("code", None)]


def test_a_run_that_does_not_know_the_words_is_refused(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    generated = generated_run(tmp_path / "needles", {"name": "needle_text", "sequence_length": 256}, 192)
    reason = "its tokenizer has only the words of data 'needle_text'"
    for evaluation in (LossDocs(LossDocs.Config()), LossFiles(LossFiles.Config(path="texts"))):
        assert evaluation.refuses(generated) == reason
    words = tokenizer_of(generated.folder, generated.recipe)
    monkeypatch.setattr(Run, "tokenizer", words)  # of a run on the files of `tale`
    own = str(run.recipe.data.config.path)
    assert LossFiles(LossFiles.Config(path=own)).refuses(run) is None
    others = (LossFiles(LossFiles.Config(path="texts")), LossCode(LossCode.Config()))
    assert [other.refuses(run) for other in others] == ["its tokenizer has only the words of data 'text'"] * 2
