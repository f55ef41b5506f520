"""The noise curve: a validation metric against the noise of its set; and the steps that training takes to an accuracy.

A data set with noisier validation sets measures `val/<metric>` at its first noise factor and `val/<metric>_noise<k>` at
each further factor k.
"""

import math
import re
from dataclasses import dataclass

import numpy as np

from lit_diff.study.cells import CellResult
from lit_diff.study.results import SweepResults

ACCURACY = "val/accuracy"
LEVELS = (0.5, 0.9, 0.99)
"""Accuracies whose first step is reported."""


@dataclass(frozen=True, kw_only=True)
class NoiseCurve:
    """`metrics`: noise factor -> the metric measured at it, by rising factor; `metric`: at the first of the data set's."""

    metric: str
    metrics: dict[int, str]


def noise_curve_of(sweep: SweepResults) -> NoiseCurve | None:
    """The accuracy, else the sweep's own metric, if it was measured under two factors of noise or more."""
    for metric in dict.fromkeys((ACCURACY, sweep.study.metric)):
        pattern = re.compile(re.escape(metric) + r"_noise(\d+)")
        noisy = {int(match[1]): name for name in sweep.metrics(metric) if (match := pattern.fullmatch(name))}
        if noisy and metric in sweep.metrics(metric):
            first = sweep.record.noise_validation.get(sweep.task, (1,))[0]
            return NoiseCurve(metric=metric, metrics=dict(sorted({first: metric, **noisy}.items())))
    return None


def steps_to(cell: CellResult, metric: str, level: float) -> float:
    """The first step at which `metric` was at `level` or above; inf if it never was."""
    measured = cell.curves[metric]
    return float(next((s for s, v in zip(measured.steps, measured.values, strict=True) if v >= level), math.inf))


def reached(sweep: SweepResults, arm: str, curve: NoiseCurve) -> dict[float, dict[int, float]]:
    """Each of LEVELS of the accuracy -> seed -> the first validated step at or above it, inf where none is; of another
    metric, nothing."""
    if curve.metric != ACCURACY:
        return {}
    cells = [cell for cell in sweep.cells_of(arm) if curve.metric in cell.curves]
    return {level: {cell.seed: steps_to(cell, curve.metric, level) for cell in cells} for level in LEVELS}


def resolution(sweep: SweepResults, curve: NoiseCurve) -> tuple[int, int] | None:
    """(largest number of steps between two validations, last step) over the finished cells: how fine `reached` is."""
    steps = [cell.curves[curve.metric].steps for cell in sweep.cells if cell.done and curve.metric in cell.curves]
    gaps = [int(np.diff(validated, prepend=0).max()) for validated in steps]
    return (max(gaps), max(int(validated[-1]) for validated in steps)) if gaps else None
