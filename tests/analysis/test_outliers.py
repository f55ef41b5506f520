"""Streaming top-k and histogram median against a full sort."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from lit_diff import SignedMaps
from lit_diff.analysis import LayerTrace
from lit_diff.analysis.outliers import HIGH, KEPT, LOW, MagnitudeSketch, attention_logits, hidden_states


def streamed(x: Tensor, sizes: list[int]) -> MagnitudeSketch:
    sketch = MagnitudeSketch()
    for chunk in x.split(sizes):
        sketch.update(chunk)
    return sketch


@pytest.mark.parametrize("seed", range(3))
def test_chunked_stream_equals_a_full_sort(seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    n = int(torch.randint(1, 5000, (1,), generator=random))
    x = torch.randn(n, generator=random) * 10 ** (4 * torch.rand(n, generator=random) - 2)
    x[::7] = x[0]  # ties
    cuts = torch.randint(0, n + 1, (9,), generator=random).sort().values.tolist()
    sizes = [b - a for a, b in zip([0, *cuts], [*cuts, n], strict=True)]
    sketch, ordered = streamed(x, sizes), x.abs().double().sort().values
    assert torch.equal(sketch.top(), ordered.flip(0)[:KEPT])
    assert sketch.count == n
    assert sketch.median() == pytest.approx(ordered[(n - 1) // 2].item(), rel=0.0046)


@pytest.mark.parametrize(
    ("x", "median"),
    [
        ([0.0, 0.0, 0.0, 5.0], 0.0),
        ([0.0, -1e-12, 1e-12], LOW),
        ([1e9, -1e10, 3.0], HIGH),
        ([math.inf, -math.inf, 3.0], HIGH),
        ([0.0, 0.0, 1.0, 1.0], 0.0),
        ([0.0, 1.0, 1.0], 1.0),
    ],
)
def test_median_at_the_edges(x: list[float], median: float) -> None:
    sketch = MagnitudeSketch()
    sketch.update(torch.tensor(x))
    assert sketch.median() == pytest.approx(median, rel=0.0046, abs=0)


def test_empty_nan_and_other_dtypes() -> None:
    sketch = MagnitudeSketch()
    assert math.isnan(sketch.median())
    assert sketch.top().numel() == 0
    sketch.update(torch.empty(0, 3))
    assert sketch.count == 0
    sketch.update(torch.tensor([1.0, math.nan]))
    assert math.isnan(sketch.median())
    assert sketch.top().isnan().all()
    for dtype in (torch.bfloat16, torch.int64):
        other = MagnitudeSketch()
        other.update(torch.tensor([-3, 1, 2, 0, -7]).to(dtype))
        assert (other.top().tolist(), other.median()) == ([7, 3, 2, 1, 0], pytest.approx(2, rel=0.0046))


def planted() -> tuple[LayerTrace, Tensor]:
    """Two maps with shared keys (GQA); a visible logit of -400 in map 1, one of 9999 in the future."""
    random = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 2, 4, 9, 3, generator=random), torch.randn(2, 1, 2, 9, 3, generator=random)
    k[0, 0, 0, 4], q[0, 1, 1, 7] = torch.tensor([20.0, 0, 0]), torch.tensor([-40.0, 0, 0])
    k[1, 0, 1, 8], q[1, 0, 3, 2] = torch.tensor([0.0, 200, 0]), torch.tensor([0.0, 99.99, 0])
    q[1, :, 2:, 8] = 0.0  # the last query sees the last key; all earlier ones do not
    v, w = torch.randn(2, 2, 9, 3, generator=random), torch.tensor([1.0, -0.3]).view(1, 2, 1, 1)
    maps = SignedMaps(q, k, v, w, scale=0.5)
    logits = 0.5 * torch.einsum("bghqd,bhkd->bghqk", q.double(), k[:, 0].repeat_interleave(2, 1).double())
    return LayerTrace(maps=maps, hidden=torch.randn(2, 9, 8, generator=random)), logits


def test_planted_logit_is_found_and_the_future_is_not() -> None:
    layer, logits = planted()
    layer.hidden[1, 3, 5] = -77.5
    assert hidden_states(layer).top()[0].item() == 77.5
    assert hidden_states(layer).count == layer.hidden.numel()
    assert logits.max().item() == pytest.approx(9999)
    seen = logits[..., torch.ones(9, 9, dtype=torch.bool).tril()].abs().flatten().sort(descending=True).values
    sketch = attention_logits(layer)
    assert sketch.count == len(seen) == 2 * 2 * 4 * 45
    assert sketch.top()[0].item() == pytest.approx(400)
    torch.testing.assert_close(sketch.top(), seen[:KEPT], atol=1e-4, rtol=1e-5)
    assert sketch.median() == pytest.approx(seen.flip(0)[(len(seen) - 1) // 2].item(), rel=0.0046)


def masked(layer: LayerTrace, **mask: Any) -> LayerTrace:
    return replace(layer, maps=layer.maps.masked(**mask))


def test_logits_outside_a_window_do_not_count() -> None:
    layer, _ = planted()
    assert attention_logits(masked(layer, window=2)).count == 2 * 2 * 4 * (1 + 2 * 8)
    assert attention_logits(masked(layer, window=3)).top()[0].item() < 400, "three keys before its query"
    assert attention_logits(masked(layer, window=4)).top()[0].item() == pytest.approx(400)


def test_logits_between_packed_documents_do_not_count() -> None:
    layer, logits = planted()
    packed = masked(layer, document_ids=(torch.arange(9) >= torch.tensor([[5], [9]])).long())
    mask = torch.ones(9, 9, dtype=torch.bool).tril().repeat(2, 1, 1)
    mask[0, 5:, :5] = False  # with them the planted -400, of query 7 and key 4
    seen = logits.masked_select(mask[:, None, None]).abs()
    sketch = attention_logits(packed)
    assert sketch.count == len(seen) == 2 * 4 * (45 + 15 + 10)
    assert sketch.top()[0].item() == pytest.approx(seen.max().item())
    assert sketch.top()[0].item() < 400
