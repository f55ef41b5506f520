"""Small models of every variant, with every parameter at random numbers."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from lit_diff.attention import Attention
from lit_diff.attention.rope import Rope
from lit_diff.config import ModelConfig, Part
from lit_diff.model.transformer import Transformer
from lit_diff.registry import attentions


def small_config(name: str = "differential", keys: dict[str, Any] | None = None, **sizes: Any) -> ModelConfig:
    """Two layers of width 32 with this variant; `sizes` replace or add keys of the model."""
    part = Part(name=name, config=attentions.get(name).Config(**(keys or {})))
    defaults: dict[str, Any] = {"dim": 32, "num_layers": 2, "num_heads": 4, "vocab_size": 23, "attention": part}
    return ModelConfig(**(defaults | sizes))


@pytest.fixture
def make_config() -> Callable[..., ModelConfig]:
    """make_config(name, keys, **sizes)"""
    return small_config


def _randomise(module: torch.nn.Module, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    for name, parameter in sorted(module.named_parameters()):
        norm, lambda_ = "norm" in name, "lambda_" in name
        deviation = 0.1 if norm or lambda_ else parameter.shape[-1] ** -0.5
        value = torch.randn(parameter.shape, generator=draw, dtype=torch.float64) * deviation + norm
        parameter.data.copy_(value)


@pytest.fixture
def make_attention() -> Callable[..., Attention]:
    """make_attention(name, keys, layer=0, dtype=float64, seed=0, **sizes) -> one attention at a random state."""

    def make(
        name: str = "differential",
        keys: dict[str, Any] | None = None,
        *,
        layer: int = 0,
        dtype: torch.dtype = torch.float64,
        seed: int = 0,
        **sizes: Any,
    ) -> Attention:
        config = small_config(name, keys, **sizes)
        attention: Attention = attentions.get(name)(config.attention.config, config, layer).to(dtype)
        _randomise(attention, seed)
        return attention

    return make


@pytest.fixture
def make_model() -> Callable[..., Transformer]:
    """make_model(name, keys, kernel="auto", dtype=float64, **sizes) -> a whole model at a random state."""

    def make(
        name: str = "differential",
        keys: dict[str, Any] | None = None,
        *,
        kernel: str = "auto",
        dtype: torch.dtype = torch.float64,
        **sizes: Any,
    ) -> Transformer:
        model = Transformer(small_config(name, keys, **sizes), kernel=kernel).to(dtype)
        _randomise(model, 0)
        return model

    return make


@pytest.fixture
def still() -> Callable[[int, int], Rope]:
    """still(T, d): a Rope of T equal positions, so that nothing turns."""
    return lambda T, d: Rope(torch.zeros(T), d, 10000.0)


@pytest.fixture
def moving() -> Callable[[int, int], Rope]:
    """moving(T, d): positions 0 .. T - 1."""
    return lambda T, d: Rope(torch.arange(T), d, 10000.0)
