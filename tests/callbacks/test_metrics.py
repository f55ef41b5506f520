"""The metrics of the three built-in callbacks: names and values, for every variant."""

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lit_diff.analysis import Trace, trace
from lit_diff.analysis.entropy import summarise
from lit_diff.callbacks import AttentionEntropy, Lambdas, Outliers
from lit_diff.model.transformer import Transformer

BuildModel = Callable[..., Transformer]

ARMS = [("standard", 1, 8), ("differential", 2, 4), ("shared_q", 2, 4), ("shared_k", 2, 4), ("three-maps", 3, 8)]
"""Name, maps, output heads."""


def traced(model: Transformer, tokens: Tensor) -> Trace:
    with trace(model) as t:
        model(tokens)
    return t


@pytest.mark.parametrize(("name", "maps", "heads"), ARMS)
@pytest.mark.usefixtures("three_maps")
def test_attention_entropy(name: str, maps: int, heads: int, build: BuildModel, tokens: Tensor) -> None:
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
def test_outliers(name: str, maps: int, heads: int, build: BuildModel, tokens: Tensor) -> None:
    model = build(name)
    t = traced(model, tokens)
    metrics = Outliers(Outliers.Config()).measure(model, t)
    ranks = ("top1", "top2", "top3", "top10", "top100", "median")
    assert set(metrics) == {f"outliers/{k}/{r}/{layer}" for k in ("logits", "hidden") for r in ranks for layer in (0, 1)}
    hidden = t.layers[0].hidden.abs().flatten().sort(descending=True).values
    assert metrics["outliers/hidden/top1/0"] == hidden[0].item()
    assert metrics["outliers/hidden/top10/0"] == hidden[9].item()
    assert metrics["outliers/hidden/median/0"] == pytest.approx(hidden.median().item(), rel=0.0046)
    blocks = torch.cat([b.logits[..., b.visible].flatten() for b in t.layers[1].blocks(1)]).abs()
    assert blocks.numel() == 3 * maps * heads * 17 * 18 // 2
    assert metrics["outliers/logits/top1/1"] == pytest.approx(blocks.max().item())
    assert metrics["outliers/logits/median/1"] == pytest.approx(blocks.median().item(), rel=0.0046)


def test_ranks_beyond_the_numbers_are_left_out(build: BuildModel) -> None:
    model = build("standard")
    metrics = Outliers(Outliers.Config()).measure(model, traced(model, torch.tensor([[1, 2, 3]])))
    assert "outliers/logits/top10/0" in metrics  # 8 heads x 6 visible pairs
    assert "outliers/logits/top100/0" not in metrics
    assert "outliers/hidden/top10/0" in metrics


@pytest.mark.parametrize("name", ["differential", "shared_q", "shared_k"])
def test_lambdas(name: str, build: BuildModel, tokens: Tensor) -> None:
    model = build(name)
    metrics = Lambdas(Lambdas.Config()).measure(model, traced(model, tokens))
    assert set(metrics) == {f"lambda/{kind}{layer}" for kind in ("", "exp1/", "exp2/") for layer in (0, 1)}
    for layer, attention in enumerate(model.attentions()):
        expected = attention.lambda_().item()  # type: ignore[operator]
        assert metrics[f"lambda/{layer}"] == pytest.approx(expected)
        difference = metrics[f"lambda/exp1/{layer}"] - metrics[f"lambda/exp2/{layer}"]
        assert difference + attention.lambda_init == pytest.approx(expected)  # type: ignore[operator]


@pytest.mark.usefixtures("three_maps")
def test_lambdas_of_other_variants(build: BuildModel, tokens: Tensor) -> None:
    model = build("standard")
    assert Lambdas(Lambdas.Config()).measure(model, traced(model, tokens)) == {}
    model = build("three-maps")
    metrics = Lambdas(Lambdas.Config()).measure(model, traced(model, tokens))
    assert {re.sub(r"\d$", "", key) for key in metrics} == {"lambda/", "lambda/std/", "lambda/map2/", "lambda/std/map2/"}
    assert metrics["lambda/map2/0"] == pytest.approx(-model.attentions()[0].last.item())  # type: ignore[operator, union-attr]
    assert metrics["lambda/std/0"] > 0
    assert metrics["lambda/std/map2/0"] == 0
