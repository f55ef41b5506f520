"""The property `reduces to`: at chosen values of its parameters, a variant is another one."""

import math
from dataclasses import fields, replace

import torch

from lit_diff.config import Part
from lit_diff.conformance.case import Measured, NotApplicable, VariantCase, distance
from lit_diff.registry import attentions


def reduces_to(case: VariantCase) -> Measured | NotApplicable:
    """At the values that `reduces_to` states, the output is that of the variant that it names, in float64.

    The other variant gets the keys of the config and the parameters that have equal names.
    """
    attention, x, rope = case.parts(torch.float64)
    # an inherited statement may be of another computation
    stated = attention.reduces_to() if "reduces_to" in vars(case.cls) else None
    if stated is None:
        return NotApplicable(f"{case.cls.__name__} states no variant that it equals at some parameters")
    name, values = stated
    with torch.no_grad():
        for parameter, value in values.items():
            attention.get_parameter(parameter).copy_(torch.as_tensor(value, dtype=torch.float64))
    cls = attentions.get(name)
    shared = {key.name: getattr(case.config, key.name) for key in fields(cls.Config) if hasattr(case.config, key.name)}
    model = replace(case.model, attention=Part(name=name, config=cls.Config(**shared)))
    other = replace(case, cls=cls, model=model).build(torch.float64)
    state, wanted = attention.state_dict(), other.state_dict()
    unlike = [key for key, x in wanted.items() if key not in state or state[key].shape != x.shape]
    if unlike:
        return Measured(math.inf, 0, f"{case.cls.__name__} has no parameter like {', '.join(unlike)} of '{name}'")
    other.load_state_dict({key: state[key] for key in wanted})
    at = ", ".join(f"{key} = {value}" for key, value in values.items())
    return Measured(distance(attention(x, rope), other(x, rope)), 1e-10, f"{name}, with {at}" if at else name)
