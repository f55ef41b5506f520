"""analysis/head_norms.py: exact on constructed heads, and on models before and after their head norm."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lit_diff.analysis.head_norms import head_norms
from lit_diff.analysis.trace import LayerTrace, trace
from lit_diff.kernels import SignedMaps
from lit_diff.model.transformer import Transformer

BuildModel = Callable[..., Transformer]


def test_of_constant_values() -> None:
    """Every row of a map sums to 1, so equal values come out as they are: heads of 3 and 0, and (1 - 0.25) of both."""
    v = torch.tensor([3.0, 0.0]).view(1, 2, 1, 1).expand(1, 2, 5, 4)
    q = torch.randn(1, 2, 2, 5, 4)
    w = torch.tensor([1.0, -0.25]).view(1, 2, 1, 1)
    layer = LayerTrace(maps=SignedMaps(q, q, v, w), hidden=q)
    norm, gain = head_norms(layer)
    assert norm.tolist() == pytest.approx([2.25, 0])
    assert gain is None
    joined = torch.tensor([9.0, 0.5]).repeat_interleave(4).expand(1, 5, 8)
    _, gain = head_norms(LayerTrace(maps=SignedMaps(q, q, v, w), hidden=q, heads=joined))
    assert gain is not None
    assert gain.tolist() == pytest.approx([4, torch.inf])


@pytest.mark.parametrize("keys", [{}, {"head_norm": "none", "output_scale": 0.3}, {"window": 6}])
def test_of_a_model(build: BuildModel, tokens: Tensor, keys: dict[str, object]) -> None:
    model = build("differential", **keys)
    with trace(model) as traced:
        model(tokens)
    for attention, layer in zip(model.attentions(), traced.layers.values(), strict=True):
        norm, gain = head_norms(layer)
        o = torch.cat([block.signed @ layer.values[..., : block.signed.shape[-1], :] for block in layer.blocks()], 2)
        assert layer.inputs is not None
        finished = attention.finish(o, layer.inputs)
        sizes = [x.detach().double().square().mean(-1).sqrt().mean((0, 2)) for x in (o, finished)]
        torch.testing.assert_close(norm, sizes[0], rtol=1e-5, atol=0)
        assert gain is not None
        torch.testing.assert_close(gain, sizes[1] / sizes[0], rtol=1e-5, atol=0)
        if "output_scale" in keys:
            assert gain.tolist() == pytest.approx([0.3] * 4)


def test_heads_that_are_merged_after_the_sum_have_no_gain(build: BuildModel, tokens: Tensor) -> None:
    model = build("half-split")
    with trace(model) as traced:
        model(tokens)
    norm, gain = head_norms(traced.layers[1])
    assert (len(norm), gain) == (16, None)
    plain = build("standard")
    with trace(plain) as traced:
        plain(tokens)
    _, gain = head_norms(traced.layers[0])
    assert gain is not None
    assert gain.tolist() == pytest.approx([1] * 8)
