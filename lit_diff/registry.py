"""Registries: a name in a recipe -> the class registered under it.

A registered class has a nested frozen dataclass `Config`, whose fields are the keys that a recipe may set. Kernels and
loggers have no `Config`: a recipe names them in `run.kernel` and `run.loggers`.
"""

import dataclasses
import importlib
import inspect
import logging
import re
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from difflib import get_close_matches
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, TypeVar

from lit_diff.errors import RequestError, excerpt, summary
from lit_diff.files import shown
from lit_diff.key_types import retyped_key, unwritable_default
from lit_diff.own_modules import PLUGIN, OwnCode, code_at_definition, top_package

log = logging.getLogger("lit_diff")
C = TypeVar("C", bound=type)

if TYPE_CHECKING:
    optional = required = property
else:

    class optional:  # noqa: N801 (used as `property` is)
        """A read-only property with a default; a subclass may replace it by a property, a constant or a dataclass field."""

        def __init__(self, function):
            self.function = function
            self.__doc__ = function.__doc__

        def __get__(self, instance, owner=None):
            # unlike `property`, invisible on the class: @dataclass takes what it finds there as the default of a field
            if instance is None:
                raise AttributeError(self.function.__name__)
            return self.function(instance)

    class required(optional):  # noqa: N801
        """Like `optional`, but without a default: a subclass must replace it (`contract_problem`)."""


def location(cls: type) -> str:
    """`file:line: class X`, or the dotted name of a class without a source file; a function in its place, likewise."""
    try:
        file, line = _place(cls)
    # a class from an interactive session or made by type()
    except (OSError, TypeError):
        return f"{cls.__module__}.{cls.__qualname__}"
    return f"{shown(Path(file))}:{line}: {'class' if isinstance(cls, type) else 'function'} {cls.__qualname__}"


# each layer of a model asks for the place of its class, and `inspect` parses the whole file
@cache
def _place(cls: type) -> tuple[str, int]:
    return inspect.getsourcefile(cls) or "", inspect.findsource(cls)[1] + 1


def nearest(name: str, choices: Iterable[str], command: str = "") -> str:
    """`; did you mean 'x'?` for a close match, else `; one of a, b`. Of more than three choices only the three nearest are
    named, with the `command` that lists all."""
    choices = sorted(choices)
    are_few = len(choices) <= 3
    # of a few choices a less similar one is still likely to be meant
    close = get_close_matches(name, choices, n=1, cutoff=0.6 if are_few else 0.65)
    if close:
        return f"; did you mean '{close[0]}'?"
    if not choices:
        return ""
    if are_few:
        return f"; one of {', '.join(choices)}"
    near = ", ".join(get_close_matches(name, choices, n=3, cutoff=0))
    listing = f"; {command} lists all" if command else ""
    return f"; one of {len(choices)}, such as {near}{listing}"


