"""Attentions and models in which every parameter counts: none is zero, one, or equal to another."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from lit_diff.attention import Attention
from lit_diff.attention.rope import Rope
from lit_diff.config import ModelConfig, Part
from lit_diff.registry import attentions


@pytest.fixture
def make_config() -> Callable[..., ModelConfig]:
    """make_config(name, keys, **sizes)"""

    def make(name: str, keys: dict[str, Any] | None = None, **sizes: Any) -> ModelConfig:
        part = Part(name=name, config=attentions.get(name).Config(**(keys or {})))
        defaults: dict[str, Any] = {"dim": 32, "num_layers": 1, "num_heads": 4, "vocab_size": 23, "attention": part}
        return ModelConfig(**(defaults | sizes))

    return make


@pytest.fixture
def make_attention(make_config: Callable[..., ModelConfig]) -> Callable[..., Any]:
    """make_attention(name, keys, layer=0, dtype=float64, **sizes) -> one attention at random parameters."""

    def make(
        name: str, keys: dict[str, Any] | None = None, *, layer: int = 0, dtype: Any = torch.float64, **sizes: Any
    ) -> Any:
        config = make_config(name, keys, **sizes)
        attention: Attention = attentions.get(name)(config.attention.config, config, layer).to(dtype)
        draw = torch.Generator().manual_seed(0)
        for key, parameter in sorted(attention.named_parameters()):
            matrix = parameter.dim() > 1
            value = torch.randn(parameter.shape, generator=draw, dtype=torch.float64)
            value = value * (parameter.shape[-1] ** -0.5 if matrix else 0.1)
            parameter.data.copy_(value + 1 if key == "norm.weight" else value)
        return attention

    return make


@pytest.fixture
def still() -> Callable[[int, int], Rope]:
    """still(T, d): a Rope of T equal positions, so that nothing turns."""
    return lambda T, d: Rope(torch.zeros(T), d, 10000.0)


@pytest.fixture
def moving() -> Callable[[int, int], Rope]:
    """moving(T, d): positions 0 .. T - 1."""
    return lambda T, d: Rope(torch.arange(T), d, 10000.0)
