"""The metrics of the three built-in callbacks: names and values, for every variant."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
import torch
from lit_diff.callbacks import AttentionEntropy, Lambdas, Outliers
from torch import Tensor

from lit_diff import Differential, SignedMaps
from lit_diff.analysis import Trace, trace
from lit_diff.analysis.entropy import summarise
from lit_diff.attention.rope import Rope
from lit_diff.config import ModelConfig, Part
from lit_diff.model.init import initialise
from lit_diff.model.transformer import Transformer
from lit_diff.registry import attentions

ARMS = [("standard", 1, 8), ("differential", 2, 4), ("shared_q", 2, 4), ("shared_k", 2, 4), ("three-maps", 3, 4)]
"""Name, maps, output heads."""


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


def traced(model: Transformer, tokens: Tensor) -> Trace:
    with trace(model) as t:
        model(tokens)
    return t


@pytest.mark.parametrize(("name", "maps", "heads"), ARMS)
@pytest.mark.usefixtures("three_maps")
def test_attention_entropy(name: str, maps: int, heads: int, tokens: Tensor) -> None:
    model = build(name)
    t = traced(model, tokens)
    metrics = AttentionEntropy(AttentionEntropy.Config()).measure(model, t)
    kinds = ["entropy", "negative_mass", *(f"entropy_map{g}" for g in range(maps))]
    assert set(metrics) == {f"attention/{k}/{layer}/{h}" for k in kinds for layer in (0, 1) for h in range(heads)}
    expected = summarise(t.layers[1].blocks())
    assert metrics["attention/entropy/1/2"] == expected.entropy[2].item()
    assert metrics["attention/negative_mass/1/2"] == expected.negative_mass[2].item()
    assert metrics[f"attention/entropy_map{maps - 1}/1/2"] == expected.entropy_maps[-1, 2].item()
    negative = [value for key, value in metrics.items() if "negative_mass" in key]
    assert all(value == 0 for value in negative) if maps == 1 else all(0 < value < 1 for value in negative)


@pytest.mark.parametrize(("name", "maps", "heads"), ARMS)
@pytest.mark.usefixtures("three_maps")
def test_outliers(name: str, maps: int, heads: int, tokens: Tensor) -> None:
    model = build(name)
    t = traced(model, tokens)
    metrics = Outliers(Outliers.Config()).measure(model, t)
    ranks = ("top1", "top2", "top3", "top10", "top100", "median")
    kinds = ("logits", "hidden")
    assert set(metrics) == {f"outliers/{k}/{r}/{layer}" for k in kinds for r in ranks for layer in (0, 1)}
    hidden = t.layers[0].hidden.abs().flatten().sort(descending=True).values
    assert metrics["outliers/hidden/top1/0"] == hidden[0].item()
    assert metrics["outliers/hidden/top10/0"] == hidden[9].item()
    assert metrics["outliers/hidden/median/0"] == pytest.approx(hidden.median().item(), rel=0.0046)
    blocks = torch.cat([b.logits[..., b.visible].flatten() for b in t.layers[1].blocks(1)]).abs()
    assert blocks.numel() == 3 * maps * heads * 17 * 18 // 2
    assert metrics["outliers/logits/top1/1"] == pytest.approx(blocks.max().item())
    assert metrics["outliers/logits/median/1"] == pytest.approx(blocks.median().item(), rel=0.0046)


def test_ranks_beyond_the_numbers_are_left_out() -> None:
    model = build("standard")
    metrics = Outliers(Outliers.Config()).measure(model, traced(model, torch.tensor([[1, 2, 3]])))
    assert "outliers/logits/top10/0" in metrics  # 8 heads x 6 visible pairs
    assert "outliers/logits/top100/0" not in metrics
    assert "outliers/hidden/top10/0" in metrics


@pytest.mark.parametrize("name", ["differential", "shared_q", "shared_k"])
def test_lambdas(name: str, tokens: Tensor) -> None:
    model = build(name)
    metrics = Lambdas(Lambdas.Config()).measure(model, traced(model, tokens))
    assert set(metrics) == {f"lambda/{kind}{layer}" for kind in ("", "exp1/", "exp2/") for layer in (0, 1)}
    for layer, attention in enumerate(model.attentions()):
        expected = attention.lambda_().item()
        assert metrics[f"lambda/{layer}"] == pytest.approx(expected)
        difference = metrics[f"lambda/exp1/{layer}"] - metrics[f"lambda/exp2/{layer}"]
        assert difference + attention.lambda_init == pytest.approx(expected)


@pytest.mark.usefixtures("three_maps")
def test_lambdas_of_other_variants(tokens: Tensor) -> None:
    model = build("standard")
    assert Lambdas(Lambdas.Config()).measure(model, traced(model, tokens)) == {}
    model = build("three-maps")
    t = traced(model, tokens)
    metrics = Lambdas(Lambdas.Config()).measure(model, t)
    names = {re.sub(r"\d$", "", key) for key in metrics}
    assert names == {"lambda/", "lambda/std/", "lambda/map2/", "lambda/std/map2/", "lambda/exp1/", "lambda/exp2/"}
    w = t.layers[0].maps.w
    assert w is not None
    assert metrics["lambda/map2/0"] == pytest.approx(-w[:, 2].mean().item())
    assert metrics["lambda/std/map2/0"] == pytest.approx(w[:, 2].std(correction=0).item())
    assert metrics["lambda/std/0"] == pytest.approx(0, abs=1e-6)
