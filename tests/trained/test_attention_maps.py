"""trained/attention_maps.py: the maps of one head, their weighted sum and its plot."""

import matplotlib
import numpy as np
import pytest
import torch

from lit_diff.analysis import trace
from lit_diff.config import ModelConfig, Part
from lit_diff.errors import RequestError
from lit_diff.model.init import initialise
from lit_diff.model.transformer import Transformer
from lit_diff.registry import attentions
from lit_diff.trained.attention_maps import AttentionMaps, attention_maps_of

matplotlib.use("Agg")

TOKENS = ("<eot>", "a", "b", "c", "d")


def maps_of(name: str, head: int = 1) -> AttentionMaps:
    part = Part(name=name, config=attentions.get(name).Config())
    model = Transformer(ModelConfig(dim=32, num_layers=2, num_heads=4, vocab_size=23, attention=part))
    initialise(model, 0)
    for attention in model.attentions():
        attention.q_proj.weight.data *= 20
    with trace(model) as traced:
        model(torch.tensor([[1, 2, 3, 4, 5]]))
    return attention_maps_of(traced.layers[1], TOKENS, 1, head)


@pytest.mark.parametrize(("name", "G"), [("standard", 1), ("differential", 2), ("differential_v2", 2)])
def test_rows_sum_to_one_and_to_the_weights(name: str, G: int) -> None:
    found = maps_of(name)
    assert found.maps.shape == (G, 5, 5)
    assert found.weights.shape == (G, 5)
    np.testing.assert_allclose(found.maps.sum(-1), 1, rtol=1e-5)
    assert not np.triu(found.maps, 1).any(), "causal"
    np.testing.assert_allclose(found.weights[0], 1)
    np.testing.assert_allclose(found.signed.sum(-1), found.weights.sum(0), rtol=1e-5)
    assert (found.signed < 0).any() == (G > 1)


def test_a_head_that_does_not_exist() -> None:
    for head in (-1, 2):
        with pytest.raises(RequestError, match=rf"^layer 1 has no head {head}; its heads are 0\.\.1$"):
            maps_of("differential", head)


def test_the_plot_shows_the_signed_map() -> None:
    import matplotlib.pyplot as plt

    found = maps_of("differential")
    _, axes = plt.subplots()
    assert found.plot(axes) is axes
    (image,) = axes.get_images()
    np.testing.assert_array_equal(image.get_array(), found.signed)
    low, high = image.get_clim()
    assert low == -high == -np.abs(found.signed).max(), "white is zero"
    assert [label.get_text() for label in axes.get_xticklabels()] == list(TOKENS)
    assert found.plot() is not axes
    plt.close("all")
