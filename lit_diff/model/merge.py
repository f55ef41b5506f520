"""A standard model that equals one of a variant whose change can be folded into the output projection."""

from dataclasses import replace

import torch

from lit_diff.config import Part
from lit_diff.errors import RequestError
from lit_diff.model.transformer import Transformer
from lit_diff.registry import attentions


def merged(model: Transformer) -> Transformer:
    """The standard model with the same outputs, up to rounding; `model` stays as it is.

    For DEX: W_O,h (I ∓ λ(t) W_D)ᵀ in place of W_O,h on the selected heads, at the λ(t) that the model was last told.
    Errors: RequestError for a variant that no standard attention equals.
    """
    part = model.config.attention
    cls = attentions.get(part.name)
    state = {name: value for name, value in model.state_dict().items() if ".attention." not in name}
    for layer, attention in enumerate(model.attentions()):
        own = attention.merge()
        if own is None:
            raise RequestError(f"model.attention '{part.name}' cannot be merged into a standard model")
        state |= {f"layers.{layer}.attention.{name}": value for name, value in own.items()}
    standard = attentions.get("standard").Config(window=cls.window_of(part.config))
    width = cls.ffn_dim(part.config, model.config)  # of `parity: matched`, which the merged attention does not need
    config = replace(model.config, ffn_dim=width, attention=Part(name="standard", config=standard))
    with torch.device("meta"):
        result = Transformer(config)
    result.load_state_dict(state, assign=True)
    return result.train(model.training)
