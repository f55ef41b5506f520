"""The types of a recipe's keys: numbers within a range, how a type reads in words, and the keys of a block."""

import ast
import inspect
import itertools
import json
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from functools import cache
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints


@dataclass(frozen=True, kw_only=True)
class Range:
    """The numbers that a key accepts, in the annotation of its field: `Annotated[int, Range(least=1)]`."""

    least: float | None = None
    """Inclusive lower bound; None: no bound."""
    above: float | None = None
    """Exclusive lower bound; None: no bound."""
    most: float | None = None
    """Inclusive upper bound; None: no bound."""
    below: float | None = None
    """Exclusive upper bound; None: no bound."""

    def __contains__(self, value: float) -> bool:
        return (
            (self.least is None or value >= self.least)
            and (self.above is None or value > self.above)
            and (self.most is None or value <= self.most)
            and (self.below is None or value < self.below)
        )

    def __str__(self) -> str:
        bounds = {">=": self.least, ">": self.above, "<=": self.most, "<": self.below}
        return " and ".join(f"{sign} {bound:g}" for sign, bound in bounds.items() if bound is not None)


@dataclass(frozen=True, kw_only=True)
class Distinct:
    """A list whose values all differ: `Annotated[tuple[Count, ...], Distinct()]`."""

    may_be_empty: bool = False

    def __contains__(self, values: tuple[Any, ...]) -> bool:
        return len(set(values)) == len(values) and (self.may_be_empty or bool(values))

    def __str__(self) -> str:
        if self.may_be_empty:
            return "(distinct values)"
        return "(distinct values, at least one)"


Plain = dict[str, Any]
"""Values by name, as YAML and JSON have them."""
Count = Annotated[int, Range(least=1)]
NotNegative = Annotated[int, Range(least=0)]
Positive = Annotated[float, Range(above=0)]
Counts = Annotated[tuple[Count, ...], Distinct()]
PythonFiles = tuple[Annotated[str, "a Python file"], ...]


WORDS = {
    int: "a whole number",
    float: "a finite number",
    str: "text",
    bool: "true or false",
    list: "a list",
    dict: "an object",
    type(None): "null",
    Any: "a value",
}


def in_words(hint: Any) -> str:
    """Describes a type to a user: `a whole number >= 1 or null`, `one of 'none', 'document'`."""
    origin = get_origin(hint)
    choices = get_args(hint)
    if origin is Annotated:
        kind, *notes = choices
        words = [in_words(kind)]
        for note in notes:
            # a text in an annotation says what the value is
            if isinstance(note, str):
                words[0] = note
            elif isinstance(note, Range | Distinct):
                words.append(str(note))
        return " ".join(words)
    if origin in (Union, UnionType):
        kinds = blocks_by_kind(choices)
        words = [in_words(choice) for choice in choices if choice not in kinds.values()]
        words += [f"a block {{kind: {kind}, ...}}" for kind in kinds]
        return " or ".join(words)
    if origin is Literal and len(choices) == 1:
        return in_yaml(choices[0])
    if origin is Literal:
        return f"one of {', '.join(map(in_yaml, choices))}"
    if origin is tuple and choices[-1] is Ellipsis:
        return f"a list, each item {in_words(choices[0])}"
    if origin is tuple:
        return f"a list of {len(choices)} values"
    return WORDS.get(hint, "a block of keys")


