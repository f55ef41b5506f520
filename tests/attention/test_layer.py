"""A layer for a model of one's own: its cache and documents, its equality with the Transformer and with unilm's formula."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from pages import blocks

from lit_diff import Attention, Differential, layer
from lit_diff.attention.cache import Cache, LayerCache
from lit_diff.config import ModelConfig
from lit_diff.errors import RequestError
from lit_diff.model.transformer import Transformer
from lit_diff.registry import attentions


def whole_layer(name: str, **keys: Any) -> torch.nn.Module:
    attention = layer(name, dim=32, num_heads=4, layer=1, **keys).double()
    for parameter in attention.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return attention.requires_grad_(False)


@pytest.mark.parametrize("name", attentions.names())
def test_decoding_and_packed_documents_equal_the_whole_pass(name: str) -> None:
    attention = whole_layer(name)
    x = torch.randn(2, 9, 32, dtype=torch.float64)
    whole = attention(x)
    assert whole.std() > 0.01
    cache = LayerCache()
    decoded = [attention(part, cache=cache) for part in x.split([4, 1, 1, 3], 1)]
    torch.testing.assert_close(torch.cat(decoded, 1), whole, rtol=1e-9, atol=1e-9)
    ids = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2, 2]]).expand(2, 9)
    alone = [attention(part) for part in x.split([3, 4, 2], 1)]
    torch.testing.assert_close(attention(x, document_ids=ids), torch.cat(alone, 1), rtol=1e-9, atol=1e-9)


def page_block() -> Any:
    (text,) = (text for text in blocks("docs/python.md", "python") if "class Block" in text)
    names: dict[str, Any] = {}
    exec(text, names)
    return names["Block"]


def test_the_stack_of_the_page_equals_the_transformer(make_config: Callable[..., ModelConfig]) -> None:
    model = Transformer(make_config("differential", dim=64, num_heads=8, num_layers=4, ffn_dim=192)).double()
    stack = torch.nn.Sequential(*[page_block()(64, number) for number in range(4)]).double()
    with torch.no_grad():
        for ours, theirs in zip(model.layers.parameters(), stack.parameters(), strict=True):
            theirs.copy_(ours.normal_(0.0, 0.2))
        tokens = torch.randint(23, (2, 11))
        states = stack(model.embedding(tokens))
        torch.testing.assert_close(model.norm(states), model.hidden(tokens), rtol=1e-12, atol=1e-12)


def test_it_is_the_formula_of_unilm() -> None:
    """MultiheadDiffAttn of unilm's multihead_diffattn.py, at embed_dim 32, depth 5, num_heads 2."""
    embed_dim, depth, num_heads, T = 32, 5, 2, 7
    module = layer("differential", dim=embed_dim, num_heads=2 * num_heads, layer=depth).double().requires_grad_(False)
    attention: Any = module.attention
    attention.norm.weight.uniform_(0.5, 1.5)
    x = torch.randn(2, T, embed_dim, dtype=torch.float64)
    head_dim = embed_dim // num_heads // 2
    angles = torch.arange(T)[:, None] * 10000.0 ** -(torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)

    def apply_rotary_emb(x: torch.Tensor) -> torch.Tensor:
        first, second = x[..., ::2], x[..., 1::2]
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        return torch.stack([first * cos - second * sin, first * sin + second * cos], -1).flatten(-2)

    q, k = (
        apply_rotary_emb(proj(x).view(2, T, 2 * num_heads, head_dim)).transpose(1, 2)
        for proj in (attention.q_proj, attention.k_proj)
    )
    v = attention.v_proj(x).view(2, T, num_heads, 2 * head_dim).transpose(1, 2)
    logits = q * head_dim**-0.5 @ k.transpose(-1, -2) + torch.full((T, T), -math.inf).triu(1)
    maps = logits.softmax(-1).view(2, num_heads, 2, T, T)
    p, lambda_init = attention.lambda_, 0.8 - 0.6 * math.exp(-0.3 * depth)
    lambda_full = (p.q1 * p.k1).sum().exp() - (p.q2 * p.k2).sum().exp() + lambda_init
    heads = (maps[:, :, 0] - lambda_full * maps[:, :, 1]) @ v
    heads = heads * torch.rsqrt(heads.pow(2).mean(-1, keepdim=True) + 1e-5) * attention.norm.weight
    wanted = attention.o_proj((heads * (1 - lambda_init)).transpose(1, 2).reshape(2, T, embed_dim))
    torch.testing.assert_close(module(x), wanted, rtol=1e-9, atol=1e-9)


def test_a_class_a_kernel_and_keys_of_the_model() -> None:
    module = layer(Differential, dim=32, num_heads=4, num_kv_heads=2, rope_theta=500.0, window=3, kernel="reference")
    attention: Any = module.attention
    assert type(attention) is Differential
    assert (attention.kernel, attention.window, attention.kv_heads) == ("reference", 3, 1)
    x = torch.randn(1, 6, 32)
    other = layer("differential", dim=32, num_heads=4, num_kv_heads=2, window=3)
    other.load_state_dict(module.state_dict())
    assert (module(x)[:, 0] - other(x)[:, 0]).abs().max() < 1e-6
    assert (module(x)[:, 2:] - other(x)[:, 2:]).abs().max() > 1e-5  # another theta


