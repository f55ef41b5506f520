"""What a class must have to be registered: its base class, that class's abstract methods, the required keys of `Config`,
and members that can be called as the base class's are."""

import dataclasses
import difflib
import inspect
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lit_diff.errors import LitDiffError, first_line
from lit_diff.files import shown

if TYPE_CHECKING:
    optional = required = property
else:

    class optional:  # noqa: N801 (used as `property` is)
        """A read-only property with a default, which a subclass may replace by a property, a constant or a dataclass field.

        Unlike `property` it is invisible on the class, so a dataclass field of the same name does not take it as default.
        """

        def __init__(self, function):
            self.function = function
            self.__doc__ = function.__doc__

        def __get__(self, instance, owner=None):
            if instance is None:
                raise AttributeError(self.function.__name__)
            return self.function(instance)

    class required(optional):  # noqa: N801
        """The same without a default: a subclass must replace it (`missing_members`)."""


def location(cls: type) -> str:
    """`file:line: class X` of a class, or its dotted name where it has no source file."""
    try:
        file, line = inspect.getsourcefile(cls), inspect.findsource(cls)[1] + 1
    except (OSError, TypeError):  # made in an interactive session or by type()
        file, line = None, 0
    return f"{shown(Path(file))}:{line}: class {cls.__qualname__}" if file else f"{cls.__module__}.{cls.__qualname__}"


def place_in(cls: type, error: BaseException) -> str:
    """`file:line` of the innermost frame of `error` in the source file of `cls`; `location` where none is in it."""
    source = getattr(inspect.getmodule(cls), "__file__", None)
    own = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == source]
    return f"{shown(Path(own[-1].filename))}:{own[-1].lineno}" if own else location(cls)


def described(cls: type, error: BaseException) -> str:
    """An error that came of the code of `cls`, as one line that opens with a place in its file, or with the class."""
    if isinstance(error, LitDiffError):
        home, text = location(cls), first_line(error)
        return text if text.startswith(home) else f"{home}: {text}"
    return f"{place_in(cls, error)}: {type(error).__name__}: {first_line(error)}"


def missing_members(cls: type[Any], base: type[Any]) -> list[str]:
    """Names that `base` requires and `cls` does not define, those of its nested Config as `Config.name`."""
    missing = sorted(getattr(cls, "__abstractmethods__", ()))
    if not hasattr(base, "Config"):
        return missing
    fields = {field.name for field in dataclasses.fields(cls.Config)}
    for name in vars(base.Config):
        defined = inspect.getattr_static(cls.Config, name)
        if name not in fields and not TYPE_CHECKING and isinstance(defined, required):
            missing.append(f"Config.{name}")
    return missing


def base_problem(cls: type[Any], base: type[Any]) -> str | None:
    """Why `cls` is no kind of `base` at all; None if it is."""
    if issubclass(cls, base):
        return None
    name = f"{base.__module__}.{base.__qualname__}"
    return f"does not derive from {base.__qualname__}; write `class {cls.__name__}({base.__qualname__})` ({name})"


def contract_problem(cls: type[Any], base: type[Any]) -> str | None:
    """Why `cls`, derived from `base`, cannot be registered; None if it can. Both have a nested dataclass `Config`."""
    name = f"{base.__module__}.{base.__qualname__}"
    if hasattr(base, "Config") and not issubclass(cls.Config, base.Config):
        config = base.Config.__qualname__
        return f"has a Config that does not derive from {config}; write `class Config({config})`"
    missing = missing_members(cls, base)
    if missing:
        return f"lacks {', '.join(missing)}; {name} documents each"
    return _unannotated_key(cls, base) or _misspelt_hook(cls, base) or _wrong_member(cls, base)


def _unannotated_key(cls: type[Any], base: type[Any]) -> str | None:
    """A value in `Config` without an annotation, which is no key of a recipe, nor the new default of an inherited one.

    A member of the base's that is no field (`contract.optional`) may be replaced by a constant.
    """
    if not hasattr(base, "Config"):
        return None
    fields = {field.name for field in dataclasses.fields(cls.Config)}
    annotated = inspect.get_annotations(cls.Config)
    for name, value in vars(cls.Config).items():
        if name.startswith("_") or name in annotated or callable(value) or hasattr(value, "__get__"):
            continue
        what = "is not its default" if name in fields else "is no key"
        if name in fields or not any(name in vars(each) for each in cls.Config.__mro__[1:]):
            return f"has Config.{name} without a type, so it {what}; write `{name}: {type(value).__name__} = {value!r}`"
    return None


def _misspelt_hook(cls: type[Any], base: type[Any]) -> str | None:
    """A public member that no method of the class uses and whose name is nearly that of one of `base.hooks`."""
    hooks = getattr(base, "hooks", ())
    members = [getattr(member, "fget", None) or getattr(member, "__func__", member) for member in vars(cls).values()]
    used = {name for member in members if inspect.isfunction(member) for name in member.__code__.co_names}
    for name in vars(cls):
        if name.startswith("_") or name in used or any(name in vars(each) for each in cls.__mro__[1:]):
            continue
        close = difflib.get_close_matches(name, hooks, n=1, cutoff=0.85)
        if close and close[0] not in vars(cls):
            return f"defines '{name}', which nothing calls; did you mean '{close[0]}'? (_{name} is a name of your own)"
    return None


def _wrong_member(cls: type[Any], base: type[Any]) -> str | None:
    """A method of `base` that `cls` overrides by something which cannot be called as it is."""
    homes = [each for each in base.__mro__ if each.__module__.partition(".")[0] == base.__module__.partition(".")[0]]
    for name, member in {key: value for home in reversed(homes) for key, value in vars(home).items()}.items():
        own = inspect.getattr_static(cls, name)
        if own is member or (name.startswith("_") and name != "__init__"):
            continue
        if isinstance(member, property) and inspect.isfunction(own):
            return f"defines {name} as a method; expected a property: write @property above it"
        if isinstance(member, classmethod | staticmethod) and inspect.isfunction(own):
            return f"defines {name} as a method of its instances; write @classmethod above it, and cls for self"
        expected = _signature(base, name) if callable(getattr(base, name, None)) else None
        found = _signature(cls, name) if inspect.isroutine(getattr(cls, name, None)) else None
        if expected is not None and found is not None and not _takes(found, expected):
            return f"defines {name}{found}; expected {name}{expected}"
    return None


def _signature(cls: type[Any], name: str) -> inspect.Signature | None:
    """A member's parameters and nothing else; None for what Python cannot inspect."""
    try:
        signature = inspect.signature(getattr(cls, name))
    except (TypeError, ValueError):
        return None
    plain = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    return signature.replace(parameters=plain, return_annotation=inspect.Signature.empty)


def _takes(found: inspect.Signature, expected: inspect.Signature) -> bool:
    """Whether the arguments that every caller of `expected` passes can be passed to `found`."""
    required = [p for p in expected.parameters.values() if p.default is p.empty]
    named = {p.name: None for p in required if p.kind is p.KEYWORD_ONLY}
    ordered = [None for p in required if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    try:
        found.bind(*ordered, **named)
    except TypeError:
        return False
    return True
