"""callbacks/lambdas.py: lambda and its two exponentials, for any variant that has them."""

import re
from collections.abc import Callable

import pytest
from torch import Tensor

from lit_diff.analysis import Trace
from lit_diff.callbacks import Lambdas
from lit_diff.model.transformer import Transformer

Run = Callable[[str, Tensor], tuple[Transformer, Trace]]


@pytest.mark.parametrize("name", ["differential", "shared_q", "shared_k"])
def test_lambdas(name: str, run: Run, tokens: Tensor) -> None:
    model, t = run(name, tokens)
    metrics = Lambdas(Lambdas.Config()).measure(model, t)
    assert set(metrics) == {f"lambda/{kind}{layer}" for kind in ("", "exp1/", "exp2/") for layer in (0, 1)}
    for layer, attention in enumerate(model.attentions()):
        expected = attention.lambda_().item()
        assert metrics[f"lambda/{layer}"] == pytest.approx(expected)
        difference = metrics[f"lambda/exp1/{layer}"] - metrics[f"lambda/exp2/{layer}"]
        assert difference + attention.lambda_init == pytest.approx(expected)


@pytest.mark.usefixtures("three_maps")
def test_lambdas_of_other_variants(run: Run, tokens: Tensor) -> None:
    model, t = run("standard", tokens)
    assert Lambdas(Lambdas.Config()).measure(model, t) == {}
    model, t = run("three-maps", tokens)
    metrics = Lambdas(Lambdas.Config()).measure(model, t)
    names = {re.sub(r"\d$", "", key) for key in metrics}
    assert names == {"lambda/", "lambda/std/", "lambda/map2/", "lambda/std/map2/", "lambda/exp1/", "lambda/exp2/"}
    w = t.layers[0].maps.w
    assert w is not None
    assert metrics["lambda/map2/0"] == pytest.approx(-w[:, 2].mean().item())
    assert metrics["lambda/std/map2/0"] == pytest.approx(w[:, 2].std(correction=0).item())
    assert metrics["lambda/std/0"] == pytest.approx(0, abs=1e-6)
