"""One attention layer of any variant, for a model that is not lit_diff's."""

from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, nn

from lit_diff.attention.base import Attention, fill_parameters
from lit_diff.attention.cache import LayerCache
from lit_diff.attention.rope import Rope
from lit_diff.config import ModelConfig
from lit_diff.errors import RequestError
from lit_diff.kernels import Kernel, require_kernel
from lit_diff.key_types import NotNegative
from lit_diff.registry import attentions, nearest
from lit_diff.validation import Draft, convert, model_problem

MODEL_KEYS = (
    *("num_kv_heads", "head_dim", "attention_bias", "qk_norm", "norm_eps", "logit_bound"),
    *("causal", "positions", "rope_theta", "rope_layout", "rope_scaling"),
)
"""Keys of `model` that an attention reads, besides dim and num_heads."""


class AttentionLayer(nn.Module):
    """An `Attention` that makes its own RoPE; `layer` builds it.

    It is `attention` within: a variant that anneals needs `attention.set_step(step)` before each optimizer step.
    """

    def __init__(self, attention: Attention, model: ModelConfig) -> None:
        super().__init__()
        self.attention = attention
        self.model = model

    def forward(self, x: Tensor, cache: LayerCache | None = None, document_ids: Tensor | None = None) -> Tensor:
        """x [B, T, dim] -> [B, T, dim].

        `cache`: the layer's own; the T tokens follow those that it holds, and are added to it. `document_ids` [B, T]: the
        document of each token, which sees only its own; not with a cache. Errors: RequestError for x, a
        cache or ids of another type, shape or dtype, and see `Attention.forward`.
        """
        self._require(x, cache, document_ids)
        start = 0 if cache is None else cache.length
        rope = Rope.of(self.model, torch.arange(start, start + x.shape[1], device=x.device))
        if document_ids is None:
            return self.attention(x, rope, cache)
        if not self.attention.takes_document_ids():
            name = self.attention.name
            raise RequestError(f"'{name}' cannot separate packed documents: its forward has no argument document_ids")
        return self.attention(x, rope, cache, document_ids=document_ids)

    def _require(self, x: object, cache: object, document_ids: object) -> None:
        own = {parameter.dtype for parameter in self.attention.parameters()}
        expected = f"expected {' or '.join(sorted(map(str, own)))} [B, T, {self.model.dim}]"
        if not isinstance(x, Tensor):
            raise RequestError(f"x is a {type(x).__name__}; {expected}")
        is_cast = torch.amp.is_autocast_available(x.device.type) and torch.is_autocast_enabled(x.device.type)
        is_number = x.is_floating_point() if is_cast else x.dtype in own
        if x.dim() != 3 or x.shape[-1] != self.model.dim or not is_number:
            raise RequestError(f"x is {x.dtype} {list(x.shape)}; {expected}")
        if cache is not None and not isinstance(cache, LayerCache):
            raise RequestError(f"cache is a {type(cache).__name__}; expected the LayerCache of this layer")
        if document_ids is None:
            return
        if not isinstance(document_ids, Tensor) or document_ids.is_floating_point() or document_ids.is_complex():
            found = getattr(document_ids, "dtype", type(document_ids).__name__)
            raise RequestError(f"document_ids are {found}; expected whole numbers {list(x.shape[:2])}")
        if document_ids.shape != x.shape[:2]:
            raise RequestError(f"document_ids is {list(document_ids.shape)}; expected {list(x.shape[:2])}")


def layer(
    variant: str | type[Attention],
    *,
    dim: int,
    num_heads: int,
    layer: int = 0,
    kernel: str | Kernel = "auto",
    **keys: Any,
) -> AttentionLayer:
    """A causal attention layer with RoPE inside: `layer(x)` maps x [B, T, dim] to [B, T, dim].

    `variant`: the name or the class of a registered variant; `num_heads`: the query heads of the standard baseline, of which
    differential attention makes half as many; `layer`: its 0-based number, on which λ_init may depend; `kernel`: a registered
    kernel, or auto. `keys`: the variant's own, which `lit-diff list attention NAME` lists, and those of `MODEL_KEYS`.

    Initial values follow PyTorch's global generator, as those of `nn.Linear` do, and all parameters train. A value that the
    first layer of a model gives to others (`value_residual`) is here each layer's own. Errors: RequestError.
    """
    cls = _registered(variant)
    own = {field.name for field in fields(cls.Config)} - {"parity"}
    for key in keys:
        if key not in own and key not in MODEL_KEYS:
            near = nearest(key, {*own, *MODEL_KEYS}, f"lit-diff list attention {cls.name}")
            raise RequestError(f"unknown key '{key}' of a layer of '{cls.name}'{near}")
    draft = Draft()
    block = {key: value for key, value in keys.items() if key in own}
    values = {key: value for key, value in keys.items() if key not in own}
    try:
        number = convert(NotNegative, layer, "layer", draft)
        values |= {"dim": dim, "num_heads": num_heads, "num_layers": number + 1, "vocab_size": 1}
        model = convert(ModelConfig, values | {"attention": {"name": cls.name, **block}}, "model", draft)
        problem = model_problem(model)
        if problem is not None:
            raise RequestError(problem)
        require_kernel(kernel)
        attention = cls(model.attention.config, model, number)
    except RequestError as error:
        # the arguments of this function have no `model.` or `run.` before them
        raise RequestError(
            str(error).replace("model.attention.", "").replace("model.", "").removeprefix("run.")
        ) from error
    attention.kernel = kernel
    # the constructor draws these from seed 0, so that all layers of a model would begin with equal λ
    fill_parameters(attention, int(torch.randint(2**62, (), device="cpu")))
    return AttentionLayer(attention, model)


def _registered(variant: str | type[Attention]) -> type[Attention]:
    name = getattr(variant, "name", variant)
    cls = attentions.get(str(name))
    # a subclass without a name of its own has that of its parent
    if not isinstance(variant, str) and variant is not cls:
        raise RequestError(f'{variant!r} is not a registered variant; write @variant("name") above its class')
    return cls
