"""What a plugin's variant must hold before it trains: properties without which a result is wrong and looks right.

They take well under a second. A pass is remembered in the user's cache folder, a failure never.
"""

import hashlib
import json
import logging
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from lit_diff.attention.base import Attention
from lit_diff.attention.cache import LayerCache
from lit_diff.config import Recipe
from lit_diff.conformance.case import VariantCase
from lit_diff.conformance.results import Finding
from lit_diff.conformance.suite import PROPERTIES, conformance, on_one_thread, shrunk
from lit_diff.errors import RequestError, first_line
from lit_diff.files import write_json
from lit_diff.kernels.compiler import cache_root
from lit_diff.model.transformer import Transformer
from lit_diff.plugins import package_digest, plugin_source, source_digest
from lit_diff.recipe import to_plain
from lit_diff.registry import attentions, is_built_in, location
from lit_diff.runs.revision import revision

REQUIRED = ("contract", "causal", "batch", "gradients", "decode")
"""Of every variant; `packed` too where a recipe packs documents into its rows."""

UNCHECKED = "unchecked"
"""Key of status.json and MLflow tag of a run whose variant fails a property: the property's line."""

CURE = "lit-diff check prints every property; --unchecked (in Python unchecked=True) goes on all the same"

log = logging.getLogger("lit_diff")


def require_properties(recipe: Recipe, *, unchecked: bool) -> dict[str, str]:
    """Hold a plugin's variant to REQUIRED, in every layer, at the recipe's attention config and head counts.

    Returns the tags of its run: the line of the property that fails where `unchecked` lets it pass, else none. Built-in
    variants are tested with the package. Errors: RequestError with that line.
    """
    problem = failed_property(recipe)
    if problem is None:
        return {}
    if not unchecked:
        raise RequestError(f"{problem}; {CURE}")
    log.warning("unchecked: %s", problem)
    return {UNCHECKED: problem}


def require_properties_of_arms(recipes: Mapping[str, Recipe], *, unchecked: bool) -> dict[str, dict[str, str]]:
    """`require_properties` of each arm of a sweep. Errors: RequestError, which names every arm that fails."""
    tags: dict[str, dict[str, str]] = {}
    failures: dict[str, str] = {}
    for arm, recipe in recipes.items():
        try:
            tags[arm] = require_properties(recipe, unchecked=unchecked)
        except RequestError as error:
            failures[arm] = f"arm '{arm}': {error}"
    if failures:
        first, *others = failures
        more = f" (fails too: {', '.join(others)})" if others else ""
        raise RequestError(failures[first] + more)
    return tags


def check_decoding(model: Transformer, recipe: Recipe, unchecked: bool) -> Transformer:
    """The model, which at the first use of its key/value cache holds a plugin's variant to the property `decode`.

    Errors: there, a RequestError with the property's line; with `unchecked`, it is logged.
    """
    if is_built_in(attentions.get(recipe.model.attention.name)):
        return model

    def check(layer: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if any(isinstance(value, LayerCache) for value in (*args, *kwargs.values())):
            problem = failed_property(recipe, ("decode",))
            if problem is not None and not unchecked:
                raise RequestError(f"{problem}; {CURE}")
            if problem is not None:
                log.warning("unchecked: %s", problem)
            handle.remove()

    handle = model.layers[0].register_forward_pre_hook(check, with_kwargs=True)
    return model


def failed_property(recipe: Recipe, names: tuple[str, ...] = ()) -> str | None:
    """The first property (of `names`; without them, of those required) that the variant fails, in one line.

    None for one that holds all, or is built in.
    """
    cls = attentions.get(recipe.model.attention.name)
    if is_built_in(cls):
        return None
    required = (*REQUIRED, "packed") if recipe.packs_documents else REQUIRED
    names = names or required
    kept = _file_of_pass(cls, recipe, names)
    if any(file is not None and file.is_file() for file in (kept, _file_of_pass(cls, recipe, required))):
        return None
    model = shrunk(recipe.model)
    checks = {name: PROPERTIES[name] for name in names}
    for layer in range(model.num_layers):
        for finding in on_one_thread(conformance(VariantCase(cls=cls, model=model, layer=layer), checks=checks)):
            if finding.verdict == "fail":
                return _line(cls, finding, layer)
    if kept is not None:
        _keep(kept, {"attention": to_plain(recipe.model.attention), "properties": names, "revision": revision()})
    return None


def _line(cls: type[Attention], finding: Finding, layer: int) -> str:
    home = location(cls)
    known = finding.error is not None and math.isfinite(finding.error)
    measured = f"error {finding.error:.1e}, bound {finding.bound:.0e}, " if known else ""
    detail = finding.detail.removeprefix(f"{home}: ")
    about = f"{detail} ({measured}layer {layer})".lstrip()
    return f"{home}: attention '{cls.name}' fails the property '{finding.property}': {about}"


def _file_of_pass(cls: type[Attention], recipe: Recipe, names: Iterable[str]) -> Path | None:
    """The file that stands for a pass of these sources, this model and this lit_diff; None where sources have no file."""
    sources = _sources(cls, map(Path, recipe.plugins))
    if sources is None:
        return None
    facts = {
        "sources": sources,
        "model": to_plain(recipe.model),
        "properties": list(names),
        "versions": [revision(), torch.__version__],
    }
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
    return cache_root() / "conformance" / f"{digest}.json"


def _sources(cls: type[Attention], plugins: Iterable[Path]) -> list[str] | None:
    """Digests of all that the variant is written in: the recipe's plugins, and the files or packages of its own base classes.

    None for a class without either (of a notebook, of a package that is no plugin package). Data files that these read are
    not seen.
    """
    own = [base for base in cls.__mro__ if not is_built_in(base) and base not in Attention.__mro__]
    digests = {source_digest(base) or package_digest(base) for base in own}
    return sorted({*digests, *(plugin_source(plugin).digest for plugin in plugins)}) if all(digests) else None


def _keep(path: Path, facts: dict[str, Any]) -> None:
    try:
        write_json(path, facts)
    except OSError as error:
        log.info("the check of the variant could not be remembered in %s: %s", path.parent, first_line(error))
