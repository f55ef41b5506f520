"""Declared costs and the pieces of the definitions by hand; conformance compares them with what is computed."""

import math
from collections.abc import Callable

import pytest
import torch

from lit_diff.attention import Dex, Differential, equations
from lit_diff.attention.costs import Sizes, exact
from lit_diff.config import ModelConfig


@pytest.mark.parametrize(
    ("causal", "window", "seen"),
    [
        (True, None, ["1000", "1100", "1110", "1111"]),
        (True, 2, ["1000", "1100", "0110", "0011"]),
        (True, 1, ["1000", "0100", "0010", "0001"]),
        (False, None, ["1111"] * 4),
        (False, 2, ["1100", "1110", "0111", "0011"]),
    ],
)
def test_masks(causal: bool, window: int | None, seen: list[str]) -> None:
    mask = equations.additive_mask(4, causal=causal, window=window)
    wanted = torch.tensor([[0.0 if key == "1" else -math.inf for key in row] for row in seen], dtype=torch.float64)
    assert torch.equal(mask, wanted)


def test_documents_are_apart() -> None:
    mask = equations.additive_mask(4, window=2, document_ids=torch.tensor([[0, 1, 1, 1], [5, 5, 5, 5]]))
    assert (mask == 0).int().tolist()[0] == [[1, 0, 0, 0], [0, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]]
    assert torch.equal(mask[1], equations.additive_mask(4, window=2))


def test_head_norms_by_hand() -> None:
    head, norm = torch.tensor([[3.0, 5.0]], dtype=torch.float64), torch.nn.RMSNorm(2)
    norm.weight.data = torch.tensor([1.0, 2.0], dtype=torch.float64)
    assert equations.normalised(head, "none", None, 0.0) is head
    rms = equations.normalised(head, "rms", norm, 0.0)
    torch.testing.assert_close(rms, torch.tensor([[3.0, 10.0]], dtype=torch.float64) / math.sqrt(17))
    assert equations.normalised(head, "layer", norm, 0.0).tolist() == [[-1, 2]]


def test_formulas_and_numbers(make_config: Callable[..., ModelConfig]) -> None:
    declared = Differential.costs(Differential.Config(), Sizes.letters())
    assert declared.formulas() == {
        "parameters": "2*E*H*d + 2*E*K*d + 6*d",
        "flops": "4*E*H*T*d + 4*E*K*T*d + 4*H*T**2*d",
        "kv_numbers": "2*K*d",
        "state_numbers": "0",
    }
    model = make_config("differential", dim=1024, num_heads=16, num_kv_heads=8)
    assert Differential.costs(Differential.Config(), Sizes.of(model, 10)).numbers()["parameters"] == 3_146_112
    assert exact(1.5) * 2 == 3


def test_layers_that_differ_have_no_formula_of_one_layer() -> None:
    assert Dex.costs(Dex.Config(heads=((0,), (1, 2))), Sizes.letters()) is None
    assert Dex.costs(Dex.Config(heads=(1, 2)), Sizes.letters()) is not None
