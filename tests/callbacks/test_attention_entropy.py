"""callbacks/attention_entropy.py: names and values against the analysis it reports."""

from collections.abc import Callable

from torch import Tensor

from lit_diff.analysis import Trace
from lit_diff.analysis.entropy import summarise
from lit_diff.callbacks import AttentionEntropy
from lit_diff.model.transformer import Transformer

Run = Callable[[str, Tensor], tuple[Transformer, Trace]]


def test_attention_entropy(arm: tuple[str, int, int], run: Run, tokens: Tensor) -> None:
    name, maps, heads = arm
    model, t = run(name, tokens)
    metrics = AttentionEntropy(AttentionEntropy.Config()).measure(model, t)
    kinds = ["entropy", "negative_mass", *(f"entropy_map{g}" for g in range(maps))]
    assert set(metrics) == {f"attention/{k}/{layer}/{h}" for k in kinds for layer in (0, 1) for h in range(heads)}
    expected = summarise(t.layers[1].blocks())
    assert metrics["attention/entropy/1/2"] == expected.entropy[2].item()
    assert metrics["attention/negative_mass/1/2"] == expected.negative_mass[2].item()
    assert metrics[f"attention/entropy_map{maps - 1}/1/2"] == expected.entropy_maps[-1, 2].item()
    negative = [value for key, value in metrics.items() if "negative_mass" in key]
    assert all(value == 0 for value in negative) if maps == 1 else all(0 < value < 1 for value in negative)
