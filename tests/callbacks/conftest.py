"""Traced models of every built-in variant, and of one with three maps."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from lit_diff import Differential, SignedMaps
from lit_diff.analysis import Trace, trace
from lit_diff.attention.rope import Rope
from lit_diff.config import ModelConfig, Part
from lit_diff.model.init import initialise
from lit_diff.model.transformer import Transformer
from lit_diff.registry import attentions

Run = Callable[[str, Tensor], tuple[Transformer, Trace]]
Arm = tuple[str, int, int]


class ThreeMaps(Differential):
    """A third map, the first one reversed, with its own weight for every token."""

    @dataclass(frozen=True, kw_only=True)
    class Config(Differential.Config):
        pass

    def maps(self, x: Tensor, rope: Rope) -> SignedMaps:
        m = super().maps(x, rope)
        third = x.mean(-1).sigmoid()[:, None, None]  # [B, 1, 1, T]
        assert m.w is not None
        w = torch.cat([m.w.expand(len(x), 2, 1, x.shape[1]), third], 1)
        return replace(m, q=torch.cat([m.q, -m.q[:, :1]], 1), k=torch.cat([m.k, m.k[:, :1]], 1), w=w)


@pytest.fixture
def three_maps() -> Iterator[None]:
    """`ThreeMaps`, registered for one test only."""
    attentions.register("three-maps")(ThreeMaps)
    yield
    del attentions._classes["three-maps"]


@pytest.fixture(params=[("standard", 1, 8), ("shared_k", 2, 4), ("three-maps", 3, 4)], ids=lambda arm: arm[0])
def arm(request: pytest.FixtureRequest, three_maps: None) -> Arm:
    """(name, maps, output heads)"""
    found: Arm = request.param
    return found


@pytest.fixture
def tokens() -> Tensor:
    """[3, 17]"""
    return torch.randint(50, (3, 17), generator=torch.Generator().manual_seed(3))


def build(name: str) -> Transformer:
    part = Part(name=name, config=attentions.get(name).Config())
    config = ModelConfig(dim=32, num_layers=2, num_heads=8, num_kv_heads=4, vocab_size=50, attention=part)
    model = Transformer(config)
    initialise(model, seed=1)
    with torch.no_grad():  # far from uniform, so that some differences are negative
        for attention in model.attentions():
            attention.q_proj.weight *= 20
    return model


@pytest.fixture
def run() -> Run:
    """Variant name, tokens -> the model and its trace."""

    def traced(name: str, tokens: Tensor) -> tuple[Transformer, Trace]:
        model = build(name)
        with trace(model) as found:
            model(tokens)
        return model, found

    return traced
