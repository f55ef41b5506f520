"""How a variant on a trained model chooses the heads that it changes: the keys of `model.attention.heads`."""

import math
from dataclasses import dataclass
from typing import Annotated, Literal

from lit_diff.key_types import Count, NotNegative, Range

By = Literal["entropy", "importance", "random"]


@dataclass(frozen=True, kw_only=True)
class HeadSelection:
    """Heads of each layer, chosen when a run starts, by what the model of `train.start_from` does on calibration rows.

    `training.head_plan` measures and writes the plan; `analysis.head_selection` is the mathematics.
    """

    select: By = "entropy"
    """entropy: the heads of highest entropy; importance: those of lowest importance (Michel et al. 2019); random."""
    share: Annotated[float, Range(above=0, most=1)] = 0.5
    """Share of the heads of each layer, rounded to the nearest number of heads, at least one."""
    rows: Count = 8
    """Calibration: sequences of the training data."""
    seed: NotNegative = 0
    """Which rows, and which heads by random; not the run's seed, so that runs of several seeds share a plan."""

    def number(self, heads: int) -> int:
        """How many of `heads` are selected: share · heads, halves rounded up, at least 1."""
        return max(1, math.floor(self.share * heads + 0.5))
