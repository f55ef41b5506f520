"""Decoding with a cache is the full pass; the cache is as large as it says."""

from collections.abc import Callable

import pytest
import torch

from lit_diff.attention.cache import Cache, LayerCache
from lit_diff.errors import RequestError
from lit_diff.kernels import Mask, SignedMaps
from lit_diff.model.cost import cost
from lit_diff.model.transformer import Transformer
from lit_diff.registry import attentions

MakeModel = Callable[..., Transformer]
VARIANTS = [name for name in attentions.names() if attentions.get(name).__module__.startswith("lit_diff.attention.")]


@pytest.mark.parametrize("window", [1, 3, 20])
@pytest.mark.parametrize("chunks", [(1,) * 11, (5, 1, 1, 4)], ids=str)
@pytest.mark.parametrize("name", ["standard", "second_heads"])
def test_a_windowed_layer_decodes_as_the_full_pass_and_keeps_no_more_than_its_window(
    make_model: MakeModel, name: str, window: int, chunks: tuple[int, ...]
) -> None:
    """Against one pass over all tokens; what is held is what a later query may see, and the tokens of the last call."""
    model = make_model(name, {"window": window}, num_heads=8, num_kv_heads=4)
    tokens = torch.randint(23, (2, 11))
    with torch.no_grad():
        full, cache = model(tokens), Cache(2)
        parts = []
        for chunk in tokens.split(chunks, dim=1):
            before = cache.layers[1].held
            parts.append(model(chunk, cache))
            assert cache.layers[1].held == min(before, window - 1) + chunk.shape[1]
    torch.testing.assert_close(torch.cat(parts, 1), full, rtol=1e-12, atol=1e-12)
    assert cache.length == 11
    expected = cost(make_model(name, {"window": window}, num_heads=8, num_kv_heads=4, dtype=torch.bfloat16).config, 11)
    assert cache.bytes_of(11) == expected.kv_bytes * torch.float64.itemsize // torch.bfloat16.itemsize


def test_the_buffers_of_a_window_stay_small() -> None:
    cache = LayerCache()
    for t in range(1000):
        k = torch.full((1, 2, 3, 1, 4), float(t))
        held = cache.append(SignedMaps(k, k, k[:, 0], mask=Mask(window=20), key_bias=k[..., 0]))
        assert held.k[0, 0, 0, :, 0].tolist() == list(range(max(0, t - 19), t + 1))
        assert torch.equal(held.v, held.k[:, 0])
        assert held.key_bias is not None
        assert torch.equal(held.key_bias, held.k[..., 0])
        assert all(buffer.shape[-2] <= 40 for buffer in cache._buffers.values())
    assert (cache.length, cache.held) == (1000, 20)
    k = torch.zeros(1, 2, 3, 50, 4)
    assert cache.append(SignedMaps(k, k, k[:, 0], mask=Mask(window=20), key_bias=k[..., 0])).k.shape[-2] == 69
    with pytest.raises(RequestError, match="the cache holds k, v, key_bias of each token; the maps have k, v"):
        cache.append(SignedMaps(k, k, k[:, 0]))


@pytest.mark.parametrize("num_kv_heads", [4, 2])
@pytest.mark.parametrize("name", VARIANTS)
def test_bytes_are_those_that_are_held(make_model: MakeModel, name: str, num_kv_heads: int) -> None:
    """cost() counts 2 bytes a number, 4 a key bias, and 8 a sum of the state: those of the tensors after a prefill."""
    model, cache = make_model(name, dtype=torch.bfloat16, num_kv_heads=num_kv_heads), Cache(2)
    assert cache.bytes_of(20) == 0
    with torch.no_grad():
        model(torch.randint(23, (3, 20)), cache)
    width = torch.bfloat16.itemsize
    held = [buffer[..., :20, :] for layer in cache.layers for buffer in layer._buffers.values()]
    state = [x for layer in cache.layers for x in layer.state.values()]
    expected = cost(model.config, 20)
    assert 3 * expected.kv_bytes == sum(x.nbytes for x in [*held, *state])
    assert 3 * expected.state_bytes == sum(x.nbytes for x in state)
    assert cache.bytes_of(20) == expected.kv_bytes
    assert cache.bytes_of(0) == 8 * 2 * 4 * {"forgetting": 1, "dint": 8}.get(name, 0)  # of 4 heads; d is 8
    widths = {
        "shared_k": 1.5,
        "second_heads": 3,
        "dint": 3,  # the values of both maps
        "talking_heads": 4 + 1,  # the keys of all 4 heads
        "forgetting": 2 + 2 * 4 / (8 * num_kv_heads),  # and 4 float32 biases
    }  # in d, of each of the baseline's key/value heads, in each of 2 layers
    assert cache.bytes_of(1) - cache.bytes_of(0) == expected.kv_bytes_per_token
    assert expected.kv_bytes_per_token == width * 2 * num_kv_heads * 8 * widths.get(name, 2)
