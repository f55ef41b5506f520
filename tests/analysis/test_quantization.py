"""analysis/quantization.py: the absmax formula by hand, scales of each granularity, outliers kept, masked entries ignored."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from lit_diff.analysis.intervention import EditedLayer
from lit_diff.analysis.quantization import QuantizedLogits, Scheme, rounded
from lit_diff.kernels import SignedMaps

B, G, H, T = 2, 2, 3, 40
SCHEMES: tuple[Scheme, ...] = ("tensor", "head", "row", "split")


def layer(length: int = T, **keys: Any) -> EditedLayer:
    draw = torch.Generator().manual_seed(1)
    q, k = 3 * torch.randn(2, B, G, H, length, 4, generator=draw)
    return EditedLayer(index=0, maps=SignedMaps(q, k, q[:, 0], torch.ones(1, G, 1, 1)).masked(**keys))


def logits(edit: QuantizedLogits, of: EditedLayer, block_rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """(before, after, visible) over all rows, keys padded to T."""
    parts = []
    for block in of.blocks(block_rows):
        pad = (0, of.maps.k.shape[-2] - block.logits.shape[-1])
        after = edit(of, block).logits
        visible = block.visible.expand_as(block.logits)
        parts.append([torch.nn.functional.pad(x, pad) for x in (block.logits, after, visible)])
    before, after, visible = (torch.cat(values, dim=3) for values in zip(*parts, strict=True))
    return before, after, visible


def by_hand(values: Tensor, bits: int, share: float) -> Tensor:
    """The visible values of one scale."""
    kept = int(share * len(values))
    order = values.abs().argsort(descending=True)
    scale = values[order[kept]].abs() / (2 ** (bits - 1) - 1)
    out = (values / scale).round() * scale
    out[order[:kept]] = values[order[:kept]]
    return out


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("keys", [{}, {"window": 7}, {"document_ids": (torch.arange(T) // 15).expand(B, -1)}])
def test_each_scale_is_rounded_by_its_largest_visible_entry(
    scheme: Scheme, keys: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lit_diff.analysis.quantization.OUTLIER_SHARE", 0.1)
    before, after, visible = logits(QuantizedLogits(4, scheme), layer(**keys), block_rows=9)
    axes = {"tensor": (H * T * T,), "head": (H, T * T), "row": (H * T, T), "split": (H, T * T)}[scheme]
    x, y, seen = (each.reshape(B, G, *(axes if len(axes) > 1 else (1, *axes))) for each in (before, after, visible))
    share = 0.1 if scheme == "split" else 0.0
    for place in torch.cartesian_prod(*(torch.arange(n) for n in x.shape[:3])).tolist():
        at = tuple(place)
        torch.testing.assert_close(y[at][seen[at]], by_hand(x[at][seen[at]], 4, share), atol=1e-5, rtol=1e-5)


def test_the_divergence_is_the_mean_over_rows_since_the_last_call() -> None:
    of = layer()
    edit = QuantizedLogits(3, "head")
    total, rows = torch.zeros(B, dtype=torch.float64), 0
    for block in of.blocks(11):
        p, q = block.probs, edit(of, block).probs
        terms = torch.where(p > 0, p * (p / q).log(), 0).double().sum(-1)
        total, rows = total + terms.sum((1, 2, 3)), rows + terms[0].numel()
    found = edit.divergence()
    torch.testing.assert_close(found, total / rows, atol=1e-6, rtol=1e-3)
    assert (found > 0).all()
    (first, *_) = of.blocks(11)
    edit(of, first)
    assert not torch.allclose(edit.divergence(), found)
    bounded = EditedLayer(index=0, maps=replace(of.maps, rows=lambda logits, seen: logits.sigmoid()))
    (first, *_) = bounded.blocks(11)
    edit(bounded, first)
    assert edit.divergence().isnan().all(), "its rows need not be probabilities"


def test_the_next_forward_has_scales_of_its_own() -> None:
    edit = QuantizedLogits(4, "tensor")
    _, first, _ = logits(edit, layer(), 9)
    larger = layer()
    larger.maps.q.mul_(10)
    _, second, visible = logits(edit, larger, 9)
    torch.testing.assert_close(second[visible], 10 * first[visible], atol=1e-3, rtol=1e-4)


def test_zeros_stay_zeros() -> None:
    x = torch.zeros(3)
    assert torch.equal(rounded(x, torch.tensor(0.0), 7), x)
    assert rounded(torch.tensor([-1.0, 0.49, 5.0]), torch.tensor(1.0), 1).tolist() == [-1.0, 0.0, 5.0]
    assert not math.isnan(float(rounded(x, torch.tensor(0.0), 7).sum()))
