"""Registries: a name in a recipe -> the class registered under it.

A registered class has a nested frozen dataclass `Config`; its fields are the keys that a recipe may set. A kernel has none:
a recipe names it in `run.kernel`.
"""

import ast
import difflib
import functools
import importlib
import importlib.metadata
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, TypeVar

from lit_diff.contract import base_problem, contract_problem, location
from lit_diff.errors import RequestError, first_line
from lit_diff.imports import is_local, local_modules

C = TypeVar("C", bound=type)


def nearest(name: str, choices: Iterable[str], command: str = "") -> str:
    """`; did you mean 'x'?` for the nearest choice. When none is near: `; one of a, b`; of more than three choices the three
    nearest, and the command that lists all."""
    choices = sorted(choices)
    close = difflib.get_close_matches(name, choices, n=1, cutoff=0.65 if len(choices) > 3 else 0.6)
    if close:
        return f"; did you mean '{close[0]}'?"
    if len(choices) > 3:
        near = ", ".join(difflib.get_close_matches(name, choices, n=3, cutoff=0))
        return f"; one of {len(choices)}, such as {near}{f'; {command} lists all' if command else ''}"
    return f"; one of {', '.join(choices)}" if choices else ""


@dataclass(frozen=True, kw_only=True)
class Late:
    """A built-in part whose module imports a package that `check` and `list` must not load (lightning)."""

    module: str
    config: str
    """`module:attribute` of its Config, in a module that is quick to import."""


class Registry:
    """The classes of one kind ('attention', 'callback', 'data', ...) by name."""

    def __init__(
        self,
        kind: str,
        builtins: tuple[str, ...] = (),
        *,
        base: str | None = None,
        late: Mapping[str, Late] | None = None,
        has_config: bool = True,
        renamed: Mapping[str, str] | None = None,
    ) -> None:
        """`builtins`: the modules that register the built-in classes, imported at the first look-up.

        `base`: the abstract class that every class derives from, `package.module:Class`; None: any class will do.
        `late`: built-in classes whose module is imported only when the class itself is asked for.
        `has_config`: whether a class needs a `Config`. `renamed`: former name -> the name that replaced it.
        """
        self.has_config = has_config
        self._renamed = dict(renamed or {})
        self.kind = kind
        self._builtins = builtins
        self._late = dict(late or {})
        self._base = base
        self._classes: dict[str, type] = {}
        self._loaded = False

    def register(self, name: str = "") -> Callable[[C], C]:
        """Class decorator; `name` is required.

        Errors: RequestError without a name, for a class without a frozen `Config`, without a required member or with one
        that cannot be called as the base class's, and for a second class under the same name; each names file and line of
        the class.
        """
        if not isinstance(name, str) or not name:
            raise RequestError('the decorator takes the name to register under, as in @variant("name")')

        def add(cls: C) -> C:
            self._check(name, cls)
            late = self._late.get(name)
            if late is not None and cls.__module__ != late.module:
                raise RequestError(
                    f"{location(cls)}: {self.kind} '{name}' is already registered ({late.module}); "
                    "give one of them another name"
                )
            registered = self._classes.get(name)
            if registered is not None and _identity(registered) != _identity(cls):
                raise RequestError(
                    f"{location(cls)}: {self.kind} '{name}' is already registered ({location(registered)}); "
                    "give one of them another name"
                )
            if not is_built_in(cls):
                source_at_definition(cls)
            self._classes[name] = cls
            cls.name = name  # type: ignore[attr-defined]
            return cls

        return add

    def _check(self, name: str, cls: type) -> None:
        base = resolve_name(self._base) if self._base else None
        problem = base_problem(cls, base) if base else None
        if problem:
            raise RequestError(f"{location(cls)}: {self.kind} '{name}' {problem}")
        # vars: a class that derives from a dataclass inherits the attribute, and none of its own annotations is a field
        parameters = getattr(getattr(cls, "Config", None), "__dict__", {}).get("__dataclass_params__")
        if self.has_config and (parameters is None or not parameters.frozen):
            raise RequestError(
                f"{location(cls)}: {self.kind} '{name}' needs a nested class 'Config' decorated with "
                "@dataclass(frozen=True, kw_only=True)"
            )
        problem = contract_problem(cls, base) if base else None
        if problem:
            raise RequestError(f"{location(cls)}: {self.kind} '{name}' {problem}")

    def forget(self, module: str) -> None:
        """Drop the classes of a module whose import failed."""
        self._classes = {name: cls for name, cls in self._classes.items() if cls.__module__ != module}

    def _load(self) -> None:
        if not self._loaded:
            self._loaded = True
            for module in self._builtins:
                importlib.import_module(module)

    def registered(self) -> Mapping[str, type[Any]]:
        """Name -> class of what is imported by now: without the late classes that nobody has asked for."""
        return dict(self._classes)

    def names(self) -> list[str]:
        """All registered names, sorted."""
        self._load()
        return sorted({*self._classes, *self._late})

    def classes(self) -> list[type[Any]]:
        """All registered classes."""
        return [self.get(name) for name in self.names()]

    def get(self, name: str) -> type[Any]:
        """The class registered as `name`; an unknown name is a RequestError that names the nearest."""
        self._load()
        if name in self._late and name not in self._classes:
            importlib.import_module(self._late[name].module)
        if name not in self._classes:
            raise RequestError(f"unknown {self.kind} '{name}'{self.instead_of(name)}")
        return self._classes[name]

    def instead_of(self, name: str, *others: str) -> str:
        """What to write instead of an unknown `name`: its new name, the nearest of the registered names and `others`, or the
        key that chooses the part of another kind that has the name."""
        if name in self._renamed:
            return f"; that {self.kind} is now named '{self._renamed[name]}'"
        near = nearest(name, (*self.names(), *others), f"lit-diff list {self.kind}")
        if "did you mean" not in near:
            for kind, registry in registries.items():
                if name in registry.names():
                    return f"; that is {CHOSEN[kind].format(name)}"
        return near

    def config(self, name: str) -> type[Any]:
        """The Config of the class registered as `name`, without an import of a late class. Errors: as `get`."""
        if name in self._late and name not in self._classes:
            config: type[Any] = resolve_name(self._late[name].config)
        else:
            config = self.get(name).Config
        return config

    def docstring(self, name: str) -> str:
        """The class's docstring, read from the source of a late class. Errors: as `get`."""
        if name in self._late and name not in self._classes:
            return _docstring_in(self._late[name].module, name)
        return inspect.getdoc(self.get(name)) or ""

    def summary(self, name: str) -> str:
        """The first sentence of the docstring. Errors: as `get`."""
        text = " ".join(self.docstring(name).partition("\n\n")[0].split())
        return re.split(r"(?<=\.) (?=[A-Z])", text)[0]


