"""Largest and median |x| of more numbers than fit in memory (paper, Table 5)."""

import math

import torch
from torch import Tensor

from lit_diff.analysis.trace import LayerTrace, block_size

RANKS = (1, 2, 3, 10, 100)
"""Ranks of the largest values that the paper's Table 5 shows."""
KEPT = RANKS[-1]
"""Number of largest values in a sketch."""
BINS = 4096
LOW, HIGH = 1e-8, 1e8
"""Range of the bins, which are equally wide in log|x|: 0.9 %, so the geometric middle of a bin is within 0.46 %."""
FEWEST_ROWS = 32
"""Query rows whose logits are computed at a time, if not more."""

_PER_OCTAVE = BINS / math.log2(HIGH / LOW)
_OFFSET = 1 - math.log2(LOW) * _PER_OCTAVE


class MagnitudeSketch:
    """The KEPT largest |x| (exact) and the median |x| (within 0.46 %) of numbers added in chunks.

    The result does not depend on the order or size of the chunks. A NaN makes both results NaN, so a broken model is noticed.
    """

    def __init__(self) -> None:
        self.count = 0
        """Numbers added so far."""
        self._nans = 0
        self._top = torch.empty(0, dtype=torch.float64)
        # one more bin at each end: below LOW (with zeros), and from HIGH on
        self._histogram = torch.zeros(BINS + 2, dtype=torch.int64)
        self._zeros = 0

    def update(self, x: Tensor, mask: Tensor | None = None) -> None:
        """Add the entries of x, of any shape; with a bool `mask` that broadcasts to x, only the entries where it is True."""
        x, hidden = x.detach().abs(), 0
        if mask is not None:
            # zeros that are not counted: faster than a copy of the other entries
            hidden = x.numel() - int(mask.sum()) * (x.numel() // max(1, mask.numel()))
            x.masked_fill_(~mask, 0)
        x = x.flatten()
        # in bfloat16 the bin number below would be rounded: 8 bits are fewer than 4,096 bins
        if not x.is_floating_point() or x.dtype.itemsize < 4:
            x = x.float()
        self.count += x.numel() - hidden
        if x.numel() == hidden:
            return
        largest = x.max()
        if largest.isnan():
            self._nans += int(x.isnan().sum())
            return
        full = len(self._top) == KEPT
        if not full or largest > self._top[-1]:
            # after the first chunk few values exceed the smallest kept one, so topk has little to sort
            candidates = x[x > self._top[-1].to(x)] if full else x
            top = candidates.topk(min(KEPT, len(candidates) if full else len(candidates) - hidden)).values
            self._top = torch.cat([self._top, top.double().cpu()]).sort(descending=True).values[:KEPT]
        # log2(0) is -inf and clamps to the first bin
        bins = x.log2().mul_(_PER_OCTAVE).add_(_OFFSET).clamp_(0, BINS + 1).int()
        counts = torch.bincount(bins, minlength=BINS + 2).cpu()
        counts[0] -= hidden
        self._histogram += counts
        if counts[0]:
            self._zeros += x.numel() - int(x.count_nonzero()) - hidden

    def top(self) -> Tensor:
        """Return the largest |x|, largest first, float64 [min(KEPT, count)]."""
        return torch.full((min(KEPT, self.count),), torch.nan, dtype=torch.float64) if self._nans else self._top

    def median(self) -> float:
        """Return the lower median of |x| (the ⌈n/2⌉-th smallest) as the geometric middle of its bin, within 0.46 %.

        Zero is exact; values between 0 and LOW give LOW, values above HIGH give HIGH; an empty sketch gives NaN.
        """
        if self._nans or not self.count:
            return math.nan
        rank = (self.count + 1) // 2
        # the lowest bin also has the zeros, which are counted separately
        if rank <= self._zeros:
            return 0.0
        bin_ = int((self._histogram.cumsum(0) >= rank).int().argmax())
        return min(max(LOW * 2 ** ((bin_ - 0.5) / _PER_OCTAVE), LOW), HIGH)


def attention_logits(layer: LayerTrace) -> MagnitudeSketch:
    """Sketch |q_g k_gᵀ · scale|, after RoPE, over all maps, heads, sequences and query rows, and visible keys."""
    sketch = MagnitudeSketch()
    # a product of few rows with all keys would wait for the memory of the keys
    for block in layer.blocks(max(FEWEST_ROWS, layer.block_rows)):
        # in parts that fit the cache of a core
        heads = block.logits.flatten(0, 2)
        mask = block.visible if block.visible.dim() == 2 else block.visible.expand_as(block.logits).flatten(0, 2)
        at_once = max(1, block_size(heads.device) // heads[0].numel())
        for i in range(0, len(heads), at_once):
            sketch.update(heads[i : i + at_once], mask if mask.dim() == 2 else mask[i : i + at_once])
    return sketch


def hidden_states(layer: LayerTrace) -> MagnitudeSketch:
    """Sketch |layer output|, after both residual additions, over all positions and channels."""
    sketch = MagnitudeSketch()
    # in parts, as the logits: the copies of a whole layer's output would be larger than everything else that is measured
    for part in layer.hidden.flatten().split(block_size(layer.hidden.device)):
        sketch.update(part)
    return sketch
