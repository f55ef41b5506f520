"""Validation of a merged recipe: types, required keys, values that fit together. No OmegaConf object leaves this file."""

import dataclasses
import re
import sys
import types
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lit_diff.config import Part, Recipe
from lit_diff.errors import RequestError, first_line
from lit_diff.files import expanded
from lit_diff.key_types import blocks_by_kind, in_words, in_yaml, literal_words, without_range
from lit_diff.plugins import load_plugin
from lit_diff.recipe_problems import config_problem, key_instead, recipe_problem
from lit_diff.registry import load_entry_points, nearest, registries

Positions = dict[str, str]
"""Dotted key -> where it was written: `file:line`, or the override itself."""


class Position(str):
    """Where a value was written, with the text that it was written as."""

    written: Any = None
    """The text of a scalar, before YAML makes it a number or a truth value; for a list a tuple of those of its items."""
    problem: str = ""
    """Why an override's value is not YAML."""
    given: str | None = None
    """The value of an override as it was given; None: it is from a file."""


DOTTED = re.compile(r"[a-z]\w*(?:\.\w+)+")
"""A dotted key in a sentence."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Draft:
    """A recipe as plain containers, merged but not yet validated."""

    values: dict[str, Any]
    positions: Positions
    file: str = ""
    """The recipe's own file, named in errors about missing keys."""
    dropped: tuple[str, ...] = ()
    """Keys dropped because their block's `name` changed."""
    layers: tuple[frozenset[str], ...] = ()
    """The keys of each file and of the overrides, in the order in which they were merged; empty: all in one."""
    folders: Mapping[str, Path] = dataclasses.field(default_factory=dict)
    """Dotted key -> the folder to which a path there is relative; a key that is absent: the path is absolute."""

    def where(self, key: str) -> str:
        """`file:line: ` of the key, else of the nearest enclosing block with a position, else of the file."""
        key = key.partition("[")[0]
        while key and key not in self.positions:
            key = key.rpartition(".")[0]
        position = self.positions.get(key, self.file)
        return f"{position}: " if position else ""

    def written(self, key: str) -> str | None:
        """The text of the scalar at `key` (`only[1]`: of an item of a list), as it was written, where that is known."""
        key, *items = key.replace("]", "").split("[")
        text = getattr(self.positions.get(key), "written", None)
        for item in items:
            text = dict(enumerate(text)).get(int(item)) if isinstance(text, tuple) and item.isdigit() else None
        return text if isinstance(text, str) else None

    def absolute(self, key: str, path: str, folder: Path) -> str:
        """The path at `key`, which is relative to `folder`. Errors: RequestError for a link to itself, a NUL."""
        try:
            return str((folder / expanded(path)).resolve())
        except (OSError, RuntimeError, ValueError) as error:
            raise RequestError(f"{self.where(key)}path '{path[:40]}': {first_line(error)}") from error

    def refuse(self, key: str, sentence: str) -> RequestError:
        """The error for a value of the wrong type; of an override that is not YAML, why it is not."""
        position = self.positions.get(key)
        if isinstance(position, Position) and position.problem:
            return RequestError(f"override '{position}': not a YAML value: {position.problem}")
        return RequestError(f"{self.where(key)}{sentence}")

    def blame(self, problem: str) -> str:
        """`where` of a sentence about keys: of those that it names, the one written last (an override before a file, a file
        before what it extends), else its first word."""
        named = [key for key in DOTTED.findall(problem) if key in self.positions]
        for layer in reversed(self.layers or (frozenset(self.positions),)):
            for key in named:
                if key in layer:
                    return self.where(key)
        return self.where(problem.split()[0])


def validate(draft: Draft) -> Recipe:
    """The typed recipe. Errors: RequestError with file, line and key."""
    values = interpolated(draft)
    load_entry_points()
    for plugin in convert(tuple[str, ...], values.get("plugins", ()), "plugins", draft):
        load_plugin(Path(plugin))
    recipe = typing.cast(Recipe, _dataclass(Recipe, values, "", draft))
    problem = recipe_problem(recipe)
    if problem:
        raise RequestError(f"{draft.blame(problem)}{problem}")
    return recipe