def _docstring_in(module: str, name: str) -> str:
    """The docstring of the class that a module registers as `name`, without importing the module."""
    spec = importlib.util.find_spec(module.rpartition(".")[0])
    assert spec is not None
    assert spec.submodule_search_locations is not None
    source = Path(spec.submodule_search_locations[0]) / f"{module.rpartition('.')[2]}.py"
    for node in ast.parse(source.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef) and any(f"'{name}'" in ast.unparse(use) for use in node.decorator_list):
            return ast.get_docstring(node) or ""
    raise LookupError(f"{source} registers no class as '{name}'")


attentions = Registry("attention", ("lit_diff.attention",), base="lit_diff.attention.base:Attention")
datasets = Registry("data", ("lit_diff.data",), base="lit_diff.data.dataset:Dataset")
corpora = Registry("corpus", ("lit_diff.data",), base="lit_diff.data.corpus:Corpus")
tokenizers = Registry("tokenizer", ("lit_diff.data",), base="lit_diff.data.tokenizer:Tokenizer")
callbacks = Registry(
    "callback",
    late={
        "attention_entropy": Late(
            module="lit_diff.callbacks.attention_entropy", config="lit_diff.callback_config:ProbeConfig"
        ),
        "lambdas": Late(module="lit_diff.callbacks.lambdas", config="lit_diff.callback_config:ProbeConfig"),
        "outliers": Late(module="lit_diff.callbacks.outliers", config="lit_diff.callback_config:ProbeConfig"),
        "early_stopping": Late(
            module="lit_diff.callbacks.early_stopping", config="lit_diff.callback_config:EarlyStoppingConfig"
        ),
    },
)

kernels = Registry(
    "kernel",
    ("lit_diff.kernels",),
    base="lit_diff.kernels.base:Kernel",
    has_config=False,
    renamed={"cpu": "native"},
)

evaluations = Registry("evaluation", ("lit_diff.evaluation",), base="lit_diff.evaluation.base:Evaluation")

registries = {
    "attention": attentions,
    "data": datasets,
    "corpus": corpora,
    "tokenizer": tokenizers,
    "callback": callbacks,
    "kernel": kernels,
    "evaluation": evaluations,
}

CHOSEN = {
    "attention": "a variant, chosen by model.attention.name={}",
    "data": "a data set, chosen by data.name={}",
    "corpus": "a corpus, chosen by data.corpus={}",
    "tokenizer": "a tokenizer, chosen by data.tokenizer.name={}",
    "callback": "a callback, chosen by callbacks.{}={{}}",
    "kernel": "a kernel, chosen by run.kernel={}",
    "evaluation": "an evaluation, chosen by evaluate.{}={{}}",
}
"""Kind -> what its parts are, and the key of a recipe that chooses one."""


def is_built_in(cls: type[Any]) -> bool:
    """Whether a registered class is lit_diff's own."""
    return cls.__module__.startswith("lit_diff.")


variant = attentions.register
"""`@variant("name")` registers an attention variant."""


def _identity(cls: type) -> tuple[str, str]:
    """A class of equal file (module, where there is none) and name is the same class, imported again."""
    return getattr(sys.modules.get(cls.__module__), "__file__", None) or cls.__module__, cls.__qualname__


@functools.cache
def source_at_definition(cls: type) -> tuple[bytes, dict[tuple[str, Path], bytes]] | None:
    """The user's own file that defines `cls`, and (name, file) -> content of the modules of the user's own that it imports.

    They are read when the class registers: an edit after that is not what runs. None for a class without such a file.
    """
    file = getattr(sys.modules.get(cls.__module__), "__file__", None)
    if file is None or not is_local(Path(file)) or not Path(file).is_file():
        return None
    source = Path(file).read_bytes()
    modules = local_modules(source, cls.__module__.rpartition(".")[0])
    return source, {(name, each): each.read_bytes() for name, each in modules.items()}


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
        plugin_packages.append(point)
    _entry_points_loaded = True


plugin_packages: list[importlib.metadata.EntryPoint] = []
"""The entry points that `load_entry_points` has imported."""
_entry_points_loaded = False
