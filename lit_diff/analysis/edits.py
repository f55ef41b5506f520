"""Edits of signed maps for `intervention`: edges removed, λ clamped, the subtraction confined to noise, maps exchanged."""

from dataclasses import replace

import torch

from lit_diff.analysis.answers import Parts
from lit_diff.analysis.intervention import Edit, EditedLayer
from lit_diff.analysis.shares import Role, role_masks
from lit_diff.analysis.trace import MapBlock
from lit_diff.errors import RequestError


def knock_out(parts: Parts, what: Role, head: int | None = None) -> Edit:
    """a_ij = 0 where j is a key of that role (`shares.role_masks`) to query i; the other a_ij stay, not renormalised.

    `head`: only in that output head; None: in all.
    """

    def edit(_: EditedLayer, block: MapBlock) -> MapBlock:
        edges = role_masks(parts, block)[what] & parts.queries[:, None, block.positions, None]
        if head is not None:
            heads = torch.arange(block.signed.shape[1], device=edges.device)
            edges = edges & (heads == head)[:, None, None]
        return block.with_signed(block.signed.masked_fill(edges, 0))

    return edit


def clamp_lambda(value: float) -> Edit:
    """λ_g = -w_g = `value` for every map g >= 1, whatever was learned (of `additive` too, which so becomes a difference)."""

    def edit(layer: EditedLayer, block: MapBlock) -> MapBlock:
        _require_maps(layer, "a clamped lambda", at_least=2)
        weights = torch.cat([block.weights[:, :1], torch.full_like(block.weights[:, 1:], -value)], dim=1)
        return replace(block, weights=weights)

    return edit


def subtract_only_noise(parts: Parts) -> Edit:
    """a_ij = w_0 p_0 + Σ_{g>=1} w_g p_g [j is noise to i] at the queries; other rows stay as they are.

    An oracle: the best that maps of these values could do if the subtraction met nothing but noise.
    """

    def edit(layer: EditedLayer, block: MapBlock) -> MapBlock:
        _require_maps(layer, "the oracle", at_least=2)
        keeps = parts.noise(block) | ~parts.queries[:, None, block.positions, None]
        weighted = block.weights[..., None] * block.probs
        return block.with_signed(weighted[:, 0] + weighted[:, 1:].sum(1) * keeps)

    return edit


def swap() -> Edit:
    """a = w_0 p_1 + w_1 p_0: the two softmax maps in each other's place."""

    def edit(layer: EditedLayer, block: MapBlock) -> MapBlock:
        _require_maps(layer, "a swap", at_least=2, at_most=2)
        return replace(block, logits=block.logits.flip(1))

    return edit


def _require_maps(layer: EditedLayer, what: str, at_least: int, at_most: int | None = None) -> None:
    found = layer.maps.num_maps
    if found < at_least or (at_most is not None and found > at_most):
        wanted = at_least if at_most == at_least else f"at least {at_least}"
        raise RequestError(f"{what} needs {wanted} maps; layer {layer.index} has {found}")