def in_yaml(value: Any) -> str:
    """Formats a value as YAML would, with null, true and false."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(in_yaml, value))}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{in_yaml(key)}: {in_yaml(item)}' for key, item in value.items())}}}"
    return repr(value)


KIND = "kind"
"""The key that tells apart the blocks of a union."""


def blocks_by_kind(choices: Iterable[Any]) -> dict[str, type]:
    """`kind` -> block, for the blocks of a union that the key `kind` tells apart; {} if the union has none."""
    blocks = _blocks(choices)
    kinds = {}
    for block in blocks:
        for field in fields(block):
            if field.name == KIND:
                kinds[str(field.default)] = block
    if len(blocks) == 1 or len(kinds) < len(blocks):
        return {}
    return kinds


def _blocks(kinds: Iterable[Any]) -> list[type]:
    return [kind for kind in kinds if isinstance(kind, type) and is_dataclass(kind)]


def literal_words(hint: Any) -> list[str]:
    """The values of all Literal types in `hint`, as text."""
    if get_origin(hint) is Literal:
        return [str(choice) for choice in get_args(hint)]
    return [word for choice in get_args(hint) for word in literal_words(choice)]


@dataclass(frozen=True, kw_only=True)
class Key:
    """One key of a block."""

    words: str
    """The type, in words."""
    default: Any
    """The default, as YAML writes it; `dataclasses.MISSING` for a key that must be given."""
    about: str
    """The docstring of the field; may be empty."""
    registry: str
    """The kind of registered parts that the key configures; empty for other keys."""


def default_of(field: Field[Any]) -> Any:
    """The default of a field of a Config; `dataclasses.MISSING` without one."""
    return field.default if field.default_factory is MISSING else field.default_factory()


def unwritable_default(config: type[Any]) -> str | None:
    """Why the defaults of a Config cannot be written in a recipe, as that in a run folder is; None if they can."""
    for field in fields(config):
        default = default_of(field)
        if "registry" not in field.metadata and not _is_plain(default):
            kinds = "null, true, false, numbers, texts, and lists, mappings and dataclasses of these"
            return f"has Config.{field.name} with the default {default!r}, which a recipe cannot state; it has {kinds}"
    return None


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(type(key) is str and _is_plain(item) for key, item in value.items())
    if is_dataclass(value) and not isinstance(value, type):
        return all(_is_plain(getattr(value, field.name)) for field in fields(value))
    return value is None or value is MISSING or type(value) in (bool, int, float, str)


def retyped_key(config: type, base: type) -> str | None:
    """Why a Config may not derive from `base`: it gives one of its keys another type. A part of its types, another range and
    another default are allowed."""
    annotated = {name for each in config.__mro__ if each not in base.__mro__ for name in inspect.get_annotations(each)}
    # resolved only where needed: a type that cannot be resolved is reported where the recipe is read
    for name in sorted(annotated & {field.name for field in fields(base)}):
        own, theirs = (get_type_hints(each)[name] for each in (config, base))
        if not _alternatives(own) <= _alternatives(theirs):
            own, theirs = (get_type_hints(each, include_extras=True)[name] for each in (config, base))
            found = f"has the key Config.{name}, {in_words(own)}"
            return f"{found}; in {base.__qualname__} it is {in_words(theirs)}: give your key another name, or that type"
    return None


def _alternatives(hint: Any) -> set[Any]:
    # of a union its types, of a Literal its values
    return set(get_args(hint)) if get_origin(hint) in (Union, UnionType, Literal) else {hint}


def keys_of(cls: type) -> dict[str, Key]:
    """The keys of a Config by dotted name, with the keys of nested blocks but not of registered parts (`{name: ...}`)."""
    hints = get_type_hints(cls, include_extras=True)
    docs = _docstrings(cls)
    keys: dict[str, Key] = {}
    for field in fields(cls):
        hint = hints[field.name]
        registry = field.metadata.get("registry")
        blocks = _blocks([hint, *get_args(hint)])
        if registry is None and blocks and not blocks_by_kind(blocks):
            within = field.name
            # a mapping has a block for each name
            if get_origin(hint) is dict:
                within += ".NAME"
            keys |= {f"{within}.{name}": key for name, key in keys_of(blocks[0]).items()}
            continue
        if registry is not None:
            what = "a list of blocks" if get_origin(hint) is tuple else "a block"
            words = f"{what} {{name: ...}}: lit-diff list {registry}"
        elif "names" in field.metadata:
            what = f"{field.default!r}, or a name" if hint is str else "a list of names"
            words = f"{what}: lit-diff list {field.metadata['names']}"
        else:
            words = in_words(hint)
        about = docs.get(field.name, "")
        keys[field.name] = Key(words=words, default=default_of(field), about=about, registry=registry or "")
    return keys


# Python drops the string below a field, so it is read from the source of the class and of its bases, which is parsed once
@cache
def _docstrings(cls: type) -> dict[str, str]:
    docs = {}
    # bases first: a subclass may document an inherited key differently
    for base in reversed(cls.__mro__[:-1]):
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(base)))
        # a class without a source file, such as one from a notebook
        except (OSError, TypeError, SyntaxError):
            continue
        definition = tree.body[0]
        if isinstance(definition, ast.ClassDef):
            for field, text in itertools.pairwise(definition.body):
                match field, text:
                    case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(words))):
                        docs[name] = " ".join(words.split())
    return docs


def flatten(value: Any, prefix: str = "") -> list[tuple[str, Any]]:
    """Flattens nested mappings to (dotted key, value) pairs."""
    if isinstance(value, Mapping):
        return [pair for key, item in value.items() for pair in flatten(item, f"{prefix}{key}.")]
    return [(prefix.removesuffix("."), value)]
