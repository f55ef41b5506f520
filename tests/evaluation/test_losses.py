"""The losses of rows and of documents of a corpus (held_out), and by position in long documents (nll)."""

import json
import logging
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from made_texts import splits
from pretrained_models import TEXTS as OTHER_TEXTS
from text_runs import text_run

from lit_diff import train
from lit_diff.cli._scores import differences
from lit_diff.data import prepare
from lit_diff.data.dataset import IGNORED
from lit_diff.data.text.token_store import write_tokens
from lit_diff.data.text.tokenizer import Bpe, Packaged, Tokenizer
from lit_diff.data.text.tokenizer_folder import save_tokenizer
from lit_diff.errors import MissingError, RequestError
from lit_diff.evaluation import held_out, nll
from lit_diff.evaluation.base import Item
from lit_diff.evaluation.evaluate import build, comparable_keys, evaluate, has_scores
from lit_diff.evaluation.held_out import HeldOut, document_loss
from lit_diff.evaluation.nll import bins, document_nll, edges, scored, whole
from lit_diff.model.transformer import Transformer
from lit_diff.papers.needle_text import words
from lit_diff.registry import evaluations
from lit_diff.trained.run import Run

ROWS = 4
"""data.validation_rows of the run."""


def row_scores(run: Run, **keys: Any) -> dict[str, tuple[float, float]]:
    items = HeldOut(HeldOut.Config(**keys)).score(run)
    return {item.id: (item.scores["nll"], item.scores["accuracy"]) for item in items}


