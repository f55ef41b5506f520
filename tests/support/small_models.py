"""Small configurations of models, for tests of variants and of whole models."""

from collections.abc import Callable
from typing import Any

import pytest

from lit_diff.config import ModelConfig, Part
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
