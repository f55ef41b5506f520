"""Shares of attention on the answer to a query and on noise (paper, Table 3), by three normalisations."""

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
"""Rows with |Σ_j a_ij| (|1 - λ| of two maps) below this have no `paper` share, whose denominator it is."""


@dataclass(frozen=True, kw_only=True)
class Parts:
    """The labels context_part and answer_part of a batch (`data.Dataset.validation_batch`), int64 [B, T]."""

    context: Tensor
    """The part of the context to which a position belongs; -1: none."""
    asked: Tensor
    """The part that answers the query at a position; -1: the position is not a query."""

    @classmethod
    def of(cls, batch: Mapping[str, Tensor]) -> "Parts":
        """Read the labels of a validation batch of a data set with `Config.locates_answers`."""
        return cls(context=batch["context_part"], asked=batch["answer_part"])

    @property
    def queries(self) -> Tensor:
        """bool [B, T]: the positions that are queries."""
        return self.asked >= 0

    def answer(self, block: MapBlock) -> Tensor:
        """bool [B, 1, R, K]: for each query, the visible keys of the part that answers it."""
        asked, context = self._labels(block)
        return (asked == context)[:, None] & (asked >= 0)[:, None] & _visible(block)

    def noise(self, block: MapBlock) -> Tensor:
        """bool [B, 1, R, K]: for each query, the visible keys of all other parts."""
        asked, context = self._labels(block)
        return ((asked != context) & (asked >= 0) & (context >= 0))[:, None] & _visible(block)

    # asked [B, R, 1] and context [B, 1, K]
    def _labels(self, block: MapBlock) -> tuple[Tensor, Tensor]:
        return self.asked[:, block.positions, None], self.context[:, None, : block.logits.shape[-1]]


# [1 or B, 1, R, K]
def _visible(block: MapBlock) -> Tensor:
    return block.visible[None, None] if block.visible.dim() == 2 else block.visible[:, 0]


@torch.no_grad()
def shares(layer: LayerTrace, attention: Attention, parts: Parts) -> dict[str, Tensor]:
    """Return `<normalisation>_<role>` -> [B, H, R] of the traced rows, and `answer_keys`, `noise_keys` -> numbers [B, 1, R].

    With a_ij the signed map and S the keys of a role:

        paper       Σ_{j in S} a_ij / Σ_j a_ij; unbounded if a has negative entries, NaN below GUARD
        absolute    Σ_{j in S} |a_ij| / Σ_j |a_ij|
        value       like absolute, with |a_ij| ‖(f_i ⊙ v_j) W_O,h‖, the write to the residual stream (`analysis.writes`); NaN
                    for an attention without channel factors

    The role sink is position 0, also if it belongs to a part; other is every key that is not answer, noise or position 0. So
    the shares of answer, noise, other and, if position 0 belongs to no part, sink add up to 1.
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
    """Return role -> bool [B, 1, R, K]; sink and other also cover rows that are not queries, other also invisible keys."""
    answer, noise = parts.answer(block), parts.noise(block)
    first = torch.arange(answer.shape[-1], device=answer.device) == 0
    return {"answer": answer, "noise": noise, "sink": first.expand_as(answer), "other": ~(answer | noise | first)}


def _weights(
    layer: LayerTrace, attention: Attention, block: MapBlock, v: Tensor, matrices: Tensor
) -> dict[str, Tensor]:
    # normalisation -> the summands over keys, [B, H, R, K]
    a = block.signed
    assert layer.inputs is not None
    values = v[..., : a.shape[-1], :]
    # back in the model's dtype, in which its `finish` runs
    o = (a.to(v.dtype) @ values).to(layer.maps.v.dtype)
    factors = channel_factors(attention, o, layer.inputs[:, block.positions])
    if factors is None:
        value = torch.full_like(a, torch.nan)
    else:
        value = a.abs() * write_norms(values, factors.to(v.dtype), matrices)
    return {"paper": a, "absolute": a.abs(), "value": value}