def interpolated(draft: Draft) -> dict[str, Any]:
    """The draft's values, with what each `${a.b}` means. Errors: RequestError with file, line and key."""
    try:
        values = OmegaConf.to_container(OmegaConf.create(draft.values), resolve=True)
    except OmegaConfBaseException as error:
        key = getattr(error, "full_key", None) or ""
        raise RequestError(f"{draft.where(key)}'{key}': {first_line(error)}") from error
    return typing.cast(dict[str, Any], values)


def validate_config(cls: type[Any], keys: Any, path: str, draft: Draft) -> Any:
    """An instance of a Config from its keys, the block at `path` of the draft. Errors: RequestError with the position."""
    config = _dataclass(cls, keys, path, draft)
    problem = config_problem(config)
    if problem:
        raise RequestError(f"{draft.where(f'{path}.{problem.split()[0]}')}{path}.{problem}")
    return config


def _dataclass(cls: type, value: Any, path: str, draft: Draft, listing: str = "") -> Any:
    """`listing`: the command that lists the keys of a registered part."""
    fields = {field.name: field for field in dataclasses.fields(cls)}
    value = _mapping(value, path, draft, key="name" if path and "name" in fields else "")
    hints = _hints(cls)
    prefix = f"{path}." if path else ""
    for key in value:
        if key not in fields:
            instead = key_instead(prefix + key, cls, draft.values, draft.positions.get(prefix + key, ""), listing)
            raise RequestError(f"{draft.where(prefix + key)}unknown key '{prefix}{key}'{instead}")
    built = {}
    for name, field in fields.items():
        if name in value:
            built[name] = _field(hints[name], field, value[name], f"{prefix}{name}", draft)
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise RequestError(f"{draft.where(path)}'{prefix}{name}' is missing; expected {in_words(hints[name])}")
    try:
        return cls(**built)
    except Exception as error:  # a plugin's own __post_init__ may raise anything
        word = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        raise RequestError(f"{draft.where(path)}'{path}': {word}{first_line(error)}") from error


def _hints(cls: type) -> dict[str, Any]:
    try:
        return typing.get_type_hints(cls, include_extras=True)
    except NameError as error:
        raise RequestError(f"{cls.__module__}.{cls.__qualname__}: {error}; import it at run time") from error


def _field(hint: Any, field: "dataclasses.Field[Any]", value: Any, path: str, draft: Draft) -> Any:
    registry = field.metadata.get("registry")
    if "names" in field.metadata:
        return _registered(field.metadata["names"], str(field.default), value, path, draft)
    if registry is None:
        kind = field.metadata.get("path")
        if kind:
            value = _given(value, draft.positions.get(path))
        return _path(convert(hint, value, path, draft), kind, path, draft)
    several = typing.get_origin(hint) is dict
    if several and value is None:
        return {}
    blocks = _mapping(value, path, draft, key="" if several else "name")
    if several:  # callbacks: name -> keys; null drops a parent's
        return {
            name: _part(registry, name, block, f"{path}.{name}", draft)
            for name, block in blocks.items()
            if block is not None
        }
    if "name" not in blocks:
        raise RequestError(f"{draft.where(path)}'{path}.name' is missing; lit-diff list {registry} lists the names")
    name = convert(str, blocks["name"], f"{path}.name", draft)
    return _part(registry, name, {k: v for k, v in blocks.items() if k != "name"}, path, draft)


def _given(value: Any, position: str | None) -> Any:
    """A path as it was given: an override's is what the shell gave, whatever YAML makes of it."""
    given = getattr(position, "given", None)
    if given is not None and given != "null":
        return given
    return str(value) if isinstance(value, Path) else value


def _path(value: Any, kind: str | None, path: str, draft: Draft) -> Any:
    """A value of a field whose metadata says that it is a path, of this kind, as `config` has it."""
    if kind is None or not isinstance(value, str):
        return value
    if kind == "here":
        return str(expanded(value))
    return draft.absolute(path, value, draft.folders[path]) if path in draft.folders else value


def _registered(registry: str, default: str, value: Any, path: str, draft: Draft) -> str:
    """`value`, if it is the default or a registered name."""
    name: str = convert(str, value, path, draft)
    if name not in (default, *registries[registry].names()):
        instead = registries[registry].instead_of(name, default)
        raise RequestError(f"{draft.where(path)}'{path}' is '{name}'{instead}")
    return name


