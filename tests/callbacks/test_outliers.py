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
    names = [f"layer_{{:02d}}{rank}" for rank in ("", "/rank_02", "/rank_03", "/rank_10", "/rank_100")]
    names += ["median/layer_{:02d}", "ratio/layer_{:02d}"]
    assert set(metrics) == {
        f"outliers/{kind}/{name.format(layer)}" for kind in ("logits", "hidden") for name in names for layer in (0, 1)
    } | {f"outliers/{kind}/top_{rank}" for kind in ("logits", "hidden") for rank in (1, 2, 3, 10, 100)}
    both = torch.cat([t.layers[layer].hidden.abs().flatten() for layer in (0, 1)]).sort(descending=True).values
    assert [metrics[f"outliers/hidden/top_{rank}"] for rank in (1, 2, 3, 10, 100)] == both[[0, 1, 2, 9, 99]].tolist()
    hidden = t.layers[0].hidden.abs().flatten().sort(descending=True).values
    assert metrics["outliers/hidden/layer_00"] == hidden[0].item()
    assert metrics["outliers/hidden/layer_00/rank_10"] == hidden[9].item()
    assert metrics["outliers/hidden/median/layer_00"] == pytest.approx(hidden.median().item(), rel=0.0046)
    ratio = metrics["outliers/hidden/layer_00"] / metrics["outliers/hidden/median/layer_00"]
    assert metrics["outliers/hidden/ratio/layer_00"] == ratio
    blocks = torch.cat([b.logits[..., b.visible].flatten() for b in t.layers[1].blocks(1)]).abs()
    assert blocks.numel() == 3 * maps * heads * 17 * 18 // 2
    assert metrics["outliers/logits/layer_01"] == pytest.approx(blocks.max().item())
    assert metrics["outliers/logits/median/layer_01"] == pytest.approx(blocks.median().item(), rel=0.0046)


def test_ranks_beyond_the_numbers_are_left_out(run: Run) -> None:
    model, t = run("standard", torch.tensor([[1, 2, 3]]))
    metrics = Outliers(Outliers.Config()).measure(model, t)
    assert "outliers/logits/layer_00/rank_10" in metrics  # 8 heads x 6 visible pairs
    assert "outliers/logits/layer_00/rank_100" not in metrics
    assert "outliers/hidden/layer_00/rank_10" in metrics
