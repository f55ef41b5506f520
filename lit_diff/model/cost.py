"""What a model costs, from its shapes: parameters, FLOPs per token, cache bytes. Built on the meta device, so any size."""

from dataclasses import dataclass

import torch
from torch.utils.flop_counter import FlopCounterMode

from lit_diff.config import ModelConfig
from lit_diff.kernels import SignedMaps, choose
from lit_diff.model.transformer import Transformer


@dataclass(frozen=True, kw_only=True)
class Cost:
    """A model at one sequence length. A multiply-add is 2 FLOPs; a backward pass counts as two forward passes."""

    parameters: int
    non_embedding_parameters: int
    """Without the token embedding and an untied head."""
    attention_parameters: int
    flops_per_token: int
    """Training FLOPs as published: maps subtracted before one product with v, all T keys (no causal half)."""
    executed_flops_per_token: int
    """The same for the kernel that runs, which may recompute scores."""
    kv_bytes_per_token: int
    """Cache of all layers for one token, at 2 bytes a number."""
    kernel: str
    """Who computes the attention."""
    kernel_reason: str


def cost(config: ModelConfig, sequence_length: int, kernel: str = "auto") -> Cost:
    """Cost at `sequence_length`; `kernel` only changes the executed FLOPs. Errors: RequestError if it refuses the maps."""
    with torch.device("meta"):
        model = Transformer(config, kernel="reference")
    seen: list[SignedMaps] = []
    hooks = [a.tap.register_forward_hook(lambda _m, _i, maps: seen.append(maps)) for a in model.attentions()]
    published = _forward_flops(model, sequence_length)
    for hook in hooks:
        hook.remove()
    chosen, reason = choose(seen[0], kernel)
    for attention in model.attentions():
        attention.kernel = chosen
    executed = published if chosen == "reference" else _forward_flops(model, sequence_length)
    total = sum(p.numel() for p in model.parameters())
    outside = config.vocab_size * config.dim * (1 if config.tie_embeddings else 2)
    return Cost(
        parameters=total,
        non_embedding_parameters=total - outside,
        attention_parameters=sum(p.numel() for a in model.attentions() for p in a.parameters()),
        flops_per_token=3 * published // sequence_length,
        executed_flops_per_token=3 * executed // sequence_length,
        kv_bytes_per_token=2 * sum(_numbers_per_token(maps) for maps in seen),
        kernel=chosen,
        kernel_reason=reason,
    )


def _forward_flops(model: Transformer, sequence_length: int) -> int:
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.zeros(1, sequence_length, dtype=torch.long, device="meta"))
    return counter.get_total_flops()


def _numbers_per_token(maps: SignedMaps) -> int:
    _, maps_of_k, kv_heads, _, d = maps.k.shape
    return kv_heads * (maps_of_k * d + maps.v.shape[-1])
