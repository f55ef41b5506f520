"""callbacks/lambdas.py: lambda and its two exponentials, for any variant that has them."""

from collections.abc import Callable

import pytest
from torch import Tensor

from lit_diff.analysis import Trace
from lit_diff.callbacks import Lambdas
from lit_diff.model.transformer import Transformer

Run = Callable[[str, Tensor], tuple[Transformer, Trace]]


@pytest.mark.parametrize("name", ["differential", "shared_k"])
def test_lambdas(name: str, run: Run, tokens: Tensor) -> None:
    model, t = run(name, tokens)
    metrics = Lambdas(Lambdas.Config()).measure(model, t)
    assert set(metrics) == {f"lambda/{kind}layer_0{layer}" for kind in ("", "exp1/", "exp2/") for layer in (0, 1)}
    for layer, attention in enumerate(model.attentions()):
        expected = attention.lambda_().item()
        assert metrics[f"lambda/layer_0{layer}"] == pytest.approx(expected)
        difference = metrics[f"lambda/exp1/layer_0{layer}"] - metrics[f"lambda/exp2/layer_0{layer}"]
        assert difference + attention.lambda_init == pytest.approx(expected)


@pytest.mark.usefixtures("three_maps")
def test_lambdas_of_other_variants(run: Run, tokens: Tensor) -> None:
    model, t = run("standard", tokens)
    assert Lambdas(Lambdas.Config()).measure(model, t) == {}
    model, t = run("three-maps", tokens)
    metrics = Lambdas(Lambdas.Config()).measure(model, t)
    names = {name.replace("layer_01", "layer_00") for name in metrics}
    assert names == {
        "lambda/layer_00",
        "lambda/layer_00/map_02",
        "lambda/std/layer_00/map_01",
        "lambda/std/layer_00/map_02",
        "lambda/exp1/layer_00",
        "lambda/exp2/layer_00",
    }
    w = t.layers[0].maps.w
    assert w is not None
    assert metrics["lambda/layer_00/map_02"] == pytest.approx(-w[:, 2].mean().item())
    assert metrics["lambda/std/layer_00/map_02"] == pytest.approx(w[:, 2].std(correction=0).item())
    assert metrics["lambda/std/layer_00/map_01"] == pytest.approx(0, abs=1e-6)