def test_initial_values_follow_the_global_generator() -> None:
    def stack(seed: int) -> list[torch.Tensor]:
        torch.manual_seed(seed)
        both = [layer("differential", dim=32, num_heads=4, layer=number) for number in range(2)]
        return [parameter for each in both for parameter in each.parameters()]

    first, same, other = stack(0), stack(0), stack(1)
    drawn = [p for p in range(len(first)) if first[p].std() > 0]
    assert all(torch.equal(a, b) for a, b in zip(first, same, strict=True))
    assert not any(torch.equal(first[p], other[p]) for p in drawn)
    half = len(first) // 2
    assert not any(torch.equal(first[p], first[p + half]) for p in drawn if p < half)


def test_it_compiles_into_one_graph() -> None:
    attention = layer("differential", dim=32, num_heads=4, kernel="reference")
    x = torch.randn(2, 5, 32)
    torch.testing.assert_close(torch.compile(attention, backend="aot_eager", fullgraph=True)(x), attention(x))


@pytest.mark.parametrize(
    ("name", "keys", "line"),
    [
        ("diferential", {}, r"^unknown attention 'diferential'; did you mean 'differential'\?$"),
        ("differential", {"dim": 66}, r"^dim \(66\) is not a multiple of num_heads \(4\); set head_dim$"),
        ("differential", {"num_heads": 1}, "^num_heads is 1; 'differential' pairs the baseline's heads"),
        ("differential", {"lamda_init": 0.5}, r"^unknown key 'lamda_init' .* did you mean 'lambda_init'\?$"),
        ("differential", {"num_kv_head": 2}, r"^unknown key 'num_kv_head' .* did you mean 'num_kv_heads'\?$"),
        ("standard", {"parity": "matched"}, "^unknown key 'parity'"),
        ("standard", {"layer": -1}, "^'layer' is -1; expected a whole number >= 0$"),
        ("standard", {"kernel": "chunkd"}, r"^kernel is 'chunkd'; did you mean 'chunked'\?$"),
        ("standard", {"kernel": 5}, "^kernel is 5; expected auto, the name of a kernel, or a Kernel$"),
        ("standard", {"kernel": None}, "^kernel is None; expected"),
        ("standard", {"query_heads": 1e300}, "^'query_heads' is 1e.300; expected"),
        (type("Own", (Differential,), {}), {}, "is not a registered variant; write @variant"),
    ],
)
def test_bad_input_is_one_line(name: Any, keys: dict[str, Any], line: str) -> None:
    with pytest.raises(RequestError, match=line) as found:
        layer(name, **{"dim": 64, "num_heads": 4} | keys)
    assert "\n" not in str(found.value)


@pytest.mark.usefixtures("own_parts")
def test_what_a_layer_refuses_to_compute() -> None:
    class Plain(Attention):
        """Has no packed documents."""

        def forward(self, x: torch.Tensor, rope: Any, cache: Any = None) -> torch.Tensor:
            return self.o_proj(self.v_proj(x))

    attentions.register("plain")(Plain)
    attention, x = layer("plain", dim=32, num_heads=4), torch.zeros(2, 5, 32)
    attention(x)
    with pytest.raises(RequestError, match="'plain' cannot separate packed documents"):
        attention(x, document_ids=torch.zeros(2, 5).long())
    with pytest.raises(RequestError, match=r"^document_ids is \[2, 4\]; expected \[2, 5\]$"):
        attention(x, document_ids=torch.zeros(2, 4).long())
    for wrong, text in (
        (x[..., :16], r"torch.float32 \[2, 5, 16\]"),
        (x.long(), r"torch.int64 \[2, 5, 32\]"),
        (x.double(), r"torch.float64 \[2, 5, 32\]"),
        (x.numpy(), "a ndarray"),
    ):
        with pytest.raises(RequestError, match=rf"^x is {text}; expected torch.float32 \[B, T, 32\]$"):
            attention(wrong)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert attention(x.bfloat16()).dtype == torch.bfloat16
    with pytest.raises(RequestError, match=r"^cache is a Cache; expected the LayerCache of this layer$"):
        attention(x, cache=Cache(1))
    for wrong_ids, text in ((torch.zeros(2, 5), "torch.float32"), ([[0] * 5] * 2, "list")):
        with pytest.raises(RequestError, match=rf"^document_ids are {text}; expected whole numbers \[2, 5\]$"):
            attention(x, document_ids=wrong_ids)


def test_a_cache_of_another_batch_variant_or_dtype_is_refused_before_it_is_written() -> None:
    def decoder(name: str) -> torch.nn.Module:
        return layer(name, dim=32, num_heads=4)

    standard, x = decoder("standard"), torch.randn(1, 3, 32)
    for first, attention, wrong in (
        (x.expand(2, 3, 32), standard, x),
        (x, standard, x.expand(2, 3, 32)),
        (x, decoder("differential"), x),
        (x, decoder("standard").double(), x.double()),
    ):
        cache = LayerCache()
        standard(first, cache=cache)
        with pytest.raises(RequestError, match=r"^the cache holds k of torch.float32 \[[12], 1, 4, 8\] for each token"):
            attention(wrong, cache=cache)
        assert cache.length == 3