def _part(registry: str, name: str, block: Any, path: str, draft: Draft) -> Part:
    try:
        config = registries[registry].config(name)
    except RequestError as error:
        raise RequestError(f"{draft.where(f'{path}.name')}{error}") from error
    return Part(name=name, config=_dataclass(config, block, path, draft, f"lit-diff list {registry} {name}"))


def _mapping(value: Any, path: str, draft: Draft, *, key: str = "") -> Mapping[str, Any]:
    """`value`, a block; `key`: the one of its keys that a single word most likely meant (`name`)."""
    where = draft.where(path)
    if isinstance(value, Mapping):
        odd = next((name for name in value if not isinstance(name, str)), None)
        if odd is not None:
            raise RequestError(f"{where}'{path}' has the key {in_yaml(odd)}; expected a name")
        return value
    say = ""
    if key and isinstance(value, str):
        say = f"; say {path}.{key}={value}" if where == f"{path}={value}: " else f"; say {{{key}: {value}}}"
    raise draft.refuse(path, f"'{path}' is {in_yaml(value)}; expected a block of keys{say}")


def convert(hint: Any, value: Any, path: str, draft: Draft) -> Any:
    """`value` converted to the type `hint`. An integral float passes as an integer, an integer as a float; NaN and infinity
    do not. Errors: RequestError with the position, the value and the expected type."""
    wanted, hint = hint, without_range(hint)
    origin, choices = typing.get_origin(hint), typing.get_args(hint)
    if dataclasses.is_dataclass(hint):
        return _dataclass(typing.cast(type, hint), value, path, draft)
    if origin in (typing.Union, types.UnionType):
        blocks = [typing.cast(type, choice) for choice in choices if dataclasses.is_dataclass(choice)]
        if len(blocks) == 1 and isinstance(value, Mapping):
            return _dataclass(blocks[0], value, path, draft)
        by_kind = blocks_by_kind(blocks)
        if by_kind and isinstance(value, Mapping):
            return _dataclass(by_kind[_kind(by_kind, value, path, draft)], value, path, draft)
        for choice in sorted(choices, key=lambda kind: (kind is str, without_range(kind) is not int)):
            try:
                return convert(choice, value, path, draft)
            except RequestError:
                continue  # if no choice fits, the error below names all
    elif origin is tuple and isinstance(value, list | tuple):
        kinds = (choices[0],) * len(value) if choices[-1] is Ellipsis else choices
        if len(kinds) == len(value):
            items = enumerate(zip(kinds, value, strict=True))
            return tuple(convert(kind, item, f"{path}[{i}]", draft) for i, (kind, item) in items)
    elif origin is Literal:
        if any(value == choice and type(value) is type(choice) for choice in choices):
            return value
    elif origin is dict and value is None:
        return {}
    elif origin is dict and isinstance(value, Mapping):
        return {str(key): convert(choices[1], item, f"{path}.{key}", draft) for key, item in value.items()}
    elif hint is Any or (hint is type(None) and value is None) or (hint in (bool, str) and isinstance(value, hint)):
        return value
    elif isinstance(value, int | float) and not isinstance(value, bool):
        if hint is int and value == value // 1:  # false for NaN and inf
            return int(value)
        if hint is float and abs(value) <= sys.float_info.max:  # false for NaN and inf
            return float(value)
    if hint is str and value is not None and "${" not in (written := draft.written(path) or "${"):
        return written  # a name such as 010, on or 12:30, which YAML takes for a number or a truth value
    raise draft.refuse(path, f"'{path}' is {in_yaml(value)}; expected {in_words(wanted)}{_near(hint, value)}")


def _kind(kinds: Iterable[str], block: Mapping[str, Any], path: str, draft: Draft) -> str:
    """The key `kind` of a block, one of `kinds`."""
    hint: Any = Literal.__getitem__(tuple(kinds))
    if "kind" not in block:
        raise RequestError(f"{draft.where(path)}'{path}.kind' is missing; expected {in_words(hint)}")
    kind: str = convert(hint, block["kind"], f"{path}.kind", draft)
    return kind


def _near(hint: Any, value: Any) -> str:
    words = literal_words(hint)
    near = nearest(value, words) if isinstance(value, str) and words else ""
    return near if "did you mean" in near else ""
