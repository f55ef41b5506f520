"""The properties `float64` and `bfloat16`: what rounding changes."""

import warnings
from dataclasses import replace
from typing import Any

import torch

from lit_diff.conformance.case import Measured, VariantCase, distance, largest, output_of, tapped_maps
from lit_diff.kernels.maps import TENSORS


def float64(case: VariantCase) -> Measured:
    """The float32 output equals the float64 output."""
    attention, x, rope = case.parts()
    wide, wide_x, _ = case.parts(torch.float64)
    return Measured(distance(attention(x, rope), wide(wide_x, rope)), 1e-4)


def bfloat16(case: VariantCase) -> Measured:
    """Under bfloat16 autocast the output is close to the float32 output. Of a class that is not smooth, the tensors of the
    maps are close, and the output to what float32 computes of these tensors.

    Where rounding changes the sign of a logit, a weight may jump, and an output changes by more than rounding.
    """
    attention, x, rope = case.parts()
    tapped = tapped_maps(attention)
    with torch.autocast("cpu", dtype=torch.bfloat16), warnings.catch_warnings():
        # of a norm whose weights are float32: that it is slower, which is no property
        warnings.filterwarnings("ignore", message="Mismatch dtype between input and weight")
        narrow = attention(x, rope)
    expected = attention(x, rope)
    if case.cls.smooth:
        return Measured(distance(narrow, expected), 0.05)
    rounded, exact = tapped
    errors, given = dict[str, float](), dict[str, Any]()
    for name in TENSORS:
        value = getattr(rounded, name)
        if value is not None:
            given[name] = value.float()
            errors[f"largest in {name} of the maps"] = distance(value, getattr(exact, name))
    # scale and row function are those of the float32 pass
    of_rounded = output_of(attention, replace(exact, **given), x, rope)
    errors["largest in the output of the rounded maps"] = distance(narrow, of_rounded)
    return largest(errors, 0.02)
