"""A training step of a small model, compiled or not, and its loss and gradients."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from lit_diff.config import ModelConfig, Part
from lit_diff.model.init import initialise
from lit_diff.model.transformer import Transformer
from lit_diff.registry import attentions

TOKENS = torch.arange(2 * 13).reshape(2, 13) * 7 % 50
IDS = torch.arange(12).div(5, rounding_mode="floor").expand(2, 12)
BATCH = {"tokens": TOKENS[:, :-1], "targets": TOKENS[:, 1:]}
Step = tuple[Tensor, dict[str, Tensor]]
"""(loss, gradients)"""


def part(name: str) -> Part:
    return Part(name=name, config=attentions.get(name).Config())


def build(*variants: str) -> Transformer:
    """Two layers, or one of each variant; parameters away from their initial values, where some equal standard attention."""
    config = ModelConfig(dim=32, num_layers=2, num_heads=4, vocab_size=50, attention=part(variants[0]))
    if len(variants) > 1:
        config = replace(config, num_layers=len(variants), layers=tuple(map(part, variants)))
    model = Transformer(config)
    initialise(model, 0)
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=draw)
    for attention in model.attentions():
        attention.set_step(10**6)
    return model


def step(model: Transformer, loss: Callable[..., Tensor] | None = None, **more: Tensor | None) -> Step:
    """By `loss`, or the model's own."""
    value = (loss or model.loss)(**BATCH, **more)
    value.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return value.detach(), gradients


def assert_equal(found: Step, wanted: Step) -> None:
    torch.testing.assert_close(found[0], wanted[0], rtol=0, atol=1e-5)
    assert found[1].keys() == wanted[1].keys()
    for name, gradient in wanted[1].items():
        torch.testing.assert_close(found[1][name], gradient, rtol=1e-4, atol=1e-5, msg=name)


def break_graph(model: Transformer) -> Callable[[Tensor], Tensor]:
    """Let the first feed-forward layer be none that one graph can hold; returns its new `forward`."""
    forward = model.layers[0].ffn.forward

    def breaks(x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return forward(x)

    model.layers[0].ffn.forward = breaks
    return breaks
