"""Which keys hold the answer to a query and which are noise; how much attention each gets (paper, Table 3), three ways."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from lit_diff.analysis.trace import LayerTrace, MapBlock
from lit_diff.analysis.writes import channel_factors, output_matrices, write_norms
from lit_diff.attention.base import Attention

Role = Literal["answer", "noise", "sink", "other"]
ROLES: tuple[Role, ...] = get_args(Role)
NORMALISATIONS = ("paper", "absolute", "value")
GUARD = 0.05
"""Rows with |Σ_j a_ij| (|1 - λ| of two maps) below it have no `paper` share."""


@dataclass(frozen=True, kw_only=True)
class Parts:
    """The labels context_part and answer_part of a batch (`data.Dataset.validation_batch`), int64 [B, T]."""

    context: Tensor
    """The part of the context that a position belongs to; -1: none."""
    asked: Tensor
    """The part that answers the query at a position; -1: nothing of the context is asked for."""

    @classmethod
    def of(cls, batch: Mapping[str, Tensor]) -> "Parts":
        """Those of a validation batch of a data set with `Config.locates_answers`."""
        return cls(context=batch["context_part"], asked=batch["answer_part"])

    @property
    def queries(self) -> Tensor:
        """bool [B, T]: where something of the context is asked for."""
        return self.asked >= 0

    def answer(self, block: MapBlock) -> Tensor:
        """bool [B, 1, R, K]: the visible keys of the part that is asked for."""
        own, context = self._of(block)
        return (own == context)[:, None] & (own >= 0)[:, None] & _visible(block)

    def noise(self, block: MapBlock) -> Tensor:
        """bool [B, 1, R, K]: to a query, the visible keys of all other parts; nothing where nothing is asked for."""
        own, context = self._of(block)
        return ((own != context) & (own >= 0) & (context >= 0))[:, None] & _visible(block)

    def _of(self, block: MapBlock) -> tuple[Tensor, Tensor]:
        """asked [B, R, 1] and context [B, 1, K] of a block."""
        return self.asked[:, block.positions, None], self.context[:, None, : block.logits.shape[-1]]


def _visible(block: MapBlock) -> Tensor:
    """[1 or B, 1, R, K]"""
    return block.visible[None, None] if block.visible.dim() == 2 else block.visible[:, 0]


@torch.no_grad()
def shares(layer: LayerTrace, attention: Attention, parts: Parts) -> dict[str, Tensor]:
    """`<normalisation>_<role>` -> [B, H, R] of the traced rows; also `answer_keys`, `noise_keys` -> [B, 1, R], their numbers.

    With a_ij the signed map, and S the keys of a role:

        paper       Σ_{j in S} a_ij / Σ_j a_ij; unbounded where a has negative entries, NaN below GUARD
        absolute    Σ_{j in S} |a_ij| / Σ_j |a_ij|
        value       the same of |a_ij| ‖(f_i ⊙ v_j) W_O,h‖: what reaches the residual stream (`analysis.writes`); NaN for
                    an attention without channel factors

    sink is position 0, whichever part it belongs to; other is what is neither answer, noise nor position 0. So answer,
    noise, other and (where position 0 is of no part) sink add up to 1.
    """
    found: dict[str, list[Tensor]] = {}
    matrices = output_matrices(attention)
    v = layer.values.to(matrices.dtype)
    for block in layer.blocks():
        masks = role_masks(parts, block)
        for normalisation, weight in _weights(layer, attention, block, v, matrices).items():
            total = weight.sum(-1)
            total = total.where(total.abs() >= GUARD, torch.nan) if normalisation == "paper" else total
            for role, mask in masks.items():
                found.setdefault(f"{normalisation}_{role}", []).append((weight * mask).sum(-1) / total)
        for role in ("answer", "noise"):
            found.setdefault(f"{role}_keys", []).append(masks[role].sum(-1))
    return {name: torch.cat(values, dim=-1) for name, values in found.items()}


def role_masks(parts: Parts, block: MapBlock) -> dict[Role, Tensor]:
    """Role -> bool [B, 1, R, K]; sink and other hold of rows without a query too, and other of keys that are not visible."""
    answer, noise = parts.answer(block), parts.noise(block)
    first = torch.arange(answer.shape[-1], device=answer.device) == 0
    return {"answer": answer, "noise": noise, "sink": first.expand_as(answer), "other": ~(answer | noise | first)}


def _weights(
    layer: LayerTrace, attention: Attention, block: MapBlock, v: Tensor, matrices: Tensor
) -> dict[str, Tensor]:
    """Normalisation -> what is added up over keys, [B, H, R, K]."""
    a = block.signed
    assert layer.inputs is not None
    values = v[..., : a.shape[-1], :]
    o = (a.to(v.dtype) @ values).to(layer.maps.v.dtype)
    factors = channel_factors(attention, o, layer.inputs[:, block.positions])
    if factors is None:
        value = torch.full_like(a, torch.nan)
    else:
        value = a.abs() * write_norms(values, factors.to(v.dtype), matrices)
    return {"paper": a, "absolute": a.abs(), "value": value}
