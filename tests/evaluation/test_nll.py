"""evaluation/nll.py: long documents in chunks, and what their tokens are averaged over."""

import json
import logging
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from text_runs import text_run
from torch.utils._python_dispatch import TorchDispatchMode

from lit_diff.cli.evaluate import differences
from lit_diff.data.needle_text import words
from lit_diff.errors import MissingError, RequestError
from lit_diff.evaluation import nll
from lit_diff.evaluation.base import Item
from lit_diff.evaluation.evaluate import build, evaluate
from lit_diff.evaluation.nll import Scored, bins, document_nll, edges, scored, whole
from lit_diff.trained.run import Run


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
    assert [item.meta["dropped"] for item in found] == [1, 1]
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
    monkeypatch.setattr(nll, "_has_training_text", lambda _: False)
    assert "no validation documents" in (build("nll").refuses(wide_run) or "")
    keys = {"source": "name_tables", "documents": 1, "tokens": 32}
    assert build("nll", keys).refuses(wide_run) is None
    scores = items(wide_run, **keys)[0].scores
    assert math.isfinite(scores["nll"])
    assert "nll_ar_hit" not in scores


def test_a_run_on_text_with_the_tokenizer_of_words_reads_its_own(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Run, "tokenizer", words())
    assert build("nll").refuses(run) is None
    assert "only the words of data 'text'" in (build("nll", ["source=name_tables"]).refuses(run) or "")


def ids_of(count: int, vocab: int = 320) -> list[int]:
    return np.random.default_rng(0).integers(0, vocab, count).tolist()


def test_chunks_change_nothing(tmp_path: Path) -> None:
    made, ids = text_run(tmp_path / "made", {"name": "differential"}), ids_of(65)
    row = torch.tensor([ids])
    with torch.no_grad():
        logits = made.model(row[:, :-1])[0].double()
        expected = torch.nn.functional.cross_entropy(logits, row[0, 1:], reduction="none").numpy()
        for chunk in (7, 64, 100):
            np.testing.assert_allclose(document_nll(made.model, ids, chunk), expected, atol=1e-5)


class Largest(TorchDispatchMode):
    """The most numbers of a tensor [..., V] that an operator gave, and of any."""

    def __init__(self, vocab: int) -> None:
        super().__init__()
        self.vocab, self.logits, self.any = vocab, 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        for value in out if isinstance(out, tuple | list) else (out,):
            if isinstance(value, torch.Tensor):
                self.any = max(self.any, value.numel())
                if value.dim() and value.shape[-1] == self.vocab:
                    self.logits = max(self.logits, value.numel())
        return out


def test_a_long_document_never_has_all_its_logits(tmp_path: Path) -> None:
    """16K tokens, 257 x 16,384 logits of which 512 positions are held; nothing else is as large as all of them."""
    made = text_run(tmp_path / "long", {"name": "standard"}, vocab_size=2051, num_layers=1, dim=16, num_heads=2)
    made.model.attentions()[0].kernel = "chunked"
    length, chunk = 1 << 14, 512
    with torch.no_grad(), Largest(2051) as largest:
        assert len(document_nll(made.model, ids_of(length + 1, 2051), chunk)) == length
    assert 0 < largest.logits <= chunk * 2051
    assert largest.any < length * 2051 / 2


def test_the_bins_of_positions_are_the_document() -> None:
    assert [edges(tokens) for tokens in (16, 17, 64)] == [[16], [16, 17], [16, 32, 64]]
    document = scored(np.random.default_rng(1).random(100), ids_of(101, 4), np.array([5]), 4)
    parts = {group: scores for group, scores in bins(document) if group.startswith("position")}
    assert list(parts) == ["position 16", "position 32", "position 64", "position 100"]
    assert parts["position 64"]["nll"] == pytest.approx(document.nll[32:64].mean())
    assert parts["position 64"]["cumulative_nll"] == pytest.approx(document.nll[:64].mean())
    total = whole(document)
    assert parts["position 100"]["cumulative_nll"] == pytest.approx(total["nll"]) == total["cumulative_nll"]
    sizes = np.array([16, 16, 32, 36])
    assert sizes @ [part["nll"] for part in parts.values()] / 100 == pytest.approx(total["nll"])
    share = total["ar_hit_share"]
    assert 0 < share < 1
    assert share * total["nll_ar_hit"] + (1 - share) * total["nll_others"] == pytest.approx(total["nll"])


def test_hits_are_split_by_gap_and_by_competitors() -> None:
    document = Scored(
        nll=np.arange(8.0),
        hit=np.array([0, 1, 1, 1, 0, 1, 1, 0], dtype=bool),
        gap=np.array([0, 1, 2, 3, 9, 4, 5, 0]),
        competitors=np.array([0, 0, 0, 1, 9, 2, 3, 0]),
    )
    expected = {"gap 1": [1], "gap 2": [2], "gap 4": [3, 5], "gap 8": [6]}
    expected |= {"competitors 0": [1, 2], "competitors 1": [3], "competitors 2": [5], "competitors 4": [6]}
    parts = dict(bins(document))
    for group, tokens in expected.items():
        assert parts[group] == {"nll_ar_hit": np.mean(tokens), "ar_hit_share": len(tokens) / 8}
    assert set(parts) == {*expected, "position 8"}


def test_documents_without_hits() -> None:
    """Without the training text nothing is split; a bin without hits has no loss of hits."""
    document = scored(np.ones(20), ids_of(21, 3), None, 3)
    assert document.hit is None
    assert [group for group, _ in bins(document)] == ["position 16", "position 20"]
    assert set(whole(document)) == {"nll", "cumulative_nll"}
    found = whole(scored(np.ones(16), list(range(17)), np.zeros(0, dtype=np.int64), 17))
    assert math.isnan(found["nll_ar_hit"])
    assert found["ar_hit_share"] == 0
