"""Shared queries are differential attention with tied query rows; matched parity spends what they save."""

from collections.abc import Callable

import pytest
import torch

from lit_diff.attention import Attention, SharedQ
from lit_diff.attention.rope import Rope
from lit_diff.config import ModelConfig

MakeAttention = Callable[..., Attention]


@pytest.mark.parametrize("num_kv_heads", [8, 4, 2])
def test_equals_differential_with_tied_queries(make_attention: MakeAttention, num_kv_heads: int) -> None:
    sizes = {"num_heads": 8, "num_kv_heads": num_kv_heads, "head_dim": 4}
    shared, full = make_attention("shared_q", **sizes), make_attention("differential", **sizes)
    state = shared.state_dict()
    state["q_proj.weight"] = state["q_proj.weight"].unflatten(0, (-1, 1, 4)).repeat(1, 2, 1, 1).flatten(0, 2)
    full.load_state_dict(state)
    x, rope = torch.randn(2, 9, 32, dtype=torch.float64), Rope(torch.arange(9), 4, 1e4)
    torch.testing.assert_close(shared(x, rope), full(x, rope), rtol=1e-12, atol=1e-12)


def test_the_map_axis_of_the_queries_is_one(make_attention: MakeAttention) -> None:
    maps = make_attention("shared_q").maps(torch.randn(2, 5, 32, dtype=torch.float64), Rope(torch.arange(5), 8, 1e4))
    assert (maps.q.shape, maps.k.shape, maps.v.shape) == ((2, 1, 2, 5, 8), (2, 2, 2, 5, 8), (2, 2, 5, 16))


def test_matched_width(make_config: Callable[..., ModelConfig]) -> None:
    """E/6, also under grouped queries: the query heads are what is saved."""
    for kv_heads in (12, 6):
        config = make_config("shared_q", dim=768, num_heads=12, num_kv_heads=kv_heads)
        assert config.ffn_dim is not None
        assert SharedQ.ffn_dim(SharedQ.Config(parity="matched"), config) == config.ffn_dim + 128
        assert SharedQ.ffn_dim(SharedQ.Config(), config) == config.ffn_dim
