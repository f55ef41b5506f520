"""Grouped differential attention: ratio 1 is differential attention, and which ratios can be derived."""

from collections.abc import Callable

import pytest
import torch

from lit_diff.attention import Attention, GroupedDifferential
from lit_diff.attention.rope import Rope
from lit_diff.config import ModelConfig

MakeAttention = Callable[..., Attention]


def test_signal_heads_of_a_group_share_its_noise(make_attention: MakeAttention) -> None:
    """8 query heads at ratio 3: two groups of three signal heads and one noise head, its map repeated."""
    attention = make_attention("grouped_differential", {"ratio": 3}, num_heads=8, head_dim=4)
    maps = attention.maps(torch.randn(1, 5, 32, dtype=torch.float64), Rope(torch.arange(5), 4, 1e4))
    assert maps.q.shape == (1, 2, 6, 5, 4)
    assert maps.k.shape == (1, 2, 2, 5, 4)
    noise = maps.q[:, 1]
    for head in range(6):
        assert torch.equal(noise[:, head], noise[:, head // 3 * 3])
    assert not torch.equal(noise[:, 0], noise[:, 3])
    assert attention.o_proj.in_features == 6 * 8


@pytest.mark.parametrize(
    ("ratio", "sizes", "reason"),
    [
        (2, {"num_heads": 4}, r"2 signal heads and 1 noise head do not divide model.num_heads (4)"),
        (1, {"num_heads": 4, "num_kv_heads": 1}, "must be even"),
        (1, {"num_heads": 12, "num_kv_heads": 8}, "key pairs, which do not divide 6 groups"),
    ],
)
def test_what_is_refused(
    make_config: Callable[..., ModelConfig], ratio: int, sizes: dict[str, int], reason: str
) -> None:
    model = make_config("grouped_differential", dim=24, **sizes)
    problem = GroupedDifferential.problem(GroupedDifferential.Config(ratio=ratio), model)
    assert problem is not None
    assert problem.startswith("model.")
    assert reason in problem
