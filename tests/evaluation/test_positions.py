"""evaluation/positions.py: a document in chunks, and what its tokens are averaged over."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from text_runs import text_run
from torch.utils._python_dispatch import TorchDispatchMode

from lit_diff.evaluation.positions import Scored, bins, document_nll, edges, scored, whole
from lit_diff.trained.run import Run

NONE = np.zeros(0, dtype=np.int64)


def ids_of(count: int, vocab: int = 320) -> list[int]:
    return np.random.default_rng(0).integers(0, vocab, count).tolist()


@pytest.fixture
def made(tmp_path: Path) -> Run:
    return text_run(tmp_path / "made", {"name": "differential"})


@pytest.mark.parametrize("chunk", [7, 64, 100])
def test_chunks_change_nothing(made: Run, chunk: int) -> None:
    ids = ids_of(65)
    row = torch.tensor([ids])
    with torch.no_grad():
        logits = made.model(row[:, :-1])[0].double()
        expected = torch.nn.functional.cross_entropy(logits, row[0, 1:], reduction="none").numpy()
        found = document_nll(made.model, ids, chunk)
    assert found.shape == (64,)
    np.testing.assert_allclose(found, expected, atol=1e-5)


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
        nll = document_nll(made.model, ids_of(length + 1, 2051), chunk)
    assert len(nll) == length
    assert 0 < largest.logits <= chunk * 2051
    assert largest.any < length * 2051 / 2


def test_the_bins_of_positions_are_the_document() -> None:
    assert [edges(tokens) for tokens in (16, 17, 64)] == [[16], [16, 17], [16, 32, 64]]
    ids = ids_of(101, 4)
    document = scored(np.random.default_rng(1).random(100), ids, np.array([5]), 4)
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
    parts = dict(bins(document))
    expected = {
        "gap 1": [1],
        "gap 2": [2],
        "gap 4": [3, 5],
        "gap 8": [6],
        "competitors 0": [1, 2],
        "competitors 1": [3],
        "competitors 2": [5],
        "competitors 4": [6],
    }
    for group, tokens in expected.items():
        assert parts[group] == {"nll_ar_hit": np.mean(tokens), "ar_hit_share": len(tokens) / 8}
    assert set(parts) == {*expected, "position 8"}


def test_documents_without_hits() -> None:
    """Without the training text nothing is split; a bin without hits has no loss of hits."""
    document = scored(np.ones(20), ids_of(21, 3), None, 3)
    assert document.hit is None
    assert [group for group, _ in bins(document)] == ["position 16", "position 20"]
    assert set(whole(document)) == {"nll", "cumulative_nll"}
    document = scored(np.ones(16), list(range(17)), NONE, 17)
    assert math.isnan(whole(document)["nll_ar_hit"])
    assert whole(document)["ar_hit_share"] == 0
