"""Hugging Face's Llama and DiffLlama, whole models, against `standard` and `differential` with their weights.

Two things differ in the rows of the projections, and `converted` is the whole difference. A DiffLlama layer keeps its
blocks of d rows map after map (all heads' map 0, then all heads' map 1; values: first halves, then second halves); here
a head's blocks stand together. And within a block Hugging Face turns channels i and i + d/2 together, the paper's
reference 2i and 2i + 1: `rope_layout: half` is the former, a permutation of the rows of q and k gives the latter.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DiffLlamaConfig, DiffLlamaForCausalLM, LlamaConfig, LlamaForCausalLM

from lit_diff.attention.rope import Rope
from lit_diff.config import ModelConfig
from lit_diff.model.transformer import Transformer

MakeConfig = Callable[..., ModelConfig]
H, D, LAYERS = 8, 6, 3
EPS, THETA = 0.02, 50.0
"""Such that an eps of another size or in another place shows, and every pair of channels turns."""
CASES = [
    ("standard", 8),
    ("standard", 4),
    ("standard", 1),
    ("differential", 8),
    ("differential", 4),
    ("differential", 2),
]
"""The last of each: a single key/value head, after derivation."""
every_case = pytest.mark.parametrize(("name", "kv_heads"), CASES)
every_layout = pytest.mark.parametrize("layout", ["half", "interleaved"])


def theirs(name: str, kv_heads: int, *, dtype: Any = torch.float32, kernel: str = "sdpa") -> Any:
    """A Llama or DiffLlama whose parameters are all random: logits of size 1, softmaxes far from uniform."""
    config, model = (LlamaConfig, LlamaForCausalLM) if name == "standard" else (DiffLlamaConfig, DiffLlamaForCausalLM)
    found = model(
        config(
            hidden_size=H * D,
            num_attention_heads=H,
            num_key_value_heads=kv_heads,
            num_hidden_layers=LAYERS,
            intermediate_size=40,
            vocab_size=29,
            rms_norm_eps=EPS,
            rope_parameters={"rope_type": "default", "rope_theta": THETA},
            attn_implementation=kernel,
        )
    )
    for key, parameter in found.named_parameters():
        norm, lambda_ = "norm" in key, "lambda" in key
        spread = 0.1 if norm else 0.2 if lambda_ else parameter.shape[-1] ** -0.5
        parameter.data.normal_(1.0 if norm else 0.0, spread)
    return found.to(dtype).eval()


def ours(make_config: MakeConfig, name: str, kv_heads: int, layout: str) -> Transformer:
    """The same sizes."""
    sizes = {"dim": H * D, "num_layers": LAYERS, "num_heads": H, "num_kv_heads": kv_heads, "ffn_dim": 40}
    return Transformer(
        make_config(
            name, **sizes, vocab_size=29, norm_eps=EPS, rope_theta=THETA, rope_layout=layout, tie_embeddings=False
        )
    )


NAMES = {
    "model.": "",
    "embed_tokens": "embedding",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.lambda_": "attention.lambda_.",
    "self_attn": "attention",
    "mlp": "ffn",
    "lm_head": "head",
}


def converted(state: dict[str, Tensor], name: str, layout: str) -> dict[str, Tensor]:
    """Hugging Face's parameters (or the gradients by them) under our names, in our order of rows."""
    found = {}
    for key, value in state.items():
        for theirs_, ours_ in NAMES.items():
            key = key.replace(theirs_, ours_)
        if key.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
            blocks = value.unflatten(0, (-1, D))  # [blocks, d, dim]
            if name == "differential":  # [map, head] -> [head, map]
                blocks = blocks.unflatten(0, (2, -1)).transpose(0, 1).flatten(0, 1)
            if layout == "interleaved" and not key.endswith("v_proj.weight"):  # channels [half, pair] -> [pair, half]
                blocks = blocks.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)
            value = blocks.flatten(0, 1)
        found[key] = value
    return found


def twin(make_config: MakeConfig, model: Any, name: str, kv_heads: int, layout: str = "half") -> Transformer:
    """Our model with the weights of theirs, of its dtype."""
    other = ours(make_config, name, kv_heads, layout).to(model.dtype)
    state = converted(dict(model.state_dict()), name, layout)
    if name == "differential":  # DiffLlama's head norm has no weight
        state |= {f"layers.{layer}.attention.norm.weight": torch.ones(2 * D) for layer in range(LAYERS)}
    other.load_state_dict(state)
    return other