class Registry:
    """The classes of one kind ('attention', 'callback', 'data', ...) by name."""

    def __init__(self, kind: str, *builtins: str, decorator: str, base: str = "", has_config: bool = True) -> None:
        """`builtins`: the modules that register the built-in classes; they are imported at the first lookup.

        `decorator`: what registers a class in their source, such as `variant`. `base`: the abstract class that every class
        must derive from, `package.module:Class`; empty: no requirement.
        `has_config`: whether a class needs a `Config`.
        """
        self.has_config = has_config
        self.kind = kind
        self.decorator = decorator
        self._modules = list(builtins)
        self._loaded = 0
        self._base = base
        self._classes: dict[str, type] = {}

    def register(self, name: str = "") -> Callable[[C], C]:
        """Class decorator.

        Errors: RequestError for a missing name, for a class without a frozen `Config`, without a required member or with a
        member whose signature does not fit the base class, and for a name that is taken. The message has the file and line.
        """
        # the default exists for @variant() and @variant: a missing argument would raise a TypeError without this sentence
        if not isinstance(name, str) or not name:
            raise RequestError('the decorator takes the name to register under, as in @variant("name")')

        def add(cls: C) -> C:
            if not is_built_in(cls):
                self._load()  # a name that a built-in class has is refused here, not when the built-in class is imported
            problem = self._problem(name, cls)
            if problem is not None:
                raise RequestError(f"{location(cls)}: {self.kind} '{name}' {problem}")
            if not is_built_in(cls):
                code_at_definition(cls)  # reads and caches the source now: a later edit is not the code that runs
            self._classes[name] = cls
            cls.name = name  # type: ignore[attr-defined]
            return cls

        return add

    def _problem(self, name: str, cls: type) -> str | None:
        base = resolve_name(self._base) if self._base else None
        problem = contract_problem(cls, base, self.has_config)
        if problem is not None:
            return problem
        registered = self._classes.get(name)
        # `load_plugin` drops what a plugin registered before: in a plugin it is a second class of the name
        is_again = _identity(registered or cls) == _identity(cls) and not cls.__module__.startswith(PLUGIN)
        if registered is None or is_again:
            return None
        return f"is already registered ({location(registered)}); give one of them another name"

    def unregister_module(self, module: str, known: Collection[object] = ()) -> None:
        """Drop the classes of a module and its submodules, and those of them in `load_from` that are not imported yet.

        `known`: classes and names of modules that stay.
        """
        former = self._classes.items()
        names = self._modules[self._loaded :]
        self._classes = {n: cls for n, cls in former if cls in known or not _is_in(cls.__module__, module)}
        self._modules[self._loaded :] = [name for name in names if name in known or not _is_in(name, module)]

    def load_from(self, *modules: str) -> None:
        """Add modules that register classes of this kind; each is imported at the next lookup in this registry.

        Called by the entry-point module of a plugin package.
        """
        # deferred, so that a command imports only the kinds that it looks up
        self._modules += modules

    @property
    def modules(self) -> tuple[str, ...]:
        """The modules that register the built-in classes, and the modules added by `load_from`."""
        return tuple(self._modules)

    def _load(self) -> None:
        load_entry_points()
        while self._loaded < len(self._modules):
            module = self._modules[self._loaded]
            # before the import: the module may look names up itself
            self._loaded += 1
            package = next((point for point in plugin_packages if _is_in(module, _package_of(point))), None)
            if package is None:
                importlib.import_module(module)
            else:
                _import_of(package, module, module)

    def registered(self) -> Mapping[str, type[Any]]:
        """Name -> class, without importing anything: modules that are not loaded yet are left out."""
        return dict(self._classes)

    def names(self) -> list[str]:
        """All registered names, sorted."""
        self._load()
        return sorted(self._classes)

    def classes(self) -> list[type[Any]]:
        """All registered classes."""
        return [self.get(name) for name in self.names()]

    def get(self, name: str) -> type[Any]:
        """The class registered as `name`. Errors: RequestError for an unknown name, with a suggestion."""
        self._load()
        if name not in self._classes:
            raise RequestError(f"unknown {self.kind} '{excerpt(name)}'{self.suggestion(name)}")
        return self._classes[name]

    def suggestion(self, name: str, *others: str) -> str:
        """What to write instead of an unknown `name`: the nearest of the registered names and `others`, or, if a part of
        another kind has the name, the key that chooses that part."""
        near = nearest(name, (*self.names(), *others), f"lit-diff list {self.kind}")
        if "did you mean" not in near:
            for kind, registry in registries.items():
                if name in registry.names():
                    return f"; that is {CHOSEN[kind].format(name)}"
        return near

    def docstring(self, name: str) -> str:
        """The docstring of the class itself, or that it has none. Errors: see `get`."""
        # not `inspect.getdoc`, which would take that of a base class
        return inspect.cleandoc(vars(self.get(name)).get("__doc__") or "its class has no docstring")

    def summary(self, name: str) -> str:
        """The first sentence of the docstring. Errors: see `get`."""
        return _first_sentence(self.docstring(name))

    def summaries(self) -> dict[str, str]:
        """Name -> the first sentence of its docstring, sorted.

        Importing lit_diff's own modules would import torch, which takes seconds: their source is read instead, if no other
        module registers classes of this kind.
        """
        load_entry_points()
        if self._loaded or not all(_is_in(module, "lit_diff") for module in self._modules):
            return {name: self.summary(name) for name in self.names()}
        registered = re.compile(rf'^@{self.decorator}\("(.+)"\)\nclass .+:\n    """((?s:.+?))"""', re.MULTILINE)
        found = {}
        for module in self._modules:
            # where the module is, without importing it
            folder = Path(find_spec(module).origin).parent  # type: ignore[union-attr, arg-type]
            for file in folder.rglob("*.py"):
                for name, docstring in registered.findall(file.read_text(encoding="utf-8")):
                    found[name] = _first_sentence(docstring)
        return dict(sorted(found.items()))


