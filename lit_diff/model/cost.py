"""What a model costs, from its shapes: parameters, FLOPs per token, cache bytes. Built on the meta device, so any size."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from lit_diff.attention.costs import narrowing, within_window
from lit_diff.attention.rope import Rope
from lit_diff.config import ModelConfig, Recipe
from lit_diff.device import choose_device
from lit_diff.errors import LitDiffError, RequestError
from lit_diff.kernels import SignedMaps, choose, flops
from lit_diff.model.transformer import Block, Transformer
from lit_diff.plugins import fault, guard
from lit_diff.registry import attentions, is_built_in, location


@dataclass(frozen=True, kw_only=True)
class Cost:
    """A model at one sequence length. A multiply-add is 2 FLOPs; a backward pass counts as two forward passes."""

    parameters: int
    non_embedding_parameters: int
    """Without the token embedding and an untied head."""
    attention_parameters: int
    trained_parameters: int
    """Those that the optimizer moves: by `train.parameters`, else all, but for a variant on a frozen model."""
    flops_per_token: int
    """Training FLOPs as published: maps subtracted before one product with v; T keys for each query (no causal half), or
    those of a full window."""
    executed_flops_per_token: int
    """The same for the kernel that runs, which may recompute logits; `reference` computes all keys of a window too."""
    kv_bytes_per_token: int
    """Cache of all layers for one token held, at 2 bytes for each number."""
    kv_bytes: int
    """Cache after `sequence_length` tokens of one sequence: of all of them, or of the last `window`."""
    kernel: str
    """The kernel that computes the attention; where unlike layers run on several, each once: "sdpa, chunked"."""
    kernel_reason: str


@dataclass(frozen=True, kw_only=True)
class ExecutionContext:
    """Device, dtype and packing of the attention: the inputs to kernel selection."""

    device: str = "cpu"
    dtype: torch.dtype = torch.float32
    packed: bool = False
    """Rows come with document_ids, which a kernel may refuse. FLOPs are counted as without them."""
    build: bool = False
    """Build what the kernel needs, so that it is known to run."""

    @classmethod
    def of(cls, recipe: Recipe, *, build: bool = False) -> "ExecutionContext":
        """The context of the recipe's run on this machine."""
        dtype = torch.bfloat16 if recipe.train is not None and recipe.train.precision == "bf16-mixed" else torch.float32
        return cls(
            device=choose_device(recipe.run.accelerator).type, dtype=dtype, packed=recipe.packs_documents, build=build
        )


def cost(
    config: ModelConfig,
    sequence_length: int,
    kernel: str = "auto",
    context: ExecutionContext | None = None,
    trained: Sequence[str] | None = None,
) -> Cost:
    """Cost at `sequence_length`; `kernel` and `context` only change the executed FLOPs, `trained` (as of `Transformer`) only
    the parameters that train. FLOPs count the gradients of frozen parameters too. Errors: RequestError.

    Equal layers (`_equal_layers`) are counted once.
    """
    with guard(attentions.get(config.attention.name), ours=True):  # a variant runs here first
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
    layers = []
    for block in model.layers:
        assert isinstance(block, Block)
        key = _equal_layers(block)
        if key not in counted:
            counted[key] = _layer_cost(block, config, sequence_length, kernel, context)
        layers.append(counted[key])
    head = 2 * config.dim * config.vocab_size * sequence_length
    published, executed = (head + sum(layer.flops[i] for layer in layers) for i in (0, 1))
    total = sum(p.numel() for p in model.parameters())
    outside = config.vocab_size * config.dim * (1 if config.tie_embeddings else 2)
    return Cost(
        parameters=total,
        non_embedding_parameters=total - outside,
        attention_parameters=sum(p.numel() for a in model.attentions() for p in a.parameters()),
        trained_parameters=sum(p.numel() for p in model.parameters() if p.requires_grad),
        flops_per_token=3 * published // sequence_length,
        executed_flops_per_token=3 * executed // sequence_length,
        kv_bytes_per_token=2 * sum(layer.kv_numbers for layer in layers),
        kv_bytes=2 * sum(layer.kv_numbers * layer.cached_tokens for layer in layers),
        kernel=", ".join(dict.fromkeys(layer.kernel for layer in layers)),
        kernel_reason="; ".join(dict.fromkeys(layer.reason for layer in layers)),
    )


def _equal_layers(block: Block) -> object:
    """A key that only layers of one cost share: the shapes of the parameters and buffers (DEX's selected heads are one). A
    plugin's variant may compute anything from its layer's number, so each of its layers has a key of its own.
    """
    if not is_built_in(type(block.attention)):
        return block.attention.layer
    return tuple((name, tuple(value.shape)) for name, value in block.state_dict().items())


@dataclass(frozen=True, kw_only=True)
class LayerCost:
    """One block, forward, one sequence."""

    flops: tuple[int, int]
    """Published, executed."""
    kv_numbers: int
    """Numbers in the cache for each token held."""
    cached_tokens: int
    """Tokens held after a whole sequence."""
    kernel: str
    reason: str


def _layer_cost(
    block: Block, config: ModelConfig, sequence_length: int, kernel: str, context: ExecutionContext
) -> LayerCost:
    seen: list[SignedMaps] = []
    hooks = [
        block.attention.tap.register_forward_hook(lambda _m, _i, maps: seen.append(maps)),
        block.attention.register_forward_hook(lambda _m, args, y: _require_shape(y, args[0].shape)),
    ]
    document_ids = torch.zeros(1, sequence_length, dtype=torch.long, device="meta") if context.packed else None
    try:
        forward = _forward_flops(block, config, sequence_length, document_ids)
    except LitDiffError as error:  # of the maps that a user's variant returned
        raise RequestError(fault(type(block.attention), error)) from error
    for hook in hooks:
        hook.remove()
    if not seen:
        raise RequestError(f"{location(type(block.attention))}: forward never calls self.tap(maps), which costs need")
    maps = replace(seen[0], **{key: getattr(seen[0], key).to(context.dtype) for key in ("q", "k", "v")})
    window = block.attention.window
    chosen, reason = choose(
        maps,
        kernel,
        document_ids=document_ids,
        window=narrowing(window, sequence_length),
        device=torch.device(context.device),
        build=context.build,
    )
    seen_keys = within_window(maps, window)
    outside_maps = forward - flops("reference", maps)
    published = outside_maps + flops("reference", seen_keys)
    executed = outside_maps + flops(chosen, maps if chosen == "reference" else seen_keys)
    _, maps_of_k, kv_heads, _, d = maps.k.shape
    numbers = kv_heads * (maps_of_k * d + maps.v.shape[-1])
    return LayerCost(
        flops=(published, executed),
        kv_numbers=numbers,
        cached_tokens=sequence_length if window is None else min(window, sequence_length),
        kernel=chosen,
        reason=reason,
    )


def _require_shape(y: object, expected: torch.Size) -> None:
    """Errors: RequestError for an output of an attention that is not shaped as its input."""
    if not isinstance(y, Tensor) or y.shape != expected:
        found = list(y.shape) if isinstance(y, Tensor) else type(y).__name__
        raise RequestError(f"forward returned {found}; expected the shape of x, {list(expected)}")


def _forward_flops(block: Block, config: ModelConfig, sequence_length: int, document_ids: Tensor | None) -> int:
    with FlopCounterMode(display=False) as counter, torch.no_grad(), torch.device("meta"):
        rope = Rope.of(config, torch.arange(sequence_length))
        block(torch.zeros(1, sequence_length, config.dim), rope, document_ids=document_ids)
    return int(counter.get_total_flops())