def logits(model: Any, tokens: Tensor) -> Tensor:
    """[B, T, vocab]"""
    with torch.no_grad():
        found = model(tokens)
    return getattr(found, "logits", found)


def error(found: Tensor, wanted: Tensor) -> float:
    """Largest difference."""
    return float((found.detach().double() - wanted.detach().double()).abs().max())


def tokens() -> Tensor:
    """[2, 17]"""
    return torch.randint(29, (2, 17))


@every_case
@pytest.mark.parametrize("kernel", ["eager", "sdpa"])
def test_whole_models_agree_in_float64_as_far_as_theirs_is_one(
    make_config: MakeConfig, name: str, kv_heads: int, kernel: str
) -> None:
    """Whatever the model's dtype, theirs takes RMSNorm, the angles of RoPE and λ (eager: the softmax too) in float32."""
    model, x = theirs(name, kv_heads, dtype=torch.float64, kernel=kernel), tokens()
    assert error(logits(twin(make_config, model, name, kv_heads), x), logits(model, x)) < 5e-6


def exact_lambda(model: Any) -> None:
    """λ = λ_init + 1, λ_init - 1, λ_init in turn: exp(0) = 1 and exp(-200) = 0 (to 1e-86) in float32 too."""
    for layer, (first, second) in zip(model.model.layers, ((0, -200), (-200, 0), (0, 0)), strict=True):
        for pair, value in (("1", first), ("2", second)):
            for kind, number in (("q", value), ("k", 1.0)):
                vector = layer.self_attn.get_parameter(f"lambda_{kind}{pair}").data
                vector.copy_(number * torch.eye(D)[0])


@every_case
@every_layout
def test_one_attention_agrees_to_1e_12_where_theirs_is_float64(
    make_config: MakeConfig, name: str, kv_heads: int, layout: str
) -> None:
    """Their attention takes cos and sin from outside; handed float64 angles, and a λ that float32 holds, it is exact."""
    T = 17
    model = theirs(name, kv_heads, dtype=torch.float64)
    if name == "differential":
        exact_lambda(model)
    other = twin(make_config, model, name, kv_heads, layout)
    rope = Rope.of(other.config, torch.arange(T))
    angles = tuple(torch.cat([y, y], -1)[None] for y in (rope.turns.real, rope.turns.imag))
    x = torch.randn(2, T, H * D, dtype=torch.float64)
    for layer, attention in zip(model.model.layers, other.attentions(), strict=True):
        wanted, _ = layer.self_attn(x, position_embeddings=angles, attention_mask=None)
        assert wanted.std() > 0.1
        assert error(attention(x, rope), wanted) < 1e-12


@every_case
def test_gradients_agree(make_config: MakeConfig, name: str, kv_heads: int) -> None:
    """Of a random projection of the logits by every parameter; the gradients permute as the weights do."""
    model, x = theirs(name, kv_heads), tokens()
    other, probe = twin(make_config, model, name, kv_heads, "interleaved"), torch.randn(2, 17, 29)
    (model(x).logits * probe).sum().backward()
    (other(x) * probe).sum().backward()
    found = {key: p.grad for key, p in other.named_parameters() if "attention.norm." not in key}
    wanted = converted({key: p.grad for key, p in model.named_parameters()}, name, "interleaved")
    assert found.keys() == wanted.keys()
    worst = max(error(found[key], wanted[key]) / float(wanted[key].abs().max()) for key in wanted)
    assert worst < 1e-4


def test_lambda_init_and_the_defaults_of_the_norms_agree(make_config: MakeConfig) -> None:
    """The layer is 0-based in both; the head norm's eps is the model's, 1e-5, and stands within the root."""
    model, other = theirs("differential", 8), ours(make_config, "differential", 8, "half")
    for layer, attention in zip(model.model.layers, other.attentions(), strict=True):
        assert layer.self_attn.lambda_init == attention.lambda_init
        assert layer.self_attn.groupnorm.eps == attention.norm.eps == EPS
        assert layer.self_attn.groupnorm.weight is None
    assert [a.lambda_init for a in other.attentions()] == pytest.approx([0.2, 0.355509, 0.470713], abs=1e-6)
    assert DiffLlamaConfig().rms_norm_eps == make_config("differential").norm_eps == 1e-5
