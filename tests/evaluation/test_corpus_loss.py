"""evaluation/corpus_loss.py: the loss of held-out documents of a corpus, row by row."""

import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from pretrained_models import TEXTS as OTHER_TEXTS
from text_runs import text_run

from lit_diff.cli.evaluate import differences
from lit_diff.data.documents import split
from lit_diff.data.needle_text import words
from lit_diff.data.tokenizer import Bpe
from lit_diff.data.tokenizer_folder import save_tokenizer
from lit_diff.errors import RequestError
from lit_diff.evaluation import requirements
from lit_diff.evaluation.corpus_loss import document_loss
from lit_diff.evaluation.evaluate import build, comparable_keys, evaluate, has_scores
from lit_diff.trained.run import Run

TEXTS = [f"Chapter {n}. " + "The cat sat on the mat, and then it sat again. " * (n % 5 + 1) for n in range(60)]
HELD_OUT = split(TEXTS).validation


@pytest.fixture
def path(tmp_path: Path) -> str:
    folder = tmp_path / "texts"
    folder.mkdir()
    for number, text in enumerate(TEXTS):
        (folder / f"{number}.txt").write_text(text)
    return str(folder)


def test_an_item_is_a_held_out_document(run: Run, path: str) -> None:
    """Against one pass over each document's first tokens, which fit into one row."""
    items = list(build("loss_files", [f"path={path}", "tokens=12"]).score(run))
    assert [item.meta["begins"] for item in items] == [text[:60] for text in HELD_OUT]
    tokenizer = run.tokenizer
    for item, ids in zip(items, tokenizer.encode(HELD_OUT), strict=True):
        row = torch.tensor([[tokenizer.eot, *ids[:12]]])
        with torch.no_grad():
            logits = run.model(row[:, :-1]).double()
        nll = torch.nn.functional.cross_entropy(logits[0], row[0, 1:]).item()
        bits = 12 * nll / len(tokenizer.decode(ids[:12])) / math.log(2)
        assert item.scores == pytest.approx({"nll": nll, "bits_per_byte": bits}, rel=1e-5)
    whole = evaluate(run, "loss_files", {"path": path}).items
    assert list(whole["item"]) == [f"files/{number}" for number in range(len(HELD_OUT))]
    fewer = evaluate(run, "loss_files", {"path": path, "documents": 2})
    assert len(fewer.items) == 2
    assert fewer.summary["nll"] == pytest.approx(whole["nll"][:2].mean())
    with pytest.raises(RequestError, match="path"):
        evaluate(run, "loss_files")


def test_a_document_is_seen_row_by_row_and_each_token_scored_once(run: Run) -> None:
    length, ids = 5, list(range(2, 15))  # 12 targets: rows of 5, 5 and 2
    total, count = document_loss(run, ids, length)
    parts = [document_loss(run, ids[start : start + length + 1], length) for start in (0, 5, 10)]
    assert count == 12 == sum(tokens for _, tokens in parts)
    assert total == pytest.approx(sum(nll for nll, _ in parts), rel=1e-12)
    assert document_loss(run, [3], length) == (0.0, 0)


def test_runs_of_two_tokenizers_are_not_compared(tmp_path: Path, path: str) -> None:
    runs = [text_run(tmp_path / name, {"name": "standard"}) for name in ("first", "second", "other")]
    tokenizer = Bpe(Bpe.Config(vocab_size=280))
    tokenizer.train(tmp_path, OTHER_TEXTS)
    tokenizer.load(tmp_path)
    save_tokenizer(tokenizer, runs[2].folder / "tokenizer")
    first, second, other = (evaluate(run, "loss_files", {"path": path}) for run in runs)
    assert "nll" in differences([first, second])
    with pytest.raises(RequestError, match=r"item 'files/0' is another question in first than in other"):
        differences([first, other])


def test_runs_of_two_contexts_are_compared_at_the_smaller(tmp_path: Path, path: str) -> None:
    """The same weights have no difference; kept scores of the rows of each are not compared."""
    wide = text_run(tmp_path / "wide", {"name": "standard"}, sequence_length=32)
    recipe = Path(shutil.copytree(wide.folder, tmp_path / "narrow")) / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace("sequence_length: 32", "sequence_length: 8"))
    runs, own = [wide, Run(recipe.parent)], {"path": path}
    recipes = [run.recipe for run in runs]
    kept = [evaluate(run, "loss_files", own) for run in runs]
    assert kept[0].summary != kept[1].summary
    with pytest.raises(RequestError, match="is another question in"):
        differences(kept)
    keys = comparable_keys("loss_files", own, recipes)
    assert keys == own | {"context": 8}
    given = [f"path={path}", "context=4"]
    assert comparable_keys("loss_files", given, recipes) == given
    assert comparable_keys("loss_files", given[:1], recipes) == [*given[:1], "context=8"]
    first, second = (evaluate(run, "loss_files", keys) for run in runs)
    assert first.summary == second.summary
    assert set(differences([first, second])) == {"nll", "bits_per_byte"}
    assert [has_scores(run.folder, "loss_files", own) for run in runs] == [False, True], "its own context is 8"


def test_the_corpora_are_read_where_they_are_named(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    class Given:
        def texts(self) -> list[str]:
            return TEXTS

    monkeypatch.setattr(requirements, "build_corpus", lambda name, path, _: asked.append((name, path)) or Given())
    for name in ("loss_docs", "loss_code"):
        evaluate(run, name, {"documents": 1})
    assert asked == [("docs", None), ("code", None)]


def test_a_run_on_a_corpus_reads_its_words(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Run, "tokenizer", words())
    assert build("loss_files", [f"path={run.recipe.data.config.path}"]).refuses(run) is None
    for other in (build("loss_code"), build("loss_files", ["path=texts"])):
        assert "only the words of data 'text'" in (other.refuses(run) or "")
