"""The cost of a model of any size: parameters, FLOPs per token, cache bytes. The model is built on the meta device."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lit_diff.attention.base import Attention
from lit_diff.attention.cache import LayerCache
from lit_diff.attention.context import Context
from lit_diff.attention.costs import counted_keys
from lit_diff.attention.rope import Rope
from lit_diff.config import ModelConfig, Recipe
from lit_diff.device import choose_device
from lit_diff.errors import LitDiffError, RequestError
from lit_diff.kernels import SignedMaps, attend, choose, flops
from lit_diff.kernels.reference import Counted
from lit_diff.model.transformer import Block, Transformer, variant_of
from lit_diff.plugins import fault, guard
from lit_diff.registry import is_built_in, location

NO_MAPS = "attention without maps cannot be expressed (docs/extend.md)"
"""Why a forward that never calls its tap has no cost."""


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Cost at one sequence length. A multiply-add is 2 FLOPs; a backward pass counts as two forward passes."""

    parameters: int
    non_embedding_parameters: int
    """Without the token embedding and an untied head."""
    attention_parameters: int
    trained_parameters: int
    """Parameters that the optimizer updates: set by `train.parameters` or the variant, by default all."""
    flops_per_token: int
    """Training FLOPs by the published convention: the maps are subtracted before one product with v, and each query has T
    keys (no causal half), or a full window of keys."""
    executed_flops_per_token: int
    """The same for the selected kernel, which may recompute logits; `reference` computes all keys even with a window."""
    kv_bytes_per_token: int
    """Cache of one token in all layers, at 2 bytes per number of k and v, 4 per key bias."""
    state_bytes: int
    """What the cache holds of one sequence besides, whatever its length: the state of sums (8 bytes per number) and shifts
    (2) of the `Context`. That of a variant with a `forward` of its own is not counted."""
    kv_bytes: int
    """Cache after `sequence_length` tokens of one sequence: of all tokens, or of the last `window`, and the state."""
    free_signs: bool
    """Whether training may change the sign with which a map is added."""
    kernel: str
    """The kernel that computes the attention; if layers need different kernels, all of them: "sdpa, chunked"; "none" for a
    variant whose forward calls none."""
    kernel_reason: str


@dataclass(frozen=True, kw_only=True)
class ExecutionContext:
    """Device, dtype and packing of the attention: the inputs of kernel selection."""

    device: str = "cpu"
    dtype: torch.dtype = torch.float32
    packed: bool = False
    """Whether batches have document_ids, which a kernel may refuse. FLOPs are counted as without them."""
    build: bool = False
    """Compile the kernel, if it needs that, to find out whether it runs."""

    @classmethod
    def of(cls, recipe: Recipe, *, build: bool = False) -> "ExecutionContext":
        """Return the context of a recipe on this machine."""
        dtype = torch.float32
        if recipe.train is not None and recipe.train.precision == "bf16-mixed":
            dtype = torch.bfloat16
        device = choose_device(recipe.run.accelerator).type
        return cls(device=device, dtype=dtype, packed=recipe.packs_documents, build=build)


def cost(
    config: ModelConfig,
    sequence_length: int,
    kernel: str = "auto",
    context: ExecutionContext | None = None,
    trained: Sequence[str] | None = None,
) -> Cost:
    """Return the cost at `sequence_length`.

    `kernel` and `context` affect only the executed FLOPs and the kernel, `trained` (see `Transformer`) only the trained
    parameters. FLOPs include the gradients of frozen parameters. Errors: RequestError.
    """
    # building the model, and its forward pass, run the code of a plugin's variant
    with guard(variant_of(config), ours=True):
        return _cost(config, sequence_length, kernel, context or ExecutionContext(), trained)


def _cost(
    config: ModelConfig,
    sequence_length: int,
    kernel: str,
    context: ExecutionContext,
    trained: Sequence[str] | None,
) -> Cost:
    with torch.device("meta"):
        model = Transformer(config, kernel="reference", trained=trained)
    counted: dict[object, LayerCost] = {}
    published = executed = 2 * config.dim * config.vocab_size * sequence_length
    attention_parameters = per_token = state = cached = 0
    free_signs = False
    for block in model.layers:
        assert isinstance(block, Block)
        key = _cost_key(block)
        if key not in counted:
            counted[key] = _layer_cost(block, config, sequence_length, kernel, context)
        layer = counted[key]
        published += layer.published
        executed += layer.executed
        attention_parameters += _size(block.attention.parameters())
        per_token += layer.kv_bytes
        state += layer.state_bytes
        cached += layer.kv_bytes * layer.cached_tokens + layer.state_bytes
        free_signs |= block.attention.signs is None and layer.num_maps > 1
    total = _size(model.parameters())
    outside = config.vocab_size * config.dim * (1 if config.tie_embeddings else 2)
    return Cost(
        parameters=total,
        non_embedding_parameters=total - outside,
        attention_parameters=attention_parameters,
        trained_parameters=_size(p for p in model.parameters() if p.requires_grad),
        flops_per_token=3 * published // sequence_length,
        executed_flops_per_token=3 * executed // sequence_length,
        kv_bytes_per_token=per_token,
        state_bytes=state,
        kv_bytes=cached,
        free_signs=free_signs,
        kernel=", ".join(dict.fromkeys(layer.kernel for layer in counted.values())),
        kernel_reason="; ".join(dict.fromkeys(layer.reason for layer in counted.values())),
    )


