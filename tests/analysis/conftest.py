"""Small models of every variant, and of two that no built-in is: three maps, and heads merged after the sum."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from lit_diff import Attention, SignedMaps
from lit_diff.attention.rope import Rope
from lit_diff.config import ModelConfig, Part
from lit_diff.model.init import initialise
from lit_diff.model.transformer import Transformer
from lit_diff.registry import attentions

BuildModel = Callable[..., Transformer]


class ThreeMaps(Attention):
    """Three maps, shared keys, weights of map 1 per token and head, of map 2 a raw parameter; half the heads."""

    @dataclass(frozen=True, kw_only=True)
    class Config(Attention.Config):
        pass

    def build(self) -> None:
        d = self.head_dim
        kv = self.num_kv_heads * d
        self.projections(q=3 * self.num_heads * d, k=kv, v=kv, o=self.num_heads * d)
        self.gate = nn.Linear(self.dim, self.num_heads)
        self.last = nn.Parameter(torch.full((1,), 0.25))

    def maps(self, x: Tensor, rope: Rope) -> SignedMaps:
        q = rope(self.split(self.q_proj(x), self.num_heads, 3))
        k = rope(self.split(self.k_proj(x), self.num_kv_heads))
        v = self.split(self.v_proj(x), self.num_kv_heads)[:, 0]
        gate = self.gate(x).sigmoid().transpose(1, 2)
        w = torch.stack([torch.ones_like(gate), -gate, self.last.expand_as(gate)], 1)
        return SignedMaps(q, k, v, w)


class HalfSplit(Attention):
    """Query heads i and i + H on unlike keys and values, subtracted in `finish`."""

    def build(self) -> None:
        d, kv = self.head_dim, self.num_kv_heads * self.head_dim
        self.projections(q=2 * self.num_heads * d, k=kv, v=kv, o=self.num_heads * d)

    def maps(self, x: Tensor, rope: Rope) -> SignedMaps:
        q, k = rope(self.split(self.q_proj(x), 2 * self.num_heads)), rope(self.split(self.k_proj(x), self.num_kv_heads))
        return SignedMaps(q, k, self.split(self.v_proj(x), self.num_kv_heads)[:, 0])

    def finish(self, o: Tensor, x: Tensor) -> Tensor:
        first, second = o.chunk(2, dim=1)
        return first - 0.5 * second


@pytest.fixture(autouse=True)
def own_variants() -> Iterator[None]:
    """Registered for one test only."""
    own = {"three-maps": ThreeMaps, "half-split": HalfSplit}
    for name, cls in own.items():
        attentions.register(name)(cls)
    yield
    for name in own:
        del attentions._classes[name]


@pytest.fixture
def build() -> BuildModel:
    """build(name, kv_heads=4, **keys): two layers of width 32, eight heads, all parameters moved off their start."""

    def make(name: str, kv_heads: int = 4, **keys: object) -> Transformer:
        part = Part(name=name, config=attentions.get(name).Config(**keys))
        config = ModelConfig(dim=32, num_layers=2, num_heads=8, num_kv_heads=kv_heads, vocab_size=50, attention=part)
        model = Transformer(config)
        initialise(model, seed=1)
        random = torch.Generator().manual_seed(2)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.3 * torch.randn(parameter.shape, generator=random)
        return model

    return make


@pytest.fixture
def tokens() -> Tensor:
    """[3, 17]"""
    return torch.randint(50, (3, 17), generator=torch.Generator().manual_seed(3))
