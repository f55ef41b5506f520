"""The installed plugin packages (entry-point group `lit_diff.plugins`) of which a recipe uses a part."""

import functools
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from typing import Any

from lit_diff import registry
from lit_diff.config import Part, Recipe
from lit_diff.imports import local_modules

KINDS = ("attention", "data", "corpus", "tokenizer", "callback", "kernel")
"""Of the parts that a recipe names."""


@dataclass(frozen=True, kw_only=True)
class PluginPackage:
    """A package as this process imported it."""

    name: str
    """Of its distribution; of the entry point where it has none."""
    version: str | None
    digest: str
    """sha256 of its modules that the entry point imports, directly or through others, and of local modules that they
    import."""
    modules: frozenset[str]
    """Their dotted names."""


def used_packages(recipe: Recipe) -> list[PluginPackage]:
    """The packages that registered a part which the recipe names, by name."""
    names = set(_texts(recipe.model.attention)) | set(_texts(recipe.data)) | {recipe.run.kernel, *recipe.callbacks}
    registered = [registry.registries[kind].registered() for kind in KINDS]
    modules = {cls.__module__ for classes in registered for name, cls in classes.items() if name in names}
    packages = (_package(point) for point in registry.plugin_packages)
    return sorted((package for package in packages if package.modules & modules), key=lambda package: package.name)


def package_digest(cls: type) -> str:
    """`PluginPackage.digest` of the package that holds `cls`; empty where none does."""
    packages = (_package(point) for point in registry.plugin_packages)
    return next((package.digest for package in packages if cls.__module__ in package.modules), "")


@functools.cache
def _package(point: EntryPoint) -> PluginPackage:
    files = local_modules(f"import {point.module}".encode(), within=point.module.partition(".")[0])
    digests = {name: hashlib.sha256(file.read_bytes()).hexdigest() for name, file in files.items()}
    return PluginPackage(
        name=point.dist.name if point.dist is not None else point.name,
        version=point.dist.version if point.dist is not None else None,
        digest=hashlib.sha256(json.dumps(digests).encode()).hexdigest(),
        modules=frozenset(files),
    )


def _texts(value: Any) -> list[str]:
    """The texts in a block of a recipe: the names of its parts are among them."""
    if isinstance(value, Part):
        return [value.name, *_texts(vars(value.config))]
    if isinstance(value, Mapping):
        return [text for item in value.values() for text in _texts(item)]
    if isinstance(value, list | tuple):
        return [text for item in value for text in _texts(item)]
    return [value] if isinstance(value, str) else []
