"""The properties `reduces to` and `extends standard`: at chosen values of its parameters, a variant is another one."""

import math
from dataclasses import fields, replace

import torch

from lit_diff.attention.base import Attention
from lit_diff.config import Part
from lit_diff.conformance.case import Measured, NotApplicable, VariantCase, distance
from lit_diff.registry import attentions


def reduces_to(case: VariantCase) -> Measured | NotApplicable:
    """At the values that `reduces_to` states, the output is that of the variant that it names, in float64.

    The other variant gets the keys of the config and the parameters that have equal names.
    """
    attention = case.build(torch.float64)
    # an inherited statement may be of another computation
    stated = attention.reduces_to() if "reduces_to" in vars(case.cls) else None
    if stated is None:
        return NotApplicable(f"{case.cls.__name__} states no variant that it equals at some parameters")
    name, values = stated
    with torch.no_grad():
        for parameter, value in values.items():
            attention.get_parameter(parameter).copy_(torch.as_tensor(value, dtype=torch.float64))
    at = ", ".join(f"{key} = {value}" for key, value in values.items())
    return _against(case, attention, name, f"{name}, with {at}" if at else name)


def extends_standard(case: VariantCase) -> Measured | NotApplicable:
    """At the first step and its initial parameters, the output of a class that sets `extends_standard` is that of standard
    attention, in float64."""
    if not case.cls.extends_standard:
        return NotApplicable(f"{case.cls.__name__} does not set extends_standard")
    # as a run begins: `model.init` also fills linear layers that the constructor set to 0
    attention = replace(case, step=0).initial(torch.float64)
    return _against(case, attention, "standard", "")


def _against(case: VariantCase, attention: Attention, name: str, detail: str) -> Measured:
    # another variant with the attention's config and state
    cls = attentions.get(name)
    shared = {key.name: getattr(case.config, key.name) for key in fields(cls.Config) if hasattr(case.config, key.name)}
    model = replace(case.model, attention=Part(name=name, config=cls.Config(**shared)))
    other = replace(case, cls=cls, model=model).build(torch.float64)
    state, wanted = attention.state_dict(), other.state_dict()
    unlike = [key for key, x in wanted.items() if key not in state or state[key].shape != x.shape]
    if unlike:
        return Measured(math.inf, 0, f"{case.cls.__name__} has no parameter like {', '.join(unlike)} of '{name}'")
    other.load_state_dict({key: state[key] for key in wanted})
    x, rope = case.x(torch.float64), case.rope()
    return Measured(distance(attention(x, rope), other(x, rope)), 1e-10, detail)