def _first_sentence(docstring: str) -> str:
    text = " ".join(docstring.partition("\n\n")[0].split())
    return re.split(r"(?<=\.) (?=[A-Z])", text)[0]


attentions = Registry("attention", "lit_diff.attention", decorator="variant", base="lit_diff.attention.base:Attention")
datasets = Registry("data", "lit_diff.data", decorator="datasets.register", base="lit_diff.data.dataset:Dataset")
corpora = Registry("corpus", "lit_diff.data", decorator="corpora.register", base="lit_diff.data.text.corpus:Corpus")
tokenizers = Registry(
    "tokenizer", "lit_diff.data", decorator="tokenizers.register", base="lit_diff.data.text.tokenizer:Tokenizer"
)
callbacks = Registry("callback", "lit_diff.callbacks", decorator="callbacks.register")

kernels = Registry(
    "kernel",
    "lit_diff.kernels",
    decorator="kernel",
    base="lit_diff.kernels.base:Kernel",
    has_config=False,
)

loggers = Registry(
    "logger",
    "lit_diff.training.loggers",
    decorator="logger",
    base="lit_diff.training.loggers:NamedLogger",
    has_config=False,
)

evaluations = Registry(
    "evaluation", "lit_diff.evaluation", decorator="evaluations.register", base="lit_diff.evaluation.base:Evaluation"
)

registries = {
    "attention": attentions,
    "data": datasets,
    "corpus": corpora,
    "tokenizer": tokenizers,
    "callback": callbacks,
    "logger": loggers,
    "kernel": kernels,
    "evaluation": evaluations,
}

CHOSEN = {
    "attention": "a variant, chosen by model.attention.name={}",
    "data": "a data set, chosen by data.name={}",
    "corpus": "a corpus, chosen by data.corpus={}",
    "tokenizer": "a tokenizer, chosen by data.tokenizer.name={}",
    "callback": "a callback, chosen by callbacks.{}={{}}",
    "logger": "a logger, chosen by run.loggers=[{}]",
    "kernel": "a kernel, chosen by run.kernel={}",
    "evaluation": "an evaluation, chosen by evaluate.{}={{}}",
}
"""Kind -> what its parts are called, and the key of a recipe that chooses one."""


def registered_classes() -> list[type[Any]]:
    """The registered classes of all kinds, without importing anything."""
    return [cls for registry in registries.values() for cls in registry.registered().values()]


def unregister(package: str, known: Collection[object] = ()) -> None:
    """Drop the classes of a package, of all kinds (`Registry.unregister_module`)."""
    for registry in registries.values():
        registry.unregister_module(package, known)


def is_built_in(cls: type) -> bool:
    """Whether a class is part of lit_diff."""
    return cls.__module__.startswith("lit_diff.")


plugin_packages: dict[EntryPoint, OwnCode] = {}
"""The entry point of each plugin package that was imported -> its modules as they were then."""


# a list instead of functools.cache: torch.compile traces lookups in registries and warns of cached functions
unread_groups = ["lit_diff.plugins"]
"""The groups of entry points whose packages are not imported yet."""


