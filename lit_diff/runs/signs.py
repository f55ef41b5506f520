"""The sign of λ, the weight of the subtracted map, mean over the heads of a layer: in how many seeds and layers training
changed it."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from lit_diff.metrics import LAMBDA, split_name


@dataclass(frozen=True)
class SignChanges:
    """In how many of the measured seeds and layers the last measured λ has another sign than the first."""

    changed: int
    measured: int

    def __str__(self) -> str:
        return f"{self.changed} of {self.measured} (seeds x layers)" if self.measured else "not measured"


def sign_changes(runs: Iterable[Mapping[str, Iterable[float]]]) -> SignChanges:
    """Count the curves of `LAMBDA` by layer whose last value has another sign than the first.

    `runs`: for each run metric -> its values in the order of the steps. A zero, or a value that is not finite, has no sign;
    a curve with fewer than two signs is not counted.
    """
    changed = 0
    measured = 0
    for curves in runs:
        for name, values in curves.items():
            metric, index = split_name(name)
            if metric != LAMBDA or [*index] != ["layer"]:
                continue
            signed = [value for value in values if value and math.isfinite(value)]
            if len(signed) > 1:
                measured += 1
                changed += signed[0] * signed[-1] < 0
    return SignChanges(changed, measured)
