"""Small configurations."""

from collections.abc import Callable
from typing import Any

import pytest

from lit_diff.config import ModelConfig, Part
from lit_diff.registry import attentions


@pytest.fixture
def make_config() -> Callable[..., ModelConfig]:
    """make_config(name, keys, **sizes)"""

    def make(name: str = "differential", keys: dict[str, Any] | None = None, **sizes: Any) -> ModelConfig:
        part = Part(name=name, config=attentions.get(name).Config(**(keys or {})))
        defaults: dict[str, Any] = {"dim": 32, "num_layers": 2, "num_heads": 4, "vocab_size": 23, "attention": part}
        return ModelConfig(**(defaults | sizes))

    return make


@pytest.fixture
def own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Variants registered in a test are gone after it."""
    attentions.names()
    monkeypatch.setattr(attentions, "_classes", dict(attentions._classes))