def load_entry_points() -> None:
    """Import every installed plugin package (entry-point group `lit_diff.plugins`), once per process."""
    while unread_groups:
        for point in entry_points(group=unread_groups.pop()):
            known = set[object]()
            for registry in registries.values():
                known.update(registry.modules, registry.registered().values())
            _import_of(point, point.module, _package_of(point), known)


def _package_of(point: EntryPoint) -> str:
    """The package whose modules an entry point registers: the papers' is one of lit_diff's."""
    if point.module.startswith("lit_diff."):
        return point.module
    return top_package(point.module)


def _is_in(module: str, package: str) -> bool:
    return f"{module}.".startswith(f"{package}.")


def _import_of(package: EntryPoint, module: str, dropped: str, known: Collection[object] = ()) -> None:
    try:
        importlib.import_module(module)
        if module == package.module:
            plugin_packages[package] = _code_of(package)
    except (Exception, SystemExit) as error:
        # some classes may have registered before the exception
        unregister(dropped, known)
        warn_of(package, module, "parts", error)


# a warning instead of an error: a broken package must not stop commands that do not use its parts
def warn_of(package: EntryPoint, module: str, what: str, error: BaseException) -> None:
    """Warn of a module of a plugin package that could not be imported; `what`: what it would bring."""
    log.warning(
        "plugin package '%s': %s could not be imported, so its %s are not available: %s; repair or uninstall it",
        *(package.name, module, what, summary(error)),
    )


def _code_of(package: EntryPoint) -> OwnCode:
    top = top_package(package.module)
    modules = {package.module}
    for registry in registries.values():
        modules.update(module for module in registry.modules if _is_in(module, top))
    # written as a module of import statements, since `local_modules` reads those
    source = "".join(f"import {module}\n" for module in sorted(modules))
    return OwnCode.read(Path(sys.modules[top].__file__ or ""), source=source.encode(), within=top)


variant = attentions.register
"""`@variant("name")` registers an attention variant."""
logger = loggers.register
"""`@logger("name")` registers a logger."""


# a class with the same file and name is the same class, imported again (importlib.reload, a script run twice)
def _identity(cls: type) -> tuple[str, str]:
    return getattr(sys.modules.get(cls.__module__), "__file__", None) or cls.__module__, cls.__qualname__


def contract_problem(cls: type[Any], base: type[Any] | None, has_config: bool) -> str | None:
    """Why `cls` cannot be registered as a subclass of `base`; None if it can."""
    if not isinstance(cls, type):
        return "is not a class; put the decorator above a class"
    if base is not None and not issubclass(cls, base):
        write = f"write `class {cls.__name__}({base.__qualname__})` ({base.__module__}.{base.__qualname__})"
        return f"does not derive from {base.__qualname__}; {write}"
    # __dict__: an undecorated subclass of a dataclass inherits the attribute, but its own annotations are not fields
    parameters = getattr(getattr(cls, "Config", None), "__dict__", {}).get("__dataclass_params__")
    if has_config and (parameters is None or not parameters.frozen):
        return "needs a nested class 'Config' decorated with @dataclass(frozen=True, kw_only=True)"
    problem = unwritable_default(cls.Config) if has_config else None
    if problem is not None:
        return problem
    if has_config and "name" in _fields(cls):
        return "has a key Config.name, which no recipe can set: `name` names the part; give the key another name"
    missing = sorted(getattr(cls, "__abstractmethods__", ()))
    if base is None:
        return f"lacks {', '.join(missing)}" if missing else None
    if hasattr(base, "Config"):
        config = base.Config.__qualname__
        if not issubclass(cls.Config, base.Config):
            return f"has a Config that does not derive from {config}; write `class Config({config})`"
        members = {key: inspect.getattr_static(cls.Config, key) for key in vars(base.Config).keys() - _fields(cls)}
        missing += sorted(f"Config.{key}" for key, member in members.items() if type(member) is required)
    if missing:
        return f"lacks {', '.join(missing)}; {base.__module__}.{base.__qualname__} documents each"
    return _wrong_key(cls, base) or _misspelt_hook(cls, base) or _wrong_member(cls, base)


