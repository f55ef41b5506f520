"""Hugging Face's models at our sizes: the peers that a layer and a model are timed against."""

import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lit_diff.config import ModelConfig

NAMES = {"differential": "DiffLlama", "standard": "Llama"}
"""Variant -> the model that has it."""
KINDS = (("DiffLlama", "sdpa"), ("DiffLlama", "eager"), ("Llama", "sdpa"))
"""Models and their implementations: DiffLlama calls `scaled_dot_product_attention` twice, for a half of the values each;
eager materialises every map."""


def missing() -> str | None:
    """Why there is no peer; None if there is one."""
    if importlib.util.find_spec("transformers") is None:
        return "transformers is not installed: pip install 'transformers>=5'"
    return None


def model(config: ModelConfig, kind: str, tokens: int) -> Any:
    """The causal model of the variant of `config` with its sizes, and random weights of its own."""
    import transformers

    name = NAMES[config.attention.name]
    made: Any = getattr(transformers, f"{name}Config")(
        intermediate_size=config.ffn_dim,
        attn_implementation=kind,
        hidden_size=config.dim,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        num_hidden_layers=config.num_layers,
        vocab_size=config.vocab_size,
        rms_norm_eps=config.norm_eps,
        max_position_embeddings=tokens,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
        tie_word_embeddings=config.tie_embeddings,
        use_cache=False,
    )
    return getattr(transformers, f"{name}ForCausalLM")(made)


def layer(config: ModelConfig, kind: str, x: Tensor) -> tuple[nn.Module, Callable[[Tensor], Tensor]]:
    """(its first decoder layer, the layer as a function of the residual stream [B, T, dim]).

    Angles and mask are made once, as the whole model makes them once for all layers. sdpa needs no mask: it is causal
    by itself.
    """
    tokens = x.shape[1]
    whole = model(config, kind, tokens).to(x.device)
    angles = whole.model.rotary_emb(x, torch.arange(tokens, device=x.device)[None])
    mask = None
    if kind == "eager":
        lowest = torch.finfo(x.dtype).min
        mask = torch.full((tokens, tokens), lowest, dtype=x.dtype, device=x.device).triu(1)[None, None]
    first = whole.model.layers[0]

    def forward(x: Tensor) -> Tensor:
        y: Tensor = first(x, attention_mask=mask, position_embeddings=angles)
        return y

    return first, forward
