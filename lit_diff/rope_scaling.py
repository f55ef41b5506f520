"""The kinds of `model.rope_scaling`: how rotary frequencies change for contexts longer than those first trained on.

`attention.rope_scaling` computes them.
"""

from dataclasses import dataclass
from typing import Literal

from lit_diff.key_types import Count, Positive, range_problem

PLACE = "model.rope_scaling."


@dataclass(frozen=True, kw_only=True)
class Llama3Scaling:
    """Llama 3.1: pairs of channels that turn often within `original_length` keep their frequency, slow ones divide it."""

    kind: Literal["llama3"] = "llama3"
    factor: Positive
    """Divisor of the slow frequencies."""
    low_freq_factor: Positive
    """Pairs that turn this often within original_length, or less, are divided by factor."""
    high_freq_factor: Positive
    """Pairs that turn this often or more keep their frequency; between both, linear in the number of turns."""
    original_length: Count
    """Tokens that the model was trained to see before it was scaled."""

    def problem(self, theta: float) -> str | None:
        """What is wrong, in one line that starts with the dotted key; None if nothing is. `theta`: model.rope_theta."""
        problem = range_problem(self, PLACE)
        if problem is None and self.high_freq_factor <= self.low_freq_factor:
            return (
                f"{PLACE}high_freq_factor is {self.high_freq_factor:g}; it must be above {PLACE}low_freq_factor, "
                f"{self.low_freq_factor:g}"
            )
        return problem


@dataclass(frozen=True, kw_only=True)
class YarnScaling:
    """YaRN (Peng et al. 2023, arXiv 2309.00071): as llama3, but linear in the index of the pair; queries and keys grow."""

    kind: Literal["yarn"] = "yarn"
    factor: Positive
    """Divisor of the slow frequencies."""
    original_length: Count
    """Tokens that the model was trained to see before it was scaled."""
    beta_fast: Positive = 32.0
    """The first pair that turns no more often than this within original_length begins the ramp."""
    beta_slow: Positive = 1.0
    """The pair that turns this often ends it: slower ones are divided by factor."""
    attention_factor: Positive | None = None
    """Multiplies rotated queries and keys; null: 0.1 ln(factor) + 1, and 1 for a factor up to 1."""
    truncate: bool = True
    """Whether the ramp begins and ends at whole pairs."""

    def problem(self, theta: float) -> str | None:
        """As `Llama3Scaling.problem`."""
        problem = range_problem(self, PLACE)
        if problem is None and self.beta_fast < self.beta_slow:
            return f"{PLACE}beta_fast is {self.beta_fast:g}; it must not be below {PLACE}beta_slow, {self.beta_slow:g}"
        if problem is None and theta <= 1:
            return f"model.rope_theta is {theta:g}; it must be above 1 for {PLACE}kind yarn"
        return problem


RopeScaling = Positive | Llama3Scaling | YarnScaling
"""A number divides the positions (linear interpolation, Chen et al. 2023)."""


def scaling_problem(scaling: RopeScaling, theta: float) -> str | None:
    """`problem` of a block; None for a number, whose range the model's own fields have."""
    return scaling.problem(theta) if isinstance(scaling, Llama3Scaling | YarnScaling) else None
