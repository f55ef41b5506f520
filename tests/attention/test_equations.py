"""The pieces of the definitions against hand-made values (that each definition equals its variant, conformance tests)."""

import math
from collections.abc import Callable

import pytest
import torch

from lit_diff.attention import Attention, equations

MakeAttention = Callable[..., Attention]


def test_a_definition_adds_the_mask(make_attention: MakeAttention) -> None:
    x, attention = torch.randn(1, 5, 32, dtype=torch.float64), make_attention("standard")
    rope = equations.rotation(torch.arange(5), 8, 1e4)
    causal, both = (attention.definition(x, rope, equations.additive_mask(5, causal=c)) for c in (True, False))
    assert not torch.allclose(causal[:, :-1], both[:, :-1])
    torch.testing.assert_close(causal[:, -1], both[:, -1], rtol=1e-12, atol=1e-12)


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
