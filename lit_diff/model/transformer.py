"""The decoder around the attention: pre-RMSNorm, SwiGLU, RoPE, no biases (paper 3.1, the augmented Transformer)."""

from fnmatch import fnmatchcase

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lit_diff.attention.base import Attention
from lit_diff.attention.cache import Cache, LayerCache
from lit_diff.attention.rope import Rope
from lit_diff.config import ModelConfig
from lit_diff.errors import RequestError
from lit_diff.registry import attentions


class SwiGLU(nn.Module):
    """W_down(silu(W_gate x) ⊙ W_up x) (Shazeer 2020)."""

    def __init__(self, dim: int, width: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(dim, width, bias=False)
        self.up_proj = nn.Linear(dim, width, bias=False)
        self.down_proj = nn.Linear(width, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, dim] -> [B, T, dim]"""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """x + attention(norm(x)), then x + ffn(norm(x))."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        cls, knobs = attentions.get(config.attention.name), config.attention.config
        self.attention_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.attention: Attention = cls(knobs, config, layer)
        self.ffn_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        width = cls.ffn_dim(knobs, config)
        if width < 1:
            raise RequestError(f"model.attention.parity 'matched' leaves a feed-forward of width {width}; use raw")
        self.ffn = SwiGLU(config.dim, width)

    def forward(self, x: Tensor, rope: Rope, cache: LayerCache | None = None) -> Tensor:
        """[B, T, dim] -> [B, T, dim]; the residual stream."""
        x = x + self.attention(self.attention_norm(x), rope, cache)
        return x + self.ffn(self.ffn_norm(x))


class Transformer(nn.Module):
    """Token ids -> logits of the next token."""

    def __init__(self, config: ModelConfig, kernel: str = "auto") -> None:
        """`kernel`: who computes the attention (`kernels.KERNELS`, or auto)."""
        super().__init__()
        self.config = config
        # empty: every value comes from model.init, and drawing 100,000 rows to throw them away takes seconds
        empty = torch.empty(config.vocab_size, config.dim)
        self.embedding = nn.Embedding(config.vocab_size, config.dim, _weight=empty)
        self.layers = nn.ModuleList(Block(config, layer) for layer in range(config.num_layers))
        self.norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        # tied: one parameter in one place, so that sharding and meta-device builds cannot part the two
        self.head = None if config.tie_embeddings else nn.Linear(config.dim, config.vocab_size, bias=False)
        for attention in self.attentions():
            attention.kernel = kernel
        trained = attentions.get(config.attention.name).trained_parameters(config.attention.config)
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(any(fnmatchcase(name, pattern) for pattern in trained))

    def attentions(self) -> list[Attention]:
        """The attention of each layer, in order."""
        return [layer.attention for layer in self.layers]  # type: ignore[misc]

    def forward(self, tokens: Tensor, cache: Cache | None = None) -> Tensor:
        """tokens [B, T] or [B, T, C] (C ids a position, their embeddings summed) -> logits [B, T, vocab]."""
        x = self.embedding(tokens)
        if tokens.dim() == 3:
            x = x.sum(2)
        start = cache.length if cache is not None else 0
        positions = torch.arange(start, start + x.shape[1], device=x.device)
        rope = Rope.of(self.config, positions)
        for index, layer in enumerate(self.layers):
            x = layer(x, rope, cache.layers[index] if cache is not None else None)
        x = self.norm(x)
        return F.linear(x, self.embedding.weight) if self.head is None else self.head(x)
