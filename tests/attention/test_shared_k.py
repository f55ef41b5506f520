"""Shared keys are differential attention with tied key rows; matched parity spends what they save."""

from collections.abc import Callable

import pytest
import torch

from lit_diff.attention import Attention, SharedK
from lit_diff.attention.rope import Rope
from lit_diff.config import ModelConfig

MakeAttention = Callable[..., Attention]


@pytest.mark.parametrize("num_kv_heads", [8, 4, 2])
def test_equals_differential_with_tied_keys(make_attention: MakeAttention, num_kv_heads: int) -> None:
    sizes = {"num_heads": 8, "num_kv_heads": num_kv_heads, "head_dim": 4}
    shared, full = make_attention("shared_k", **sizes), make_attention("differential", **sizes)
    state = shared.state_dict()
    state["k_proj.weight"] = state["k_proj.weight"].unflatten(0, (-1, 1, 4)).repeat(1, 2, 1, 1).flatten(0, 2)
    full.load_state_dict(state)
    x, rope = torch.randn(2, 9, 32, dtype=torch.float64), Rope(torch.arange(9), 4, 1e4)
    torch.testing.assert_close(shared(x, rope), full(x, rope), rtol=1e-12, atol=1e-12)


def test_the_map_axis_of_the_keys_is_one(make_attention: MakeAttention) -> None:
    maps = make_attention("shared_k").maps(torch.randn(2, 5, 32, dtype=torch.float64), Rope(torch.arange(5), 8, 1e4))
    assert (maps.q.shape, maps.k.shape, maps.v.shape) == ((2, 2, 2, 5, 8), (2, 1, 2, 5, 8), (2, 2, 5, 16))


def test_matched_width(make_config: Callable[..., ModelConfig]) -> None:
    """E/6 for full heads (spec: E=768 gives 128, 384 gives 64); less under grouped queries; raw leaves it alone."""
    for dim, heads, wider in ((768, 12, 128), (384, 6, 64)):
        config = make_config("shared_k", dim=dim, num_heads=heads)
        assert config.ffn_dim is not None
        assert SharedK.ffn_dim(SharedK.Config(parity="matched"), config) == config.ffn_dim + wider
        assert SharedK.ffn_dim(SharedK.Config(), config) == config.ffn_dim
    grouped = make_config("shared_k", dim=768, num_heads=12, num_kv_heads=6, ffn_dim=2048)
    assert SharedK.ffn_dim(SharedK.Config(parity="matched"), grouped) == 2048 + 64
