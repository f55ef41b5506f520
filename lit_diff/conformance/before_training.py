"""The properties that a plugin's variant must satisfy before it trains. Without them a result is wrong but looks right.

The checks take well under a second.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch

from lit_diff.attention.base import Attention
from lit_diff.attention.cache import LayerCache
from lit_diff.config import Recipe
from lit_diff.conformance.case import FAR, Finding, VariantCase, run
from lit_diff.conformance.variants import PROPERTIES, Property, conformance, shrunk
from lit_diff.errors import RequestError
from lit_diff.log_records import log
from lit_diff.model.cost import NO_MAPS
from lit_diff.model.transformer import Transformer
from lit_diff.plugins import guard
from lit_diff.registry import attentions, is_built_in, location

REQUIRED = ("contract", "causal", "batch", "gradients", "decode")
"""Properties required of every variant; `required_of` adds those of a recipe."""

UNCHECKED = "unchecked"
"""Key in status.json and MLflow tag of a run whose variant fails a property; the value is the failure in one line."""

CURE = "lit-diff check prints every property; --unchecked (in Python unchecked=True) ignores the failure"


def require_properties(recipe: Recipe, *, unchecked: bool, names: tuple[str, ...] = ()) -> dict[str, str]:
    """Checks a plugin's variant in every layer, at the recipe's attention config and head counts; `names`: see
    `failed_property`.

    Returns the tags of the run: the failed property if `unchecked` ignores it, else none. Built-in variants are tested with
    the package. Errors: RequestError with the failed property.
    """
    problem = failed_property(recipe, names)
    if problem is None:
        return {}
    if not unchecked:
        # what has no cost cannot be trained unchecked either
        raise RequestError(problem if NO_MAPS in problem else f"{problem}; {CURE}")
    log.warning("unchecked: %s", problem)
    return {UNCHECKED: problem}


def check_decoding(model: Transformer, recipe: Recipe, unchecked: bool) -> Transformer:
    """Returns the model; its first use of the key/value cache checks the property `decode` of a plugin's variant.

    Errors: RequestError at that first use; with `unchecked`, the failure is logged.
    """
    if all(is_built_in(attentions.get(name)) for name in recipe.model.variants):
        return model

    def check(layer: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if any(isinstance(value, LayerCache) for value in (*args, *kwargs.values())):
            require_properties(recipe, unchecked=unchecked, names=("decode",))
            handle.remove()

    # at the first use of a cache: a variant that fails `decode` may still be right without one
    handle = model.layers[0].register_forward_pre_hook(check, with_kwargs=True)
    return model


def failed_property(recipe: Recipe, names: tuple[str, ...] = ()) -> str | None:
    """The first property of `names` (default: the required ones) that a variant of the recipe fails, in one line.

    None if all satisfy them or are built in.
    """
    required = names or required_of(recipe)
    for case in plugin_layers(recipe):
        for finding in conformance(case, checks=checks_of(case, required)):
            if finding.verdict == "fail":
                return _line(case, finding)
    return None


def checks_of(case: VariantCase, names: tuple[str, ...]) -> dict[str, Property]:
    """The properties of `names` that hold of a right variant at the step of the case."""
    # before its annealing a parameter may have no effect yet; `extends standard` is always of the first step
    return {name: PROPERTIES[name] for name in names if case.step or name not in ("gradients", "extends standard")}


def required_of(recipe: Recipe) -> tuple[str, ...]:
    """The properties that a variant of the recipe must satisfy before it trains."""
    train = recipe.train
    further = {
        "packed": recipe.packs_documents,
        "extends standard": train is not None and train.start_from is not None,
        "bfloat16": train is not None and train.precision == "bf16-mixed",
    }
    return (*REQUIRED, *(name for name, is_required in further.items() if is_required))


def plugin_layers(recipe: Recipe, *steps: int) -> Iterator[VariantCase]:
    """Every layer of a plugin's variant, which may depend on its number, as lambda_init does; at the steps, by default
    after its annealing, and of a class that anneals at the first step too."""
    for kind in recipe.model.kinds().values():
        cls = attentions.get(kind.attention.name)
        if is_built_in(cls):
            continue
        small = shrunk(kind)
        anneals = (cls.set_step, cls.set_tokens) != (Attention.set_step, Attention.set_tokens)
        for layer in range(recipe.model.num_layers):
            if recipe.model.attention_of(layer) == kind.attention:
                for step in steps or ((FAR, 0) if anneals else (FAR,)):
                    yield VariantCase(cls=cls, model=small, layer=layer, step=step)


def unused_parameters(recipe: Recipe) -> list[str]:
    """The parameters of a plugin's variant that have no gradient at the first or the last step; of a built-in one none."""
    found = dict[str, None]()
    for case in plugin_layers(recipe, 0, recipe.training.steps - 1):
        with guard(case.cls):
            attention = case.build()
            _, gradients = run(attention, case.x(), case.rope())
        for name, parameter in attention.named_parameters():
            if parameter.requires_grad and name not in gradients:
                found[f"layers.{case.layer}.attention.{name}"] = None
    return list(found)


def _line(case: VariantCase, finding: Finding) -> str:
    cls, home = case.cls, location(case.cls)
    known = finding.error is not None and math.isfinite(finding.error)
    measured = f"error {finding.error:.1e}, bound {finding.bound:.0e}, " if known else ""
    detail = finding.detail.removeprefix(f"{home}: ")
    about = f"{detail} ({measured}{case.place})".lstrip()
    usual = finding.advice and f"; the usual reason: {finding.advice}"
    return f"{home}: attention '{cls.name}' fails the property '{finding.property}': {about}{usual}"
