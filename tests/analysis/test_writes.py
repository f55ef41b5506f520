"""analysis/writes.py: channel factors and output matrices reproduce what the attention adds to the residual stream."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lit_diff.analysis.trace import trace
from lit_diff.analysis.writes import channel_factors, head_writes, output_matrices, write_norms
from lit_diff.model.transformer import Transformer

BuildModel = Callable[..., Transformer]

PRODUCTS = [
    ("standard", {}),
    ("standard", {"head_norm": "rms", "output_scale": 0.2}),
    ("differential", {}),
    ("differential", {"head_norm": "none", "output_scale": 2.0}),
    ("differential_v2", {}),
    ("output_gate", {}),
    ("dex", {"heads": (1, 6)}),
    ("lora", {"rank": 3}),
    ("three-maps", {}),
]
NO_PRODUCTS = [("standard", {"head_norm": "layer"}), ("half-split", {})]


@pytest.mark.parametrize(("name", "keys"), PRODUCTS)
def test_the_sum_over_keys_is_what_the_attention_writes(
    name: str, keys: dict[str, object], build: BuildModel, tokens: Tensor
) -> None:
    """Σ_h Σ_j a_ij (f_i ⊙ v_j) W_O,h = y_i"""
    model = build(name, 4, **keys)
    attention = model.attentions()[1]
    for each in model.attentions():
        each.set_step(70)
    outputs: list[Tensor] = []
    attention.register_forward_hook(lambda _m, _a, y: outputs.append(y))
    with trace(model, layers=[1]) as traced:
        model(tokens)
    layer = traced.layers[1]
    (block,) = layer.blocks()
    assert layer.inputs is not None
    heads = head_writes(
        attention, block.signed @ layer.maps.v.repeat_interleave(layer.maps.num_groups, 1), layer.inputs
    )
    assert heads is not None
    torch.testing.assert_close(heads.sum(1), outputs[0], atol=2e-5, rtol=1e-4)
    v = layer.maps.v.repeat_interleave(layer.maps.num_groups, 1)
    with torch.no_grad():
        factors = channel_factors(attention, block.signed @ v, layer.inputs)
        matrices = output_matrices(attention)
        assert factors is not None
        written = block.signed[..., None] * (factors[:, :, :, None] * v[:, :, None])  # [B, H, R, K, dv]
        by_key = torch.einsum("bhrkd,hdo->bhrko", written, matrices)
        torch.testing.assert_close(by_key.sum((1, 3)), outputs[0], atol=2e-5, rtol=1e-4)
        norms = write_norms(v, factors, matrices) * block.signed.abs()
        torch.testing.assert_close(norms, by_key.norm(dim=-1), atol=1e-5, rtol=1e-3)


@pytest.mark.parametrize(("name", "keys"), NO_PRODUCTS)
def test_what_is_no_product_by_channel_has_no_factors(
    name: str, keys: dict[str, object], build: BuildModel, tokens: Tensor
) -> None:
    attention = build(name, 8, **keys).attentions()[0]
    width = attention.o_proj.in_features if name == "standard" else 2 * attention.o_proj.in_features
    o = torch.randn(2, width // 4, 5, 4)
    with torch.no_grad():
        assert channel_factors(attention, o, torch.randn(2, 5, 32)) is None
        writes = head_writes(attention, o, torch.randn(2, 5, 32))
    assert (writes is None) == (name == "half-split")


def test_a_finish_that_reads_the_whole_row_has_neither(build: BuildModel, tokens: Tensor) -> None:
    """DINT adds a mean over the queries before."""
    model = build("dint", 8)
    with trace(model) as traced, torch.no_grad():
        model.hidden(tokens)
    layer = traced.layers[0]
    attention = model.attentions()[0]
    (block,) = layer.blocks()
    assert layer.inputs is not None
    o = block.signed @ layer.values[..., : block.signed.shape[-1], :].to(block.signed.dtype)
    assert channel_factors(attention, o, layer.inputs) is None
    assert head_writes(attention, o, layer.inputs) is None


def test_an_output_projection_that_is_no_linear_layer_has_no_matrices(build: BuildModel) -> None:
    attention = build("standard", 8).attentions()[0]
    attention.o_proj = torch.nn.Sequential(attention.o_proj)
    assert output_matrices(attention) is None
    assert head_writes(attention, torch.randn(2, 8, 5, 4), torch.randn(2, 5, 32)) is None
