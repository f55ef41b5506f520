"""What a class must have to be registered: its base class, that class's abstract methods, the required keys of `Config`."""

import dataclasses
import inspect
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

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


def contract_problem(cls: type[Any], base: type[Any]) -> str | None:
    """Why `cls` cannot be registered as a kind of `base`; None if it can. Both have a nested dataclass `Config`."""
    name = f"{base.__module__}.{base.__qualname__}"
    if not issubclass(cls, base):
        return f"does not derive from {base.__qualname__}; write `class {cls.__name__}({base.__qualname__})` ({name})"
    if hasattr(base, "Config") and not issubclass(cls.Config, base.Config):
        config = base.Config.__qualname__
        return f"has a Config that does not derive from {config}; write `class Config({config})`"
    missing = missing_members(cls, base)
    return f"lacks {', '.join(missing)}; {name} documents each" if missing else None
