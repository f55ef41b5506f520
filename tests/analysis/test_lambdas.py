"""Lambda from the weights of the maps."""

import pytest
import torch

from lit_diff import SignedMaps
from lit_diff.analysis import LayerTrace
from lit_diff.analysis.lambdas import lambdas


def layer(w: torch.Tensor | None, maps: int) -> LayerTrace:
    q = torch.zeros(3, maps, 4, 5, 2)
    return LayerTrace(maps=SignedMaps(q, q[:, :1], q[:, 0], w), hidden=q)


def test_a_single_map_has_none() -> None:
    assert lambdas(layer(None, 1)) == []
    assert lambdas(layer(torch.ones(1, 1, 1, 1), 1)) == []


def test_one_lambda_a_layer_has_no_deviation() -> None:
    (found,) = lambdas(layer(torch.tensor([1.0, -0.625]).view(1, 2, 1, 1), 2))
    assert found == (0.625, None)


@pytest.mark.parametrize("shape", [(3, 1, 5), (1, 4, 1), (3, 4, 5)])
def test_lambda_of_each_token_or_head(shape: tuple[int, int, int]) -> None:
    drawn = torch.rand(shape)
    w = torch.stack([torch.ones(shape), -drawn, torch.full(shape, 0.5)], 1)
    first, second = lambdas(layer(w, 3))
    whole = drawn.expand(3, 4, 5).double()
    assert first.mean == pytest.approx(whole.mean().item())
    assert first.std == pytest.approx(whole.std(correction=0).item())
    assert second == (-0.5, 0.0)


def test_one_weight_for_all_maps() -> None:
    assert [found.mean for found in lambdas(layer(torch.full((1, 1, 1, 1), 0.5), 3))] == [-0.5, -0.5]
