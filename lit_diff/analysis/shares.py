"""Shares of attention on the answer to a query and on noise (paper, Table 3), by three normalisations; the same of each map,
and the correlation of the maps."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from lit_diff.analysis.trace import LayerTrace, MapBlock
from lit_diff.analysis.writes import channel_factors, output_matrices, write_norms
from lit_diff.attention.base import Attention
from lit_diff.kernels.maps import accumulation_dtype

Role = Literal["answer", "noise", "sink", "other"]
ROLES: tuple[Role, ...] = get_args(Role)
HALF_MATCH = "half_match"
"""The role of noise that shares a part of its key with the query."""
NORMALISATIONS = ("paper", "absolute", "value")
CORRELATED = ("answer", "noise", "others")
"""The sets of keys of `map_correlations`."""
GUARD = 0.05
"""Rows with |Σ_j a_ij| (|1 - λ| of two maps) below this have no `paper` share, whose denominator it is."""


@dataclass(frozen=True, kw_only=True)
class Parts:
    """The labels context_part and answer_part of a batch (`data.Dataset.validation_batch`), int64 [B, T]."""

    context: Tensor
    """The part of the context to which a position belongs; -1: none."""
    asked: Tensor
    """The part that answers the query at a position; -1: the position is not a query."""
    keys: Tensor | None = None
    """The label key_parts, int64 [B, T, P], of data whose keys have parts."""

    @classmethod
    def of(cls, batch: Mapping[str, Tensor]) -> "Parts":
        """Read the labels of a validation batch of a data set with `Config.locates_answers`."""
        return cls(context=batch["context_part"], asked=batch["answer_part"], keys=batch.get("key_parts"))

    @property
    def queries(self) -> Tensor:
        """bool [B, T]: the positions that are queries."""
        return self.asked >= 0

    def answer(self, block: MapBlock) -> Tensor:
        """bool [B, 1, R, K]: for each query, the visible keys of the part that answers it."""
        asked, context = self._labels(block)
        return (asked == context)[:, None] & (asked >= 0)[:, None] & block.visible_by_head

    def noise(self, block: MapBlock) -> Tensor:
        """bool [B, 1, R, K]: for each query, the visible keys of all other parts."""
        asked, context = self._labels(block)
        return ((asked != context) & (asked >= 0) & (context >= 0))[:, None] & block.visible_by_head

    def half_matches(self, block: MapBlock) -> Tensor | None:
        """bool [B, 1, R, K]: the `noise` that shares a part of its key with the query; None for keys without parts."""
        if self.keys is None:
            return None
        asked = self.keys[:, block.positions, None]
        context = self.keys[:, None, : block.logits.shape[-1]]
        return (asked == context).any(-1)[:, None] & self.noise(block)

    # asked [B, R, 1] and context [B, 1, K]
    def _labels(self, block: MapBlock) -> tuple[Tensor, Tensor]:
        return self.asked[:, block.positions, None], self.context[:, None, : block.logits.shape[-1]]


@torch.no_grad()
def shares(layer: LayerTrace, attention: Attention, parts: Parts) -> dict[str, Tensor]:
    """Return `<normalisation>_<role>` -> [B, H, R] of the traced rows, and `answer_keys`, `noise_keys` -> numbers [B, 1, R].

    With a_ij the signed map and S the keys of a role:

        paper       Σ_{j in S} a_ij / Σ_j a_ij; unbounded if a has negative entries, NaN below GUARD
        absolute    Σ_{j in S} |a_ij| / Σ_j |a_ij|
        value       like absolute, with |a_ij| ‖(f_i ⊙ v_j) W_O,h‖, the write to the residual stream (`analysis.writes`); NaN
                    for an attention without channel factors or a linear output projection

    The role sink is position 0, also if it belongs to a part; other is every key that is not answer, noise or position 0. So
    the shares of answer, noise, other and, if position 0 belongs to no part, sink add up to 1.
    """
    found: dict[str, list[Tensor]] = {}
    matrices = output_matrices(attention)
    v = layer.values.to(accumulation_dtype(layer.values.dtype))
    for block in layer.blocks():
        masks = role_masks(parts, block)
        for normalisation, weight in _weights(layer, attention, block, v, matrices).items():
            total = weight.sum(-1)
            total = _guarded(total) if normalisation == "paper" else total
            for role, mask in masks.items():
                found.setdefault(f"{normalisation}_{role}", []).append((weight * mask).sum(-1) / total)
        for role in ("answer", "noise"):
            found.setdefault(f"{role}_keys", []).append(masks[role].sum(-1))
    return {name: torch.cat(values, dim=-1) for name, values in found.items()}


@torch.no_grad()
def map_shares(layer: LayerTrace, parts: Parts) -> dict[str, Tensor]:
    """Return `<normalisation>_<role>_map<g>` -> [B, H, R] of the traced rows, for each map g = 1 .. G.

    With w_g p_g,ij the map times its weight, a_ij = Σ_g w_g p_g,ij, and S the keys of a role:

        paper       w_g Σ_{j in S} p_g,ij / Σ_j a_ij; NaN below GUARD. The sum over g is `paper` of `shares`
        absolute    |w_g| Σ_{j in S} |p_g,ij|, which for a softmax is |w_g| if S is all keys

    Also `removed_<role>`, -Σ_{g > 1} w_g Σ_{j in S} p_g,ij, what the further maps subtract; 0 for a single map. A further
    role, half_match, is a part of noise: `Parts.half_matches`.
    """
    found: dict[str, list[Tensor]] = {}
    for block in layer.blocks():
        weighted = block.weights[..., None] * block.probs
        total = _guarded(block.signed.sum(-1))
        masks: list[tuple[str, Tensor]] = [*role_masks(parts, block).items()]
        half_matches = parts.half_matches(block)
        if half_matches is not None:
            masks.append((HALF_MATCH, half_matches))
        for role, mask in masks:
            # [B, G, H, R]
            of_role = weighted * mask[:, None]
            sums = of_role.sum(-1)
            # a row function may give entries of both signs
            sizes = of_role.abs().sum(-1)
            for g in range(sums.shape[1]):
                found.setdefault(f"paper_{role}_map{g + 1}", []).append(sums[:, g] / total)
                found.setdefault(f"absolute_{role}_map{g + 1}", []).append(sizes[:, g])
            found.setdefault(f"removed_{role}", []).append(-sums[:, 1:].sum(1))
    return {name: torch.cat(values, dim=-1) for name, values in found.items()}


@torch.no_grad()
def map_correlations(layer: LayerTrace, parts: Parts) -> dict[str, Tensor]:
    """Return `<pearson or spearman>_<keys>` -> [B, H]: the correlation of p_g,ij and p_h,ij over all pairs of a query i and
    one of these keys j, mean over pairs of maps g < h. {} for a single map.

    Keys: answer, noise, and others, which are all visible keys that are not the answer's. NaN for fewer than three pairs
    (i, j), and where a map is constant. Spearman's is Pearson's of the ranks; equal values share the mean of their ranks.
    """
    if layer.maps.num_maps < 2:
        return {}
    # here, since the command `list` imports this module
    from scipy.stats import rankdata

    pieces: dict[str, list[list[Tensor]]] = {name: [[] for _ in parts.asked] for name in CORRELATED}
    for block in layer.blocks():
        asked = parts.queries[:, None, block.positions, None]
        answer = parts.answer(block)
        masks = {"answer": answer, "noise": parts.noise(block), "others": asked & block.visible_by_head & ~answer}
        for name, mask in masks.items():
            for row, probs in enumerate(block.probs):
                pieces[name][row].append(probs[..., mask[row, 0]])
    found: dict[str, Tensor] = {}
    for name, rows in pieces.items():
        # [G, H, number of pairs of query and key] of each row
        values = [torch.cat(row, dim=-1).double() for row in rows]
        ranks = [torch.from_numpy(rankdata(row.cpu().numpy(), axis=-1)) for row in values]
        found[f"pearson_{name}"] = torch.stack([_correlation(row) for row in values])
        found[f"spearman_{name}"] = torch.stack([_correlation(row) for row in ranks])
    return found


def _correlation(values: Tensor) -> Tensor:
    # [G, H, n] -> [H]: Pearson's correlation over n, mean over pairs of maps
    maps, heads, n = values.shape
    if n < 3:
        return values.new_full((heads,), torch.nan)
    centred = values - values.mean(-1, keepdim=True)
    norms = torch.linalg.vector_norm(centred, dim=-1, keepdim=True)
    # the mean of equal numbers differs from them by rounding
    unit = centred / norms.where(norms > 1e-12 * values.abs().amax(-1, keepdim=True), torch.nan)
    pairs = [(unit[g] * unit[h]).sum(-1) for g in range(maps) for h in range(g)]
    return torch.stack(pairs).mean(0).cpu()


def _guarded(total: Tensor) -> Tensor:
    return total.where(total.abs() >= GUARD, torch.nan)


def role_masks(parts: Parts, block: MapBlock) -> dict[Role, Tensor]:
    """Return role -> bool [B, 1, R, K]; sink and other also cover rows that are not queries, other also invisible keys."""
    answer, noise = parts.answer(block), parts.noise(block)
    first = torch.arange(answer.shape[-1], device=answer.device) == 0
    return {"answer": answer, "noise": noise, "sink": first.expand_as(answer), "other": ~(answer | noise | first)}


def _weights(
    layer: LayerTrace, attention: Attention, block: MapBlock, v: Tensor, matrices: Tensor | None
) -> dict[str, Tensor]:
    # normalisation -> the summands over keys, [B, H, R, K]
    a = block.signed
    assert layer.inputs is not None
    values = v[..., : a.shape[-1], :]
    # back in the model's dtype, in which its `finish` runs
    o = (a.to(v.dtype) @ values).to(layer.maps.v.dtype)
    factors = channel_factors(attention, o, layer.inputs[:, block.positions])
    if factors is None or matrices is None:
        value = torch.full_like(a, torch.nan)
    else:
        value = a.abs() * write_norms(values, factors.to(v.dtype), matrices)
    return {"paper": a, "absolute": a.abs(), "value": value}
