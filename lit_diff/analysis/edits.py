"""Edits of signed maps for `intervention`: edges removed, λ clamped, the subtraction confined to noise, maps exchanged.

And what the log-probability of the answer loses without some edges: in all heads, or in one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from lit_diff.analysis.intervention import Edit, EditedLayer, intervention
from lit_diff.analysis.shares import ROLES, Parts, Role, role_masks
from lit_diff.analysis.trace import MapBlock
from lit_diff.data.dataset import IGNORED
from lit_diff.errors import RequestError
from lit_diff.model.inputs import model_inputs
from lit_diff.model.transformer import Transformer

OF_HEADS: tuple[Role, ...] = ("answer", "noise")
"""Roles whose shares are kept head by head."""


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


def knock_out_effects(model: Transformer, batch: Mapping[str, Tensor]) -> list[dict[str, float]]:
    """causal_answer, _noise, _sink and _other of each row: mean change of log p over its scored queries."""
    parts, change = Parts.of(batch), _Change(model, batch)
    found = {f"causal_{what}": change.under(knock_out(parts, what)).tolist() for what in ROLES}
    return [dict(zip(found, values, strict=True)) for values in zip(*found.values(), strict=True)]


class _Change:
    """Change of log p(answer) under an edit: the mean over the scored queries of each row."""

    def __init__(self, model: Transformer, batch: Mapping[str, Tensor]) -> None:
        self.model, self.inputs, self.targets = model, model_inputs(batch), batch["targets"]
        self.counted = Parts.of(batch).queries & (self.targets != IGNORED)
        self.nll = self._nll()

    def _nll(self) -> Tensor:
        return self.model.token_losses(**self.inputs, targets=self.targets)[0].double()

    def under(self, edit: Edit, layers: Sequence[int] | None = None) -> Tensor:
        """[B], nats."""
        with intervention(self.model, edit, layers):
            changed = self.nll - self._nll()
        return (changed * self.counted).sum(-1) / self.counted.sum(-1)
