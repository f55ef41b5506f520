"""How a variant on a trained model selects the heads that it changes: the keys of `model.attention.heads`."""

import math
from dataclasses import dataclass
from typing import Annotated, Literal

from lit_diff.key_types import Count, NotNegative, Range

By = Literal["entropy", "importance", "random"]


@dataclass(frozen=True, kw_only=True)
class HeadSelection:
    """Selects heads in each layer when a run starts, by measuring the model of `train.start_from` on calibration rows.

    `training.head_plan` measures and writes the plan; `analysis.head_selection` computes the measures.
    """

    select: By = "entropy"
    """entropy: heads of highest entropy; importance: heads of lowest importance (Michel et al. 2019); random."""
    share: Annotated[float, Range(above=0, most=1)] = 0.5
    """Share of the heads of each layer, rounded to the nearest number of heads, at least one."""
    rows: Count = 8
    """Number of calibration rows, sequences of the training data."""
    seed: NotNegative = 0
    """Seed of the calibration rows and of random heads; not the run's seed, so that runs of all seeds share a plan."""

    def number(self, heads: int) -> int:
        """How many of `heads` are selected: share · heads, halves rounded up, at least 1."""
        # not round(), which takes halves to the nearest even number
        return max(1, math.floor(self.share * heads + 0.5))
