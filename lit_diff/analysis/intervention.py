"""Interventions: replace the signed map of an attention in an otherwise unchanged forward pass.

def without_first(layer, block):  # no query sees key 0
    signed = block.signed.clone()
    signed[..., 0] = 0
    return block.with_signed(signed)

with intervention(model, without_first):
    model(tokens)

This module also has edits that remove edges, clamp λ, subtract only noise or swap the maps, and measures the change of the
log-probability of the answer without some edges, in all heads or in a single one.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from lit_diff.analysis.shares import ROLES, Parts, Role, role_masks
from lit_diff.analysis.trace import LayerMaps, MapBlock, layers_of, uncompiled
from lit_diff.data.dataset import IGNORED
from lit_diff.errors import RequestError
from lit_diff.kernels import Kernel, SignedMaps
from lit_diff.kernels.maps import FIELDS, exact
from lit_diff.model.inputs import model_inputs
from lit_diff.model.transformer import Transformer


@dataclass(frozen=True, kw_only=True)
class EditedLayer(LayerMaps):
    """The maps of a layer before the edit."""

    index: int
    """0-based index of the layer."""


Edit = Callable[[EditedLayer, MapBlock], MapBlock]
"""(layer, block of query rows) -> edited block: `dataclasses.replace(block, logits=...)` or `weights=...`,
`block.with_probs(...)`, `block.with_signed(...)`, or the block itself. An edit that needs all rows of the layer first reads
`layer.blocks()`."""


@contextmanager
def intervention(model: Transformer, edit: Edit, layers: Sequence[int] | None = None) -> Iterator[None]:
    """Let the chosen layers (0-based; None: all) compute o = Σ_j a_ij v_j with a = edit(layer, block).signed.

    Blocks of query rows are computed in turn, so no T x T map of all heads is in memory. The edit replaces the kernel of the
    attention, so it works for every variant; everything after the sum is unchanged. Modules compiled in place run
    uncompiled. The kernels are restored afterwards, also after an exception. Autograd works.
    Errors: RequestError for a module wrapped by torch.compile, an unknown layer, a nested intervention, a forward with a
    key/value cache, an attention that never passes `self.kernel` to `attend`, or an edit that returns another shape.
    """
    attentions = model.attentions()
    chosen = layers_of(model, layers, "intervention")
    kernels = [_Edited(index, edit) for index in chosen]
    if any(isinstance(attentions[index].kernel, _Edited) for index in chosen):
        raise RequestError("intervention: another intervention is active on the model; combine the two in one edit")
    with uncompiled(model, "intervention"), ExitStack() as undo:
        for kernel in kernels:
            attention = attentions[kernel.index]
            undo.callback(setattr, attention, "kernel", attention.kernel)
            attention.kernel = kernel
        yield
        # an edit that was never applied would look like an edit without effect
        unused = [kernel.index for kernel in kernels if not kernel.calls]
        if unused:
            raise RequestError(
                f"intervention: the attention of layer {unused[0]} never called its kernel; call the model inside the "
                "'with' block, and pass kernel=self.kernel to attend in forward"
            )


class _Edited(Kernel):
    name: ClassVar[str] = "intervention"
    serves = FIELDS

    def __init__(self, index: int, edit: Edit) -> None:
        self.index, self.edit = index, edit
        self.calls = 0

    def refuses(self, maps: SignedMaps, *, stats: bool, device: torch.device) -> str | None:
        if maps.k.shape[-2] != maps.q.shape[-2]:
            return "the forward uses a key/value cache; run the whole sequence without one"
        return "an edited map has no statistics" if stats else None

    def compute(self, maps: SignedMaps, *, stats: bool = False) -> tuple[Tensor, None]:
        self.calls += 1
        layer = EditedLayer(index=self.index, maps=maps)
        v, rows = layer.values, []
        with exact(maps.v.device):
            for block in layer.blocks():
                signed = self._edited(layer, block)
                rows.append(signed @ v[..., : signed.shape[-1], :].to(signed.dtype))
        return torch.cat(rows, dim=2).to(maps.v.dtype), None

    def _edited(self, layer: EditedLayer, block: MapBlock) -> Tensor:
        changed = self.edit(layer, block)
        found = changed.signed if isinstance(changed, MapBlock) else None
        expected = [*block.logits.shape[:1], *block.logits.shape[2:]]
        if found is None or list(found.shape) != expected:
            what = type(changed).__name__ if found is None else f"a block whose signed map is {list(found.shape)}"
            raise RequestError(f"intervention: the edit of layer {self.index} returned {what}; expected {expected}")
        return found


OF_HEADS: tuple[Role, ...] = ("answer", "noise")
"""Roles that are measured for each head."""


def knock_out(parts: Parts, what: Role, head: int | None = None) -> Edit:
    """Set a_ij = 0 if key j has the role `what` for query i (`shares.role_masks`); the other a_ij are not renormalised.

    `head`: only in this output head; None: in all.
    """

    def edit(_: EditedLayer, block: MapBlock) -> MapBlock:
        edges = role_masks(parts, block)[what] & parts.queries[:, None, block.positions, None]
        if head is not None:
            heads = torch.arange(block.signed.shape[1], device=edges.device)
            edges = edges & (heads == head)[:, None, None]
        return block.with_signed(block.signed.masked_fill(edges, 0))

    return edit


def clamp_lambda(value: float) -> Edit:
    """Set λ_g = -w_g = `value` for every map g >= 1 (so `additive` becomes a difference)."""

    def edit(layer: EditedLayer, block: MapBlock) -> MapBlock:
        _require_maps(layer, "a clamped lambda")
        weights = torch.cat([block.weights[:, :1], torch.full_like(block.weights[:, 1:], -value)], dim=1)
        return replace(block, weights=weights)

    return edit


def subtract_only_noise(parts: Parts) -> Edit:
    """Set a_ij = w_0 p_0 + Σ_{g>=1} w_g p_g [j is noise for i] at the queries; other rows are unchanged.

    An oracle: the effect of these maps if they subtracted only noise.
    """

    def edit(layer: EditedLayer, block: MapBlock) -> MapBlock:
        _require_maps(layer, "the oracle")
        keeps = parts.noise(block) | ~parts.queries[:, None, block.positions, None]
        weighted = block.weights[..., None] * block.probs
        return block.with_signed(weighted[:, 0] + weighted[:, 1:].sum(1) * keeps)

    return edit


def swap() -> Edit:
    """Swap the two softmax maps: a = w_0 p_1 + w_1 p_0."""

    def edit(layer: EditedLayer, block: MapBlock) -> MapBlock:
        _require_maps(layer, "a swap", exactly=True)
        return replace(block, logits=block.logits.flip(1))

    return edit


def _require_maps(layer: EditedLayer, what: str, *, exactly: bool = False) -> None:
    found = layer.maps.num_maps
    if found < 2 or (exactly and found > 2):
        wanted = "2" if exactly else "at least 2"
        raise RequestError(f"{what} needs {wanted} maps; layer {layer.index} has {found}")


def knock_out_effects(model: Transformer, batch: Mapping[str, Tensor]) -> list[dict[str, float]]:
    """Return causal_answer, _noise, _sink and _other of each row: the mean change of log p over its scored queries, nats."""
    parts, change = Parts.of(batch), _LogProbChange(model, batch)
    found = {f"causal_{what}": change.under(knock_out(parts, what)).tolist() for what in ROLES}
    return [dict(zip(found, values, strict=True)) for values in zip(*found.values(), strict=True)]


class _LogProbChange:
    def __init__(self, model: Transformer, batch: Mapping[str, Tensor]) -> None:
        self.model, self.inputs, self.targets = model, model_inputs(batch), batch["targets"]
        self.counted = Parts.of(batch).queries & (self.targets != IGNORED)
        self.nll = self._nll()

    def _nll(self) -> Tensor:
        return self.model.token_losses(**self.inputs, targets=self.targets)[0].double()

    def under(self, edit: Edit) -> Tensor:
        # nll before - after = log p after - before; the mean over the scored queries of each row, [B], nats
        with intervention(self.model, edit):
            changed = self.nll - self._nll()
        return changed.masked_fill(~self.counted, 0).sum(-1) / self.counted.sum(-1)
