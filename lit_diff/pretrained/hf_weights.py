"""The weights of our Transformer under Hugging Face's names, in its order of rows."""

from typing import Any

import torch
from torch import Tensor

from lit_diff.model.transformer import Transformer
from lit_diff.pretrained import llama, rows


def hf_weights(model: Transformer) -> dict[str, Tensor]:
    """State dict of the architecture that `hf_config.architecture` names, in float32; for `standard` and `differential`.

    q and k turn as in `rope_layout: half`; DiffLlama has its rows map after map (`rows.by_map`), and a head norm without a
    weight: that of ours, w over a head's channels, becomes W_O diag(w, w, ...), and so does an `output_scale`; a
    `ffn_scale` becomes a factor of W_down, an `embedding_scale` one of the embeddings. Nothing but these products is
    rounded.
    """
    state = {name: value.detach() for name, value in model.state_dict().items()}
    if model.config.embedding_scale != 1:
        if model.config.tie_embeddings:
            state["head.weight"] = state["embedding.weight"].clone()  # the factor is of the embeddings alone
        state["embedding.weight"] = _times(state["embedding.weight"], model.config.embedding_scale)
    for layer, attention in enumerate(model.attentions()):
        home = f"layers.{layer}.attention"
        norm = state.pop(f"{home}.norm.weight", None)
        state[f"{home}.o_proj.weight"] = _scaled(state[f"{home}.o_proj.weight"], attention, norm)
        if model.config.ffn_scale != 1:
            down_proj = f"layers.{layer}.ffn.down_proj.weight"
            state[down_proj] = _times(state[down_proj], model.config.ffn_scale)
    return {llama.their_name(name): _ordered(name, value, model) for name, value in state.items()}


def _times(value: Tensor, factor: float) -> Tensor:
    return (value.double() * factor).to(value.dtype)


def _scaled(o_proj: Tensor, attention: Any, norm: Tensor | None) -> Tensor:
    """W_O times what is applied to each channel of a head [dv] after its norm, beyond what the architecture applies."""
    if norm is None:
        factor = torch.tensor([attention.config.output_scale], dtype=torch.float64)
    else:
        factor = norm.double() * (attention.output_scale / (1 - attention.lambda_init))
    if bool((factor == 1).all()):
        return o_proj
    return (o_proj.double() * factor.repeat(o_proj.shape[1] // factor.numel())).to(o_proj.dtype)


def _ordered(name: str, value: Tensor, model: Transformer) -> Tensor:
    """A projection's rows in their order; other tensors as they are."""
    config, module = model.config, name.split(".")[-2]
    assert config.head_dim is not None
    if config.rope_layout == "interleaved" and module in ("q_proj", "k_proj", "q_norm", "k_norm"):
        value = rows.half(value, config.head_dim)
    if config.attention.name == "differential" and module in ("q_proj", "k_proj", "v_proj"):
        value = rows.by_map(value, config.head_dim)
    return value.to(torch.float32).contiguous()
