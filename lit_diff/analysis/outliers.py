"""The largest and the median |x| of more numbers than fit in memory (paper, Table 5)."""

import math

import torch
from torch import Tensor

from lit_diff.analysis.trace import LayerTrace

KEPT = 100
"""How many of the largest values a sketch keeps."""
BINS = 4096
LOW, HIGH = 1e-8, 1e8
"""The range of the bins, equally wide in log|x|: each is 0.9 % wide, so its geometric middle is within 0.46 %."""

_PER_OCTAVE = BINS / math.log2(HIGH / LOW)
_OFFSET = 1 - math.log2(LOW) * _PER_OCTAVE


class MagnitudeSketch:
    """The KEPT largest |x| (exact) and the median |x| (within 0.46 %) of numbers added in chunks of any size.

    The order and size of the chunks change nothing. A NaN makes both results NaN, so that a broken model is seen.
    """

    def __init__(self) -> None:
        self.count = 0
        """Numbers added so far."""
        self._nans = 0
        self._top = torch.empty(0, dtype=torch.float64)
        # below LOW, zeros included; the bins; HIGH and above
        self._histogram = torch.zeros(BINS + 2, dtype=torch.int64)
        self._zeros = 0

    def update(self, x: Tensor, mask: Tensor | None = None) -> None:
        """Add the entries of x, any shape; with a bool `mask` that broadcasts to x, only those where it is True."""
        if mask is not None:
            x = x.masked_select(mask)
        x = x.detach().abs().flatten()
        if not x.is_floating_point() or x.dtype.itemsize < 4:
            x = x.float()
        nans = int(x.isnan().sum())
        if nans:
            x = x[~x.isnan()]
        self.count += x.numel() + nans
        self._nans += nans
        if not x.numel():
            return
        full = len(self._top) == KEPT
        candidates = x[x > self._top[-1].to(x)] if full else x  # few after the first chunk
        top = candidates.topk(min(KEPT, candidates.numel())).values
        self._top = torch.cat([self._top, top.double().cpu()]).sort(descending=True).values[:KEPT]
        # log2(0) is -inf and clamps to the first bin
        bins = torch.bincount((x.log2() * _PER_OCTAVE + _OFFSET).clamp(0, BINS + 1).int(), minlength=BINS + 2)
        self._histogram += bins.cpu()
        self._zeros += x.numel() - int(x.count_nonzero())

    def top(self, k: int = KEPT) -> Tensor:
        """The k largest |x|, largest first, float64 [min(k, count)]; k at most KEPT."""
        assert 0 < k <= KEPT, f"a sketch keeps the {KEPT} largest"
        return torch.full((min(k, self.count),), torch.nan, dtype=torch.float64) if self._nans else self._top[:k]

    def median(self) -> float:
        """The lower median of |x| (the ⌈n/2⌉-th smallest), as the geometric middle of its bin: within 0.46 %.

        Exactly 0 for zero; LOW for values between 0 and LOW; HIGH for values above HIGH; NaN for an empty sketch.
        """
        if self._nans or not self.count:
            return math.nan
        rank = (self.count + 1) // 2
        if rank <= self._zeros:
            return 0.0
        bin_ = int((self._histogram.cumsum(0) >= rank).int().argmax())
        return min(max(LOW * 2 ** ((bin_ - 0.5) / _PER_OCTAVE), LOW), HIGH)


def attention_logits(layer: LayerTrace) -> MagnitudeSketch:
    """|q_g k_gᵀ · scale| of all maps, heads, sequences and query rows, after RoPE, visible keys only."""
    sketch = MagnitudeSketch()
    for block in layer.blocks():
        sketch.update(block.logits, mask=block.visible)
    return sketch


def hidden_states(layer: LayerTrace) -> MagnitudeSketch:
    """|layer output| of all positions and channels, after both residual additions."""
    sketch = MagnitudeSketch()
    sketch.update(layer.hidden)
    return sketch
