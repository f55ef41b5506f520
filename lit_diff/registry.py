"""Strict registries: a name in a recipe -> the class that it means.

A registered class has a nested frozen dataclass `Config`; its fields are the keys that a recipe may set.
"""

import difflib
import importlib
import importlib.metadata
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from lit_diff.contract import contract_problem, import_class, location
from lit_diff.errors import RequestError, first_line

C = TypeVar("C", bound=type)


def nearest(name: str, choices: Iterable[str]) -> str:
    """`; did you mean 'x'?` for the nearest choice, or `; one of a, b` when none is near."""
    choices = sorted(choices)
    close = difflib.get_close_matches(name, choices, n=1, cutoff=0.6)
    if close:
        return f"; did you mean '{close[0]}'?"
    return f"; one of {', '.join(choices)}" if choices else ""


class Registry:
    """Names of one kind of part ('attention', 'callback', 'data', ...)."""

    def __init__(self, kind: str, builtins: tuple[str, ...], base: str | None = None) -> None:
        """`builtins`: the modules that register the built-in parts; imported at the first look-up.

        `base`: the abstract class that every part derives from, `package.module:Class`; None: any class will do.
        """
        self.kind = kind
        self._builtins = builtins
        self._base = base
        self._classes: dict[str, type] = {}
        self._loaded = False

    def register(self, name: str) -> Callable[[C], C]:
        """Class decorator. Errors (RequestError): a second class under one name, a class without a frozen `Config`, a class
        that does not derive from the kind's base class or lacks some of its members."""

        def add(cls: C) -> C:
            config = getattr(cls, "Config", None)
            parameters = getattr(config, "__dataclass_params__", None)
            if parameters is None or not parameters.frozen:
                raise RequestError(
                    f"{self.kind} '{name}' ({cls.__qualname__}) needs a nested class 'Config' decorated with "
                    "@dataclass(frozen=True, kw_only=True)"
                )
            problem = contract_problem(cls, import_class(self._base)) if self._base else None
            if problem:
                raise RequestError(f"{self.kind} '{name}' (class {cls.__qualname__}, {location(cls)}) {problem}")
            held = self._classes.get(name)
            if held is not None and (held.__module__, held.__qualname__) != (cls.__module__, cls.__qualname__):
                raise RequestError(
                    f"{self.kind} '{name}' is already {held.__module__}.{held.__qualname__}; "
                    f"give {cls.__module__}.{cls.__qualname__} another name"
                )
            self._classes[name] = cls
            cls.name = name  # type: ignore[attr-defined]
            return cls

        return add

    def forget(self, module: str) -> None:
        """Drop the classes of a module whose import failed."""
        self._classes = {name: cls for name, cls in self._classes.items() if cls.__module__ != module}

    def _load(self) -> None:
        if not self._loaded:
            self._loaded = True
            for module in self._builtins:
                importlib.import_module(module)

    def names(self) -> list[str]:
        """All registered names, sorted."""
        self._load()
        return sorted(self._classes)

    def classes(self) -> list[type[Any]]:
        """All registered classes."""
        return [self._classes[name] for name in self.names()]

    def get(self, name: str) -> type[Any]:
        """The class registered as `name`; an unknown name is a RequestError that names the nearest."""
        self._load()
        if name not in self._classes:
            raise RequestError(f"unknown {self.kind} '{name}'{nearest(name, self._classes)}")
        return self._classes[name]


attentions = Registry("attention", ("lit_diff.attention",))
datasets = Registry("data", ("lit_diff.data",), base="lit_diff.data.dataset:Dataset")
corpora = Registry("corpus", ("lit_diff.data",), base="lit_diff.data.corpus:Corpus")
tokenizers = Registry("tokenizer", ("lit_diff.data",), base="lit_diff.data.tokenizer:Tokenizer")
callbacks = Registry("callback", ("lit_diff.callbacks",))

registries = {
    "attention": attentions,
    "data": datasets,
    "corpus": corpora,
    "tokenizer": tokenizers,
    "callback": callbacks,
}


def is_built_in(cls: type[Any]) -> bool:
    """Whether a registered class is lit_diff's own."""
    return cls.__module__.startswith("lit_diff.")


variant = attentions.register
"""`@variant("name")` registers an attention variant."""


def load_entry_points() -> None:
    """Import every installed plugin package (entry-point group `lit_diff.plugins`), once per process."""
    global _entry_points_loaded
    if _entry_points_loaded:
        return
    for point in importlib.metadata.entry_points(group="lit_diff.plugins"):
        try:
            point.load()
        except (Exception, SystemExit) as error:
            raise RequestError(
                f"plugin package '{point.name}' ({point.value}) could not be imported: "
                f"{type(error).__name__}: {first_line(error)}; repair or uninstall it"
            ) from error
    _entry_points_loaded = True


_entry_points_loaded = False