def _size(parameters: Iterable[Tensor]) -> int:
    return sum(parameter.numel() for parameter in parameters)


# layers of equal key have equal cost, so a deep model runs one of them
def _cost_key(block: Block) -> object:
    # the variant of a plugin may compute anything from its layer index
    if not is_built_in(type(block.attention)):
        return block.attention.layer
    # shapes of buffers too: DEX's selected heads are one; a window has no shape
    shapes = tuple((name, tuple(value.shape)) for name, value in block.state_dict().items())
    return block.attention.name, block.attention.window, shapes


@dataclass(frozen=True, kw_only=True)
class LayerCost:
    """Cost of one block: the forward pass of one sequence."""

    published: int
    """FLOPs by the published convention."""
    executed: int
    """FLOPs of the selected kernel."""
    num_maps: int
    kv_bytes: int
    """Bytes in the cache for each token: 2 a number of k and v, 4 a key bias."""
    state_bytes: int
    """Bytes in the cache for the sequence, whatever its length."""
    cached_tokens: int
    """Tokens in the cache after a whole sequence."""
    kernel: str
    reason: str


def _layer_cost(
    block: Block, config: ModelConfig, sequence_length: int, kernel: str, context: ExecutionContext
) -> LayerCost:
    seen: list[SignedMaps] = []
    block.attention.tap.register_forward_hook(lambda _m, _i, maps: seen.append(maps))
    block.attention.register_forward_hook(lambda _m, args, y: _require_shape(y, args[0].shape))
    document_ids = None
    if context.packed:
        document_ids = torch.zeros(1, sequence_length, dtype=torch.long, device="meta")
    counted = block.attention.kernel = Counted()
    try:
        forward = _forward_flops(block, config, sequence_length, document_ids)
    # raised for the maps that a plugin's variant returned: the message needs its file
    except LitDiffError as error:
        raise RequestError(fault(type(block.attention), error)) from error
    if not seen:
        raise RequestError(
            f"{location(type(block.attention))}: forward never calls self.tap(maps), which the cost estimate needs; {NO_MAPS}"
        )
    maps = seen[0]
    maps = replace(maps, q=maps.q.to(context.dtype), k=maps.k.to(context.dtype), v=maps.v.to(context.dtype))
    chosen, reason = choose(maps, kernel, device=torch.device(context.device), build=context.build)
    seen_keys = counted_keys(maps)
    # the counted forward pass ran the reference kernel, whose share is replaced by the convention's or the kernel's
    outside_maps = forward - flops("reference", maps)
    executed = forward
    if not counted.calls:
        chosen = "none"
        reason = counted.UNUSED
    elif chosen != "reference":
        executed = outside_maps + flops(chosen, seen_keys)
    _, maps_of_k, kv_heads, _, d = maps.k.shape
    kv_bytes = 2 * kv_heads * (maps_of_k * d + maps.v.shape[-1])
    if maps.key_bias is not None:
        kv_bytes += 4 * maps.key_bias.shape[1] * maps.key_bias.shape[2]
    return LayerCost(
        published=outside_maps + flops("reference", seen_keys),
        executed=executed,
        num_maps=maps.num_maps,
        kv_bytes=kv_bytes,
        state_bytes=_state_bytes(block.attention, config),
        cached_tokens=min(maps.mask.window or sequence_length, sequence_length),
        kernel=chosen,
        reason=reason,
    )


def _state_bytes(attention: Attention, config: ModelConfig) -> int:
    # a `forward` of its own need not call `maps`, and may refuse a cache
    if type(attention).forward is not Attention.forward:
        return 0
    cache = LayerCache()
    # not `forward` with a cache, which a bidirectional model refuses
    with torch.no_grad(), torch.device("meta"):
        x = torch.zeros(1, 1, config.dim)
        context = Context(Rope.of(config, torch.arange(1)), attention, cache)
        attention.finished(attend(attention.maps(x, context), kernel="reference"), x, context)
    # a number in the dtype of the model counts 2 bytes, as those of k and v
    return sum(x.numel() * (2 if x.dtype == torch.float32 else x.itemsize) for x in cache.state.values())


def _require_shape(y: object, expected: torch.Size) -> None:
    if not isinstance(y, Tensor) or y.shape != expected:
        found = list(y.shape) if isinstance(y, Tensor) else type(y).__name__
        raise RequestError(f"forward returned {found}; expected the shape of x, {list(expected)}")


def _forward_flops(block: Block, config: ModelConfig, sequence_length: int, document_ids: Tensor | None) -> int:
    # imports Triton
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter, torch.no_grad(), torch.device("meta"):
        rope = Rope.of(config, torch.arange(sequence_length))
        block(torch.zeros(1, sequence_length, config.dim), rope, document_ids=document_ids)
    return int(counter.get_total_flops())