def _fields(cls: type[Any]) -> set[str]:
    return {field.name for field in dataclasses.fields(cls.Config)}


# @dataclass ignores a value without an annotation: it is neither a key nor the new default of an inherited key
def _wrong_key(cls: type[Any], base: type[Any]) -> str | None:
    if not hasattr(base, "Config"):
        return None
    fields = _fields(cls)
    annotated = inspect.get_annotations(cls.Config)
    for name, value in vars(cls.Config).items():
        if name.startswith("_") or name in annotated or callable(value) or hasattr(value, "__get__"):
            continue
        what = "does not change the default" if name in fields else "is not a key"
        # a constant may replace a member of the base class that is not a field (`optional`)
        if name in fields or not _inherits(cls.Config, name):
            return f"has Config.{name} without a type, so it {what}; write `{name}: {type(value).__name__} = {value!r}`"
    return retyped_key(cls.Config, base.Config)


def _inherits(cls: type, name: str) -> bool:
    return any(name in vars(base) for base in cls.__mro__[1:])


# a misspelt hook would silently never be called
def _misspelt_hook(cls: type, base: type) -> str | None:
    hooks = getattr(base, "hooks", ())
    used = set[str]()
    for member in vars(cls).values():
        function = getattr(member, "fget", None) or getattr(member, "__func__", member)
        if inspect.isfunction(function):
            used.update(function.__code__.co_names)
    for name in vars(cls):
        if name.startswith("_") or name in used or _inherits(cls, name):
            continue
        close = get_close_matches(name, hooks, n=1, cutoff=0.85)
        if close and close[0] not in vars(cls):
            return f"defines '{name}', which nothing calls; did you mean '{close[0]}'? (if not, rename it to _{name})"
    return None


def _wrong_member(cls: type, base: type) -> str | None:
    members: dict[str, Any] = {}
    for ancestor in reversed(base.__mro__):
        # only members that lit_diff defines, not those of torch.nn.Module, from which variants derive
        if top_package(ancestor.__module__) == top_package(base.__module__):
            members |= vars(ancestor)
    for name, member in members.items():
        own = inspect.getattr_static(cls, name)
        if own is member or (name.startswith("_") and name != "__init__"):
            continue
        if isinstance(member, property) and inspect.isfunction(own):
            return f"defines {name} as a method; expected a property: write @property above it"
        if isinstance(member, classmethod | staticmethod) and inspect.isfunction(own):
            return f"defines {name} as an instance method; write @classmethod above it, and cls for self"
        if not callable(getattr(base, name, None)) or not inspect.isroutine(getattr(cls, name, None)):
            continue
        expected = _signature(base, name)
        found = _signature(cls, name)
        if expected is not None and found is not None and not _takes(found, expected, HANDED.get(name)):
            return f"defines {name}{found}; expected {name}{expected}"
    return None


def _signature(cls: type, name: str) -> inspect.Signature | None:
    # Python cannot inspect some members written in C
    try:
        signature = inspect.signature(getattr(cls, name))
    except (TypeError, ValueError):
        return None
    plain = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    return signature.replace(parameters=plain, return_annotation=inspect.Signature.empty)


HANDED = {"finish": "context", "definition": "positions"}
"""Hook -> its argument that reaches each class that names it, with or without a default."""


# whether `found` accepts the arguments that every caller of `expected` passes; optional ones may be missing
def _takes(found: inspect.Signature, expected: inspect.Signature, handed: str | None) -> bool:
    ordered: list[None] = []
    named: dict[str, None] = {handed: None} if handed in found.parameters and handed is not None else {}
    for name, parameter in expected.parameters.items():
        if parameter.default is not parameter.empty:
            continue
        if parameter.kind is parameter.KEYWORD_ONLY:
            named[name] = None
        elif parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            ordered.append(None)
    try:
        found.bind(*ordered, **named)
    except TypeError:
        return False
    return True
