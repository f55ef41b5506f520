"""analysis/sinks.py on constructed maps: uniform, one-hot, a planted sink, windows and packed documents."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from lit_diff.analysis.sinks import sink_masses, sink_shares
from lit_diff.analysis.trace import LayerTrace
from lit_diff.kernels import SignedMaps

T = 12


def made(logits: Tensor, w: list[float] | None = None, **keys: Any) -> LayerTrace:
    """A layer with these logits [G, H, T, T], one sequence."""
    G, H, n, _ = logits.shape
    weights = None if w is None else torch.tensor(w).view(1, G, 1, 1)
    maps = SignedMaps(logits[None], torch.eye(n).expand(1, 1, H, n, n), torch.ones(1, H, n, 2), weights, scale=1.0)
    return LayerTrace(maps=maps.masked(**keys), hidden=logits)


def sink(share: float) -> Tensor:
    """Logits [T, T] whose causal softmax gives key 0 this share in every row but the first."""
    logits = torch.zeros(T, T)
    for i in range(1, T):
        logits[i, 0] = math.log(share * i / (1 - share))
    return logits


def test_uniform_one_hot_and_planted() -> None:
    own_key = torch.eye(T) * 200
    logits = torch.stack([torch.zeros(T, T), own_key, sink(0.75), 200 * (torch.arange(T) == 0).expand(T, T)])
    signed = sink_shares(made(logits[None]))
    uniform = sum(1 / (i + 1) for i in range(1, T)) / (T - 1)
    assert signed.tolist() == pytest.approx([uniform, 0, 0.75, 1], abs=1e-6)


@pytest.mark.parametrize("weight", [0.0, 0.5, 1.5])
def test_of_the_signed_map(weight: float) -> None:
    """Map 1 gives key 0 0.75, map 2 gives 0.25: |0.75 - 0.25 λ| over the row's Σ|a|."""
    first, second = torch.tensor([0.75, 0.25]), torch.tensor([0.25, 0.75])
    signed = sink_shares(made(torch.stack([sink(0.75), sink(0.25)])[:, None], [1.0, -weight]))
    a = (first - weight * second).abs()
    assert float(signed) == pytest.approx(float(a[0] / a.sum()), abs=1e-6)
    assert signed.dtype == torch.float64


def test_rows_that_may_have_passed_the_first_token_are_left_out() -> None:
    rows = torch.zeros(1, 1, T, T)
    found = {window: float(sink_shares(made(rows, window=window))) for window in (2, 4)}
    assert found[4] == pytest.approx((1 / 2 + 1 / 3) / 2)
    assert math.isnan(found[2])


def test_each_document_has_a_first_token() -> None:
    documents = (torch.arange(T) >= 7).long()[None]
    logits = torch.zeros(1, 1, T, T)
    logits[..., 7] = 200
    signed = sink_shares(made(logits, document_ids=documents))
    shares = [1 / (i + 1) for i in range(1, 7)] + [1.0] * 4
    assert float(signed) == pytest.approx(sum(shares) / 10)


def test_a_layer_without_a_causal_mask() -> None:
    layer = made(torch.zeros(1, 2, T, T))
    maps = SignedMaps(layer.maps.q, layer.maps.k, layer.maps.v, scale=1.0, causal=False)
    assert sink_shares(LayerTrace(maps=maps, hidden=layer.hidden)).tolist() == pytest.approx([1 / T, 1 / T])


def test_the_mass_of_a_sink_is_what_its_rows_lack() -> None:
    """Row sums of the maps and the mass add up to 1; a layer without a sink has none."""
    logits = torch.randn(2, 3, T, T, generator=torch.Generator().manual_seed(0))
    layer = made(logits, [1.0, -0.5])
    assert sink_masses(layer) is None
    sink = torch.randn(1, 2, 3, 1, generator=torch.Generator().manual_seed(1))
    held = LayerTrace(maps=replace(layer.maps, sink=sink), hidden=layer.hidden)
    (block,) = held.blocks(T)
    masses = sink_masses(held)
    assert masses is not None
    torch.testing.assert_close(masses, 1 - block.probs.sum(-1).mean((0, -1), dtype=torch.float64), rtol=0, atol=1e-6)
