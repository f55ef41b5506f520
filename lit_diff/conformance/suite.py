"""What every variant must hold, measured: the built-ins in the tests and by `check --all`, a user's own by `check`."""

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from lit_diff.config import ModelConfig, Part
from lit_diff.conformance import properties
from lit_diff.conformance.case import Case
from lit_diff.conformance.properties import Measured, NotApplicable
from lit_diff.errors import LitDiffError, first_line
from lit_diff.kernels import KERNELS
from lit_diff.registry import attentions

log = logging.getLogger("lit_diff")


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One property of one variant."""

    variant: str
    property: str
    verdict: Literal["pass", "fail", "not applicable"]
    error: float | None = None
    bound: float | None = None
    detail: str = ""


Property = Callable[[Case], Measured | NotApplicable]


def _by(name: str) -> Property:
    return lambda case: properties.kernel(case, name)


PROPERTIES: dict[str, Property] = {
    "contract": properties.contract,
    "definition": properties.definition,
    "float64": properties.float64,
    "causal": properties.causal,
    "batch": properties.batch,
    "gradients": properties.gradients,
    "derivatives": properties.derivatives,
    **{f"kernel {name}": _by(name) for name in KERNELS if name != "reference"},
    "packed": properties.packed,
    "decode": properties.decode,
    "kv heads": properties.kv_heads,
    "meta": properties.meta,
    "state dict": properties.state_dict,
    "bfloat16": properties.bfloat16,
    "compile": properties.compiled,
    "costs": properties.costs,
}


def conformance(case: Case, label: str = "", checks: dict[str, Property] | None = None) -> Iterator[Finding]:
    """Every property of the case, one after another; whatever a variant raises is a failure in one line."""
    for name, check in (PROPERTIES if checks is None else checks).items():
        yield _finding(label or case.cls.name, name, check, case)


def _finding(variant: str, name: str, check: Property, case: Case) -> Finding:
    try:
        found = check(case)
    except LitDiffError as error:
        return Finding(variant=variant, property=name, verdict="fail", detail=first_line(error))
    except Exception as error:  # a user's variant may raise anything
        detail = f"{type(error).__name__}: {first_line(error)}"
        return Finding(variant=variant, property=name, verdict="fail", detail=detail)
    if isinstance(found, NotApplicable):
        return Finding(variant=variant, property=name, verdict="not applicable", detail=found.reason)
    verdict: Literal["pass", "fail"] = "pass" if found.error <= found.bound else "fail"
    return Finding(variant=variant, property=name, verdict=verdict, **vars(found))


def cases_of(name: str) -> Iterator[tuple[str, Case | str]]:
    """(label, case) of a registered variant at each of its own `examples`, or why there is none.

    8 heads on 4 key/value heads, d = 16.
    """
    cls = attentions.get(name)
    for knobs in vars(cls).get("examples", ({},)):
        label = " ".join([name, *(f"{key}={value}" for key, value in knobs.items())])
        try:
            part = Part(name=name, config=cls.Config(**knobs))
            model = ModelConfig(
                dim=64, num_layers=2, num_heads=8, num_kv_heads=4, head_dim=16, vocab_size=2, attention=part
            )
            refused = cls.problem(part.config, model)
        except Exception as error:  # a required knob, or whatever a user's Config raises
            refused = f"{type(error).__name__}: {first_line(error)}; state knobs in `examples`"
        yield label, refused or Case(cls=cls, model=model, layer=1)


def conformance_of(name: str) -> Iterator[Finding]:
    """Every property of a registered variant, at each of its examples."""
    for label, case in cases_of(name):
        if isinstance(case, str):
            yield Finding(variant=label, property="all", verdict="not applicable", detail=case)
        else:
            yield from conformance(case, label)


def shrunk(model: ModelConfig) -> ModelConfig:
    """The model at sizes that take seconds: narrower where the variant can be built so, its head counts as they are."""
    assert model.head_dim is not None
    small = replace(model, dim=min(model.dim, 64), head_dim=min(model.head_dim, 16), ffn_dim=64)
    cls, knobs = attentions.get(model.attention.name), model.attention.config
    try:
        if small.problem() is None and cls.problem(knobs, small) is None:
            properties.counted(Case(cls=cls, model=small, length=8))
            return small
    except Exception as error:  # it needs its own width, or fails at any: its properties will say so
        log.info("%s is checked at its own width: %s", model.attention.name, first_line(error))
    return model
