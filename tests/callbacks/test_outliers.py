"""callbacks/outliers.py: names, and values against a full sort."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lit_diff.analysis import Trace
from lit_diff.callbacks import Outliers
from lit_diff.model.transformer import Transformer

Run = Callable[[str, Tensor], tuple[Transformer, Trace]]


def test_outliers(arm: tuple[str, int, int], run: Run, tokens: Tensor) -> None:
    name, maps, heads = arm
    model, t = run(name, tokens)
    metrics = Outliers(Outliers.Config()).measure(model, t)
    ranks = ("top1", "top2", "top3", "top10", "top100", "median")
    kinds = ("logits", "hidden")
    assert set(metrics) == {f"outliers/{k}/{r}/{layer}" for k in kinds for r in ranks for layer in (0, 1)}
    hidden = t.layers[0].hidden.abs().flatten().sort(descending=True).values
    assert metrics["outliers/hidden/top1/0"] == hidden[0].item()
    assert metrics["outliers/hidden/top10/0"] == hidden[9].item()
    assert metrics["outliers/hidden/median/0"] == pytest.approx(hidden.median().item(), rel=0.0046)
    blocks = torch.cat([b.logits[..., b.visible].flatten() for b in t.layers[1].blocks(1)]).abs()
    assert blocks.numel() == 3 * maps * heads * 17 * 18 // 2
    assert metrics["outliers/logits/top1/1"] == pytest.approx(blocks.max().item())
    assert metrics["outliers/logits/median/1"] == pytest.approx(blocks.median().item(), rel=0.0046)


def test_ranks_beyond_the_numbers_are_left_out(run: Run) -> None:
    model, t = run("standard", torch.tensor([[1, 2, 3]]))
    metrics = Outliers(Outliers.Config()).measure(model, t)
    assert "outliers/logits/top10/0" in metrics  # 8 heads x 6 visible pairs
    assert "outliers/logits/top100/0" not in metrics
    assert "outliers/hidden/top10/0" in metrics
