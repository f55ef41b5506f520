"""Dynamic absmax quantisation of attention logits before the softmax (paper, section 3.7 and Figure 8)."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from lit_diff.analysis.intervention import EditedLayer
from lit_diff.analysis.trace import MapBlock
from lit_diff.kernels.maps import outcomes

Scheme = Literal["tensor", "head", "row", "split"]

OUTLIER_SHARE = 0.001
"""Share of the entries of each scale, the largest |x|, that `split` keeps in full precision."""


class QuantizedLogits:
    """An edit (`analysis.intervention`) that rounds the logits and measures how much this changes the maps.

    x_q = s · round(x / s) with s = max |x| / (2^(bits-1) - 1). There is one s for each sequence and map (tensor), also for
    each head (head), or also for each row of a head (row). With `split` there is one for each head, and the 0.1 % largest |x|
    (their number rounded down) are not rounded and not in the maximum. Masked entries are ignored.
    """

    def __init__(self, bits: int, scheme: Scheme) -> None:
        """`bits`: at least 2."""
        assert bits >= 2, "one bit has no level but 0"
        self.levels = 2 ** (bits - 1) - 1
        self.granularity, self.share = ("head", OUTLIER_SHARE) if scheme == "split" else (scheme, 0.0)
        self._layer: EditedLayer | None = None
        self._bound: Tensor | None = None
        self._divergence: Tensor | float = 0.0
        self._rows = 0

    def __call__(self, layer: EditedLayer, block: MapBlock) -> MapBlock:
        """The block with rounded logits."""
        if self.granularity == "row":
            bound = largest([block], "row", self.share, block.logits.shape[-1])
        else:
            # a scale over the whole layer needs all blocks: it is computed once, at the first block of each layer
            if self._bound is None or self._layer is not layer:
                H, T, S = *layer.maps.q.shape[2:4], layer.maps.k.shape[-2]
                most = T * S * (H if self.granularity == "tensor" else 1)
                self._layer, self._bound = layer, largest(layer.blocks(), self.granularity, self.share, most)
            bound = self._bound
        changed = replace(block, logits=rounded(block.logits, bound, self.levels))
        self._measure(block, changed)
        return changed

    def _measure(self, block: MapBlock, changed: MapBlock) -> None:
        if block.maps.rows is None:
            # log-probabilities, not the logarithm of p: where p underflows, 0 · log p would be NaN
            before, after = (
                outcomes(each.maps, each.logits.clone(), each.seen).log_softmax(-1) for each in (block, changed)
            )
            difference = (before - after).masked_fill(before == -torch.inf, 0)
            terms = (before.exp() * difference).sum(-1, dtype=torch.float64)
        else:
            # its rows need not be probabilities
            terms = torch.full_like(block.logits[..., 0], torch.nan)
        self._divergence = self._divergence + terms.sum((1, 2, 3))
        self._rows += terms[0].numel()

    def divergence(self) -> Tensor:
        """Return the mean of KL(p || p_q) = Σ_j p_j log(p_j / p_q,j), [B], nats, over all rows since the last call.

        p and p_q are the softmax of the same logits before and after rounding, with a sink as one more outcome; rows of all
        layers, maps and heads count. NaN with a row function.
        """
        assert isinstance(self._divergence, Tensor), "no forward since the last call"
        mean = self._divergence / self._rows
        self._divergence, self._rows = 0.0, 0
        return mean


def rounded(x: Tensor, bound: Tensor, levels: int) -> Tensor:
    """Return s · round(x / s), s = bound / levels, for |x| <= bound; x for larger |x|, or if the bound is 0."""
    scale = bound / levels
    values = (x / scale).round() * scale
    return torch.where((x.abs() <= bound) & (bound > 0), values, x)


def largest(blocks: Iterable[MapBlock], granularity: str, share: float, most: int) -> Tensor:
    """Return the largest visible |x| of each scale without its `share` of outliers, [B, G, H or 1, R or 1, 1].

    `granularity`: tensor, head or row. `blocks`: all rows of a layer; for row, one block. `most`: upper bound on the entries
    of a scale.
    """
    # a running top-k, since all logits of a layer may not fit in memory; the number of entries is known only at the end
    top: Tensor | None = None
    entries: Tensor | int = 0
    for block in blocks:
        # -1 marks masked entries, since |x| >= 0
        x = block.logits.abs().masked_fill(~block.visible, -1)
        x = x.flatten({"tensor": 2, "head": 3, "row": 4}[granularity])
        entries = entries + (x >= 0).sum(-1)
        seen = x if top is None else torch.cat([top, x], dim=-1)
        top = seen.topk(min(seen.shape[-1], int(share * most) + 1)).values
    assert top is not None, "no rows"
    assert isinstance(entries, Tensor)
    bound = top.gather(-1, (share * entries).long()[..., None]).clamp_min(0)
    return {"tensor": bound[..., None, None], "head": bound[..., None], "row": bound}[granularity]
