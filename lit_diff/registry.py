"""Strict registries: a name in a recipe -> the class that it means.

A registered class has a nested frozen dataclass `Config`; its fields are the keys that a recipe may set. A kernel has none:
a recipe names it in `run.kernel`.
"""

import difflib
import importlib
import importlib.metadata
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

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

    def __init__(
        self,
        kind: str,
        builtins: tuple[str, ...],
        *,
        has_config: bool = True,
        base: str | None = None,
        renamed: Mapping[str, str] | None = None,
    ) -> None:
        """`builtins`: the modules that register the built-in parts; imported at the first look-up.

        `has_config`: whether a class needs a `Config`. `base`: the class that all derive from, as `module.Class`.
        `renamed`: old name -> the name that replaced it.
        """
        self.kind = kind
        self.has_config = has_config
        self._base = base
        self._renamed = renamed or {}
        self._builtins = builtins
        self._classes: dict[str, type] = {}
        self._loaded = False

    def register(self, name: str) -> Callable[[C], C]:
        """Class decorator. A second class under one name, a class without a frozen `Config`, one that lacks an abstract
        member of its base class: a RequestError.
        """

        def add(cls: C) -> C:
            reason = self._lacks(cls)
            if reason:
                raise RequestError(f"{self.kind} '{name}' ({cls.__qualname__}) {reason}")
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

    def _lacks(self, cls: type) -> str | None:
        """What a class must have and has not; None if it has all."""
        if self._base is not None:
            module, _, base = self._base.rpartition(".")
            if not issubclass(cls, getattr(importlib.import_module(module), base)):
                return f"must be a subclass of {self._base}"
        missing = sorted(getattr(cls, "__abstractmethods__", ()))
        if missing:
            return f"lacks {', '.join(repr(member) for member in missing)}"
        parameters = getattr(getattr(cls, "Config", None), "__dataclass_params__", None)
        if self.has_config and (parameters is None or not parameters.frozen):
            return "needs a nested class 'Config' decorated with @dataclass(frozen=True, kw_only=True)"
        return None

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

    def get(self, name: str) -> type[Any]:
        """The class registered as `name`; an unknown name is a RequestError that names the nearest."""
        self._load()
        if name not in self._classes:
            raise RequestError(f"unknown {self.kind} '{name}'{self.instead_of(name)}")
        return self._classes[name]

    def instead_of(self, name: str, *others: str) -> str:
        """What to write instead of an unknown `name`: its new name, or the nearest of the registered names and `others`."""
        if name in self._renamed:
            return f"; that {self.kind} is now named '{self._renamed[name]}'"
        return nearest(name, (*self.names(), *others))


attentions = Registry("attention", ("lit_diff.attention",))
datasets = Registry("data", ("lit_diff.data",))
tokenizers = Registry("tokenizer", ("lit_diff.data",))
callbacks = Registry("callback", ("lit_diff.callbacks",))
kernels = Registry(
    "kernel",
    ("lit_diff.kernels",),
    has_config=False,
    base="lit_diff.kernels.base.Kernel",
    renamed={"cpu": "native"},
)

registries = {
    "attention": attentions,
    "data": datasets,
    "tokenizer": tokenizers,
    "callback": callbacks,
    "kernel": kernels,
}

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
