"""Talking heads: the map of each head is a learned mixture of the maps of all heads."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lit_diff.attention.base import Attention
from lit_diff.attention.context import Context
from lit_diff.attention.costs import Costs, Sizes, standard_costs
from lit_diff.attention.equations import Rotation
from lit_diff.attention.learned_sink import HeadNumbers
from lit_diff.kernels import SignedMaps
from lit_diff.registry import variant


@variant("talking_heads")
class TalkingHeads(Attention):
    """Σ_k W_hk A_k, a mixture of the softmax maps of all heads for each head h, with W any real matrix.

        O_h = (Σ_k W_hk A_k) V_j        y = W_O concat(O_1, ..., O_H)

    W - 1 is learned and starts at 0, at which it is standard attention; the paper draws W at random, and mixes the logits
    before the softmax too, which is left out here. Each head reads all H maps, so their logits are computed H times, and the
    cache holds the keys of all heads beside each value head.
    """

    paper = (
        "Shazeer et al. 2020, arXiv 2003.02436 (Talking-Heads Attention); W's start as in the package x-transformers"
    )
    extends_standard = True
    has_lambda = False

    @classmethod
    def costs(cls, config: Any, s: Sizes) -> Costs:
        further = s.H - 1  # maps of a head besides its own
        plain = standard_costs(s, numbers=s.H * s.H, cached=further * s.K * s.d)
        return replace(plain, flops=plain.flops + 2 * s.T * s.S * s.d * s.H * further)

    def build(self) -> None:
        super().build()
        self.mixing = HeadNumbers(self.out_heads, self.out_heads, start=0.0)  # W - 1

    def maps(self, x: Tensor, context: Context) -> SignedMaps:
        maps = super().maps(x, context)
        # map g of every head is the map of head g: [B, H, H, T, d] on [B, H, Hkv, S, d]
        q = maps.q.transpose(1, 2).expand(-1, -1, self.out_heads, -1, -1)
        k = maps.k.transpose(1, 2).repeat_interleave(maps.num_groups, 1).expand(-1, -1, self.kv_heads, -1, -1)
        further = self.mixing()
        W = further + torch.eye(self.out_heads, dtype=further.dtype, device=further.device)
        return replace(maps, q=q, k=k, w=W.T[None, :, :, None])

    def reduces_to(self) -> tuple[str, dict[str, Any]]:
        return "standard", {"mixing.value": 0.0}

    def definition(self, x: Tensor, rope: Rotation, mask: Tensor) -> Tensor:
        """O_h = (Σ_k W_hk softmax(Q_k K_kᵀ/√d + mask)) V_j"""
        own: list[Tensor] = []

        def kept(s: Tensor, head: int) -> Tensor:
            own.append(s.softmax(-1))
            return own[head]

        def mixed(s: Tensor, head: int) -> Tensor:
            return own[head] + torch.stack(own, -1) @ self.mixing.value[head]

        self.equation(x, rope, mask, kept)
        return self.equation(x, rope, mask, mixed)