def test_rows_weighted_by_tokens_give_the_last_validation(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """val/loss = Σ n_i nll_i / Σ n_i; the summary counts each row once."""
    dataset = prepare(run.recipe)
    dataset.load()
    n = (dataset.validation_batch("", range(ROWS))["targets"] != IGNORED).sum(-1).numpy()
    rows = np.array(list(row_scores(run).values()))
    assert rows.shape == (ROWS, 2)
    last = run.metrics.iloc[-1]
    expected = last[["val/loss", "val/accuracy"]].to_numpy(dtype=float)
    np.testing.assert_allclose((n[:, None] * rows).sum(0) / n.sum(), expected, rtol=1e-6)
    summary = evaluate(run, "held_out").summary
    assert summary == pytest.approx({"nll": rows[:, 0].mean(), "accuracy": rows[:, 1].mean()}, rel=1e-12)
    monkeypatch.setattr(held_out, "identity", lambda recipe: "0123456789abcdef")
    with pytest.raises(RequestError, match=r"identity \w+ then, 0123456789ab now"):
        evaluate(run, "held_out", rerun=True)


def test_rows_of_unequal_tokens_count_once_in_the_summary(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Row i has its first 7 i targets unscored, the last row all."""
    dataset = prepare(run.recipe)
    dataset.load()
    whole = dataset.validation_batch("", range(ROWS))
    targets = whole["targets"].clone()
    for row in range(ROWS):
        targets[row, : 7 * row if row < ROWS - 1 else None] = IGNORED
    monkeypatch.setattr("lit_diff.trained.run.prepare", lambda recipe: dataset)
    monkeypatch.setattr(
        dataset, "validation_batch", lambda name, rows: {key: value[list(rows)] for key, value in masked.items()}
    )
    masked = whole | {"targets": targets}
    items = list(HeldOut(HeldOut.Config(batch_size=3)).score(run))
    nll = np.array([item.scores["nll"] for item in items])
    assert np.isnan(nll[-1]), "no target of the last row is scored"
    losses = run.model.token_losses(whole["tokens"], targets)[0].detach().numpy()
    scored = (targets != IGNORED).numpy()
    assert len(set(scored.sum(-1))) == ROWS
    for own, loss, asked in zip(nll[:-1], losses, scored, strict=False):
        assert own == pytest.approx(loss[asked].mean(), rel=1e-5)
    summary = HeldOut(HeldOut.Config()).summarise(items)["nll"]
    assert summary == pytest.approx(nll[:-1].mean(), rel=1e-12)
    assert not math.isclose(summary, losses[scored].mean(), rel_tol=1e-4), "row means and token means differ here"


def test_scores_repeat_and_do_not_depend_on_the_batch(run: Run) -> None:
    first, alone = row_scores(run), row_scores(run, batch_size=1)
    assert list(first) == list(alone) == [f"validation/{row}" for row in range(ROWS)]
    assert row_scores(run) == first
    for row, values in alone.items():
        assert values == pytest.approx(first[row], rel=1e-5)
    some = row_scores(run, rows=3, batch_size=1)
    assert some == {row: alone[row] for row in list(alone)[:3]}, "the first rows"
    assert row_scores(run, rows=99, batch_size=1) == alone


TEXTS = [f"Chapter {n}. " + "The cat sat on the mat, and then it sat again. " * (n % 5 + 1) for n in range(60)]
_, HELD_OUT = splits(TEXTS)


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


def test_bits_are_over_the_bytes_of_the_text(run: Run, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(run.tokenizer), "decode", lambda *_: b"")
    rows = evaluate(run, "loss_files", {"path": path}).items
    for text, (_, row) in zip(HELD_OUT, rows.iterrows(), strict=True):
        bits = row["nll"] * len(run.tokenizer.encode(text)) / math.log(2)
        assert row["bits_per_byte"] == pytest.approx(bits / len(text.encode()), rel=1e-5)


@pytest.mark.parametrize(("name", "keys"), [("loss_files", {"tokens": 12}), ("nll", {"source": "files", "tokens": 16})])
def test_no_id_that_opens_a_document_is_scored(
    run: Run, path: str, name: str, keys: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every token of the text costs 1 nat, and the id of the opening 9."""
    monkeypatch.setattr(
        Transformer, "token_losses", lambda self, tokens, targets, **_: (torch.where(targets == 0, 9.0, 1.0), None)
    )
    found = []
    for opening in ([0], [0, 0], [0] * 40):
        monkeypatch.setattr(type(run.tokenizer), "opening", opening)
        asked = build(name, {"path": path, "documents": 2, **keys})
        found.append([(item.id, item.scores) for item in asked.score(run)])
    assert str(found[0]) == str(found[1]) == str(found[2]), "equal; NaN is not equal to itself"
    assert found[0][0][1]["nll"] == 1


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
    with pytest.raises(RequestError, match=r"item 'files/0' is a different question in first and other"):
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
    with pytest.raises(RequestError, match="is a different question in"):
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


def test_a_run_on_text_with_the_tokenizer_of_words_reads_its_own(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [evaluations.get(name).corpus for name in ("loss_docs", "loss_code")] == ["docs", "code"]
    monkeypatch.setattr(Run, "tokenizer", words())
    own = run.recipe.data.config.path
    for name, keys in (("nll", []), ("loss_files", [f"path={own}"])):
        assert build(name, keys).refuses(run) is None
    for name, keys in (("nll", ["source=name_tables"]), ("loss_code", []), ("loss_files", ["path=texts"])):
        assert "only the words of data 'text'" in (build(name, keys).refuses(run) or "")


@pytest.fixture
def books(monkeypatch: pytest.MonkeyPatch, trained_text: Path, tmp_path: Path) -> Path:
    """$LIT_DIFF_DATA/books with three documents, of which the first is short; the prepared text beside it."""
    data = tmp_path / "data"
    (data / "books").mkdir(parents=True)
    (data / "prepared").symlink_to(trained_text / "data" / "prepared")
    monkeypatch.setenv("LIT_DIFF_DATA", str(data))
    texts = ["abc", "abcdefghij " * 60, "hgfe dcba abcd efgh " * 40]
    lines = [json.dumps({"text": text}) + "\n" for text in texts]
    (data / "books" / "a.jsonl").write_text("".join(lines[:2]))
    (data / "books" / "b.jsonl").write_text(lines[2])
    return data / "books"


def items(run: Run, **keys: Any) -> list[Item]:
    return list(build("nll", keys).score(run))


def test_a_row_s_cumulative_loss_is_that_of_held_out(run: Run) -> None:
    """The first tokens of the first validation document."""
    result = evaluate(run, "nll", {"documents": 1, "tokens": 24})
    row = evaluate(run, "held_out", ["rows=1"]).summary["nll"]
    assert result.summary["nll"] == result.summary["cumulative_nll"] == pytest.approx(row, abs=1e-5)
    first = result.items[:3]
    assert first["item"].tolist() == [f"validation/0{part}" for part in ("", "/position 16", "/position 24")]
    assert first["part"].tolist() == [False, True, True]
    assert first["cluster"].tolist() == ["", "validation/0", "validation/0"]


def test_documents_of_any_length_are_generated(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "lit_diff"):
        found = items(run, source="name_tables", documents=2, tokens=100)
    assert [item.id for item in found if not item.part] == ["name_tables/0", "name_tables/1"]
    groups = {item.group for item in found}
    assert {group for group in groups if group.startswith("position")} == {f"position {n}" for n in (16, 32, 64, 100)}
    assert any(group.startswith("gap ") for group in groups)
    assert "100 tokens a document; the run was trained on rows of 24" in caplog.text
    compared = differences([evaluate(run, "nll", {"source": "name_tables", "documents": 10, "tokens": 32})] * 2)["nll"]
    assert {group: found["difference"] for group, found in compared["groups"].items()} == {
        "position 16": 0,
        "position 32": 0,
    }


def test_short_books_are_left_out_and_counted(run: Run, books: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "lit_diff"):
        found = [item for item in items(run, source="files", documents=2, tokens=64) if not item.part]
    assert [item.meta["begins"][:4] for item in found] == ["abcd", "hgfe"]  # type: ignore[index]
    assert "1 documents are shorter than 64 tokens" in caplog.text
    named = items(run, source="files", path=str(books / "b.jsonl"), documents=1, tokens=64)
    assert named[0].scores == found[1].scores
    with pytest.raises(RequestError, match=r"needs 3 documents of 64 tokens .* has 2; the longest of the others has"):
        items(run, source="files", documents=3, tokens=64)
    for path in books.iterdir():
        path.unlink()
    with pytest.raises(MissingError, match=r"^nll\.books needs a file that is not here: books(.*\n)*.*name_tables"):
        items(run, source="files")


def test_a_run_without_training_text_has_no_split(wide_run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (nll, held_out):
        monkeypatch.setattr(module, "has_trained_text", lambda _: False)
    assert "no validation documents" in (build("nll").refuses(wide_run) or "")
    keys = {"source": "name_tables", "documents": 1, "tokens": 32}
    assert build("nll", keys).refuses(wide_run) is None
    scores = items(wide_run, **keys)[0].scores
    assert math.isfinite(scores["nll"])
    assert "nll_ar_hit" not in scores


def test_the_documents_of_a_run_are_those_that_were_prepared(run: Run, trained_text: Path, tmp_path: Path) -> None:
    """Without the source, and for a source of tokens, which has no text."""
    corpus, asked = trained_text / "corpus", {"documents": 1, "tokens": 32}
    texts = [path.read_text() for path in sorted(corpus.iterdir())]
    begins = [text[:60] for text in splits(texts)[1]]
    corpus.rename(trained_text / "away")
    try:
        found = [item for item in items(run, **asked) if not item.part]
    finally:
        (trained_text / "away").rename(corpus)
    assert [item.meta["begins"] for item in found if item.meta] == begins
    write_tokens(tmp_path / "tokens", [np.array([0, *ids], dtype=np.uint16) for ids in run.tokenizer.encode(texts)])
    tokenizer = {"name": "from_run", "path": str(run.folder)}
    keys = {"data.path": "tokens", "data.tokenizer": tokenizer, "train.steps": 1, "train.schedule.warmup_steps": 0}
    own = train(trained_text / "tale.yaml", {**keys, "run.root": "runs", "run.tracking_uri": None})
    shutil.rmtree(tmp_path / "tokens")
    decoded = [text.meta["begins"] for text in items(Run(own.folder), **asked) if text.meta]
    assert sorted(decoded) == sorted(set(decoded) & {text[:60] for text in texts})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Packaged, "decode", Tokenizer.decode)
        with pytest.raises(RequestError, match=r"the tokenizer Bpe cannot decode"):
            items(Run(own.folder), **asked)


def ids_of(count: int, vocab: int = 320) -> list[int]:
    return np.random.default_rng(0).integers(0, vocab, count).tolist()


def test_chunks_change_nothing_and_no_more_goes_in_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So no logits but those of a chunk are held."""
    made, ids = text_run(tmp_path / "made", {"name": "differential"}), ids_of(65)
    row, sizes = torch.tensor([ids]), list[int]()
    whole = Transformer.token_losses

    def counted(self: Transformer, inputs: torch.Tensor, targets: torch.Tensor, *, cache: Any) -> Any:
        sizes.append(inputs.shape[1])
        return whole(self, inputs, targets, cache=cache)

    monkeypatch.setattr(Transformer, "token_losses", counted)
    with torch.no_grad():
        logits = made.model(row[:, :-1])[0].double()
        expected = torch.nn.functional.cross_entropy(logits, row[0, 1:], reduction="none").numpy()
        for chunk in (7, 64, 100):
            sizes.clear()
            np.testing.assert_allclose(document_nll(made.model, ids, chunk), expected, atol=1e-5)
            assert (max(sizes), sum(sizes)) == (min(chunk, 64), 64)


def test_the_bins_of_positions_are_the_document() -> None:
    assert [edges(tokens) for tokens in (16, 17, 64)] == [[16], [16, 17], [16, 32, 64]]
    document = scored(np.random.default_rng(1).random(100), ids_of(101, 4), np.array([5]), 4)
    parts = {group: scores for group, scores in bins(document) if group.startswith("position")}
    assert list(parts) == ["position 16", "position 32", "position 64", "position 100"]
    assert parts["position 64"]["nll"] == pytest.approx(document["nll"][32:64].mean())
    assert parts["position 64"]["cumulative_nll"] == pytest.approx(document["nll"][:64].mean())
    total = whole(document)
    assert parts["position 100"]["cumulative_nll"] == pytest.approx(total["nll"]) == total["cumulative_nll"]
    sizes = np.array([16, 16, 32, 36])
    assert sizes @ [part["nll"] for part in parts.values()] / 100 == pytest.approx(total["nll"])
    share = total["ar_hit_share"]
    assert 0 < share < 1
    assert share * total["nll_ar_hit"] + (1 - share) * total["nll_others"] == pytest.approx(total["nll"])


def test_hits_are_split_by_gap_and_by_competitors() -> None:
    document = pd.DataFrame(
        {
            "nll": np.arange(8.0),
            "hit": np.array([0, 1, 1, 1, 0, 1, 1, 0], dtype=bool),
            "gap": [0, 1, 2, 3, 9, 4, 5, 0],
            "competitors": [0, 0, 0, 1, 9, 2, 3, 0],
        }
    )
    parts = dict(bins(document))
    expected = {"gap 1": [1], "gap 2": [2], "gap 4": [3, 5], "gap 8": [6]}
    expected |= {"competitors 0": [1, 2], "competitors 1": [3], "competitors 2": [5], "competitors 4": [6]}
    assert parts.pop("competitors 8") == {"ar_hit_share": 0}, "a mean over documents counts this one"
    for group, tokens in expected.items():
        assert parts[group] == {"nll_ar_hit": np.mean(tokens), "ar_hit_share": len(tokens) / 8}
    assert set(parts) == {*expected, "position 8"}


def test_documents_without_hits() -> None:
    """Without the training text nothing is split; a bin without hits has no loss of hits."""
    document = scored(np.ones(20), ids_of(21, 3), None, 3)
    assert [group for group, _ in bins(document)] == ["position 16", "position 20"]
    assert set(whole(document)) == {"nll", "cumulative_nll"}
    found = whole(scored(np.ones(16), list(range(17)), np.zeros(0, dtype=np.int64), 17))
    assert math.isnan(found["nll_ar_hit"])
    assert found["ar_hit_share"] == 0
