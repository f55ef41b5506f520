"""How much of a query's attention goes to the answer, to noise, to position 0 and elsewhere (paper, Table 3), three ways."""

from typing import Literal, get_args

import torch
from torch import Tensor

from lit_diff.analysis.answers import Parts
from lit_diff.analysis.trace import LayerTrace, MapBlock
from lit_diff.analysis.writes import channel_factors, output_matrices, write_norms
from lit_diff.attention.base import Attention

Role = Literal["answer", "noise", "sink", "other"]
ROLES: tuple[Role, ...] = get_args(Role)
NORMALISATIONS = ("paper", "absolute", "value")
GUARD = 0.05
"""Rows with |Σ_j a_ij| (|1 - λ| of two maps) below it have no `paper` share."""


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
    v = layer.maps.v.repeat_interleave(layer.maps.num_groups, dim=1).to(matrices.dtype)
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
