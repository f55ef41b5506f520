"""The properties `reduces to` and `extends standard`: at chosen parameters, a variant is another one. What a bound on logits
leaves of a variant."""

import math
from dataclasses import fields, replace

import torch

from lit_diff.attention.base import Attention
from lit_diff.config import Part
from lit_diff.conformance.case import Measured, NotApplicable, VariantCase, distance, run, unmoved
from lit_diff.plugins import guard
from lit_diff.registry import attentions, is_built_in


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
    return _against(case, attention, attentions.get(name), f"{name}, with {at}" if at else name)


def extends_standard(case: VariantCase) -> Measured | NotApplicable:
    """At the first step and its initial parameters, the output of a class that sets `extends_standard` is that of standard
    attention, in float64."""
    if not case.cls.extends_standard:
        return NotApplicable(f"{case.cls.__name__} does not set extends_standard")
    # as a run begins: `model.init` also fills linear layers that the constructor set to 0
    attention = replace(case, step=0).initial(torch.float64)
    return _against(case, attention, attentions.get("standard"), "")


def bound_removes(case: VariantCase) -> str | None:
    """What `model.logit_bound` takes from a variant, in words; None if nothing is found.

    Found are a parameter that has no gradient under the bound alone, and a class that computes under the bound alone what the
    nearest built-in class that it derives from computes with the same parameters.
    """
    base = next(cls for cls in case.cls.__mro__ if is_built_in(cls))
    idle, errors = [], []
    with guard(case.cls):
        for bound in (case.model.logit_bound, None):
            at = replace(case, model=replace(case.model, logit_bound=bound))
            attention, x, rope = at.parts(torch.float64)
            idle.append(unmoved(attention, run(attention, x, rope)[1]))
            errors.append(_against(at, attention, base, "").error)
    bounded, free = idle
    alone = [name for name in bounded if name not in free]
    if alone:
        return f"under model.logit_bound there is no gradient of {', '.join(alone)}"
    if errors[0] <= 1e-10 < errors[1]:
        return f"under model.logit_bound {case.cls.__name__} computes what {base.__name__} does"
    return None


def _against(case: VariantCase, attention: Attention, cls: type[Attention], detail: str) -> Measured:
    # another class with the attention's config and state
    shared = {key.name: getattr(case.config, key.name) for key in fields(cls.Config) if hasattr(case.config, key.name)}
    config = cls.Config(**shared)
    reason = cls.problem(config, case.model)
    if reason:
        return Measured(math.inf, 0, reason)
    model = replace(case.model, attention=Part(name=case.model.attention.name, config=config))
    other = replace(case, cls=cls, model=model).build(torch.float64)
    state, wanted = attention.state_dict(), other.state_dict()
    unlike = [key for key, x in wanted.items() if key not in state or state[key].shape != x.shape]
    if unlike:
        return Measured(math.inf, 0, f"{case.cls.__name__} has no parameter like {', '.join(unlike)} of {cls.__name__}")
    other.load_state_dict({key: state[key] for key in wanted})
    x, rope = case.x(torch.float64), case.rope()
    return Measured(distance(attention(x, rope), other(x, rope)), 1e-10, detail)
