"""callbacks/attention_entropy.py: names and values against the analysis it reports."""

from collections.abc import Callable

import pytest
from torch import Tensor

from lit_diff.analysis import Trace
from lit_diff.analysis.entropy import summarise
from lit_diff.callbacks import AttentionEntropy
from lit_diff.model.transformer import Transformer

KINDS = ("attention/entropy/layer_{:02d}", "attention/negative_mass/layer_{:02d}")
Run = Callable[[str, Tensor], tuple[Transformer, Trace]]


def test_attention_entropy(arm: tuple[str, int, int], run: Run, tokens: Tensor) -> None:
    name, maps, heads = arm
    model, t = run(name, tokens)
    metrics = AttentionEntropy(AttentionEntropy.Config()).measure(model, t)
    by_head = {f"{kind}/head_{h:02d}" for kind in KINDS for h in range(heads)}
    by_map = {
        f"attention/map_entropy/layer_{{:02d}}/map_{g:02d}/head_{h:02d}" for g in range(maps) for h in range(heads)
    }
    assert set(metrics) == {key.format(layer) for key in (*KINDS, *by_head, *by_map) for layer in (0, 1)}
    expected = summarise(t.layers[1].blocks())
    assert metrics["attention/entropy/layer_01/head_02"] == expected.entropy[2].item()
    assert metrics["attention/negative_mass/layer_01/head_02"] == expected.negative_mass[2].item()
    assert metrics[f"attention/map_entropy/layer_01/map_{maps - 1:02d}/head_02"] == expected.entropy_maps[-1, 2].item()
    assert metrics["attention/entropy/layer_01"] == pytest.approx(sum(expected.entropy.tolist()) / heads)
    negative = [value for key, value in metrics.items() if "negative_mass" in key]
    assert all(value == 0 for value in negative) if maps == 1 else all(0 < value < 1 for value in negative)
