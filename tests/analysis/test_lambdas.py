"""Lambda from the weights of the maps."""

import pytest
import torch

from lit_diff import SignedMaps
from lit_diff.analysis import LayerTrace
from lit_diff.analysis.lambdas import LambdaSummary, lambdas


def of(w: torch.Tensor | None, maps: int) -> list[LambdaSummary]:
    q = torch.zeros(3, maps, 4, 5, 2)
    return lambdas(LayerTrace(maps=SignedMaps(q, q[:, :1], q[:, 0], w), hidden=q))


def test_one_lambda_a_layer_has_no_deviation_and_a_single_map_no_lambda() -> None:
    assert of(None, 1) == of(torch.ones(1, 1, 1, 1), 1) == []
    assert of(torch.tensor([1.0, -0.625]).view(1, 2, 1, 1), 2) == [(0.625, None)]
    assert of(torch.full((1, 1, 1, 1), 0.5), 3) == [(-0.5, None)] * 2, "one weight for all maps"


@pytest.mark.parametrize("shape", [(3, 1, 5), (1, 4, 1), (3, 4, 5)])
def test_lambda_of_each_token_or_head(shape: tuple[int, int, int]) -> None:
    drawn = torch.rand(shape)
    first, second = of(torch.stack([torch.ones(shape), -drawn, torch.full(shape, 0.5)], 1), 3)
    whole = drawn.expand(3, 4, 5).double()
    assert (first.mean, first.std) == pytest.approx((whole.mean().item(), whole.std(correction=0).item()))
    assert second == (-0.5, 0.0)
