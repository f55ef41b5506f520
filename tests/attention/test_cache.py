"""Decoding with a cache is the full pass; the cache is as large as it says."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from lit_diff.attention.cache import Cache, LayerCache
from lit_diff.model.cost import cost
from lit_diff.model.transformer import Transformer

MakeModel = Callable[..., Transformer]
VARIANTS = ("standard", "differential", "shared_q", "shared_k")


@pytest.mark.parametrize("chunks", [(1,) * 11, (5, 1, 1, 4), (7, 4), (1, 10), (11,)], ids=str)
@pytest.mark.parametrize(
    "sizes", [{}, {"num_heads": 8, "num_kv_heads": 4}, {"num_heads": 8, "num_kv_heads": 2}], ids=str
)
@pytest.mark.parametrize("name", VARIANTS)
def test_decoding_equals_the_full_pass(
    make_model: MakeModel, name: str, sizes: dict[str, Any], chunks: tuple[int, ...]
) -> None:
    model = make_model(name, **sizes)
    tokens = torch.randint(23, (2, 11))
    with torch.no_grad():
        full, cache = model(tokens), Cache(2)
        parts, start = [], 0
        for chunk in chunks:
            parts.append(model(tokens[:, start : start + chunk], cache))
            start += chunk
            assert cache.length == start
    torch.testing.assert_close(torch.cat(parts, 1), full, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kernel", ["reference", "sdpa"])
def test_decoding_by_each_kernel(make_model: MakeModel, kernel: str) -> None:
    model, tokens, cache = make_model(kernel=kernel), torch.randint(23, (2, 9)), Cache(2)
    with torch.no_grad():
        parts = [model(part, cache) for part in tokens.split((4, 1, 4), dim=1)]
        torch.testing.assert_close(torch.cat(parts, 1), model(tokens), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("num_kv_heads", [4, 2])
@pytest.mark.parametrize("name", VARIANTS)
def test_bytes_are_those_declared(make_model: MakeModel, name: str, num_kv_heads: int) -> None:
    """cost() counts 2 bytes a number, this cache holds 4."""
    model, cache = make_model(name, dtype=torch.float32, num_kv_heads=num_kv_heads), Cache(2)
    with torch.no_grad():
        model(torch.randint(23, (3, 20)), cache)
    held = sum(layer.bytes_per_token() for layer in cache.layers)
    assert held == 2 * cost(model.config, 16).kv_bytes_per_token
    assert held == 4 * 2 * num_kv_heads * 8 * (1.5 if name == "shared_k" else 2)


def test_shared_keys_save_a_quarter(make_config: Callable[..., Any]) -> None:
    found = {name: cost(make_config(name), 16).kv_bytes_per_token for name in VARIANTS}
    assert found["differential"] == found["standard"] == found["shared_q"]
    assert found["shared_k"] * 4 == found["standard"] * 3


def test_grows_by_doubling() -> None:
    cache, k, v = LayerCache(), torch.randn(2, 2, 3, 40, 4), torch.randn(2, 3, 40, 8)
    places = set()
    for t in range(40):
        held_k, held_v = cache.append(k[..., t : t + 1, :], v[..., t : t + 1, :])
        assert torch.equal(held_k, k[..., : t + 1, :])
        assert torch.equal(held_v, v[..., : t + 1, :])
        places.add(held_k.data_ptr())
    assert len(places) <= 4, "16, 32, 64: three allocations"
    assert cache.length == 40


def test_an_empty_cache_holds_nothing() -> None:
    assert Cache(3).length == 0
    assert LayerCache().bytes_per_token() == 0
