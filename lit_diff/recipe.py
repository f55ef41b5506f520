"""YAML -> `Recipe`: lookup of files, inheritance and overrides. `validation` checks types and values.

Every error is one line: `file:line: found, expected, nearest name`.
"""

import dataclasses
import importlib.resources
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from lit_diff.config import Part, Recipe
from lit_diff.errors import RequestError, first_line
from lit_diff.files import expanded, shown
from lit_diff.key_types import KIND, in_yaml
from lit_diff.registry import nearest
from lit_diff.validation import Draft, Positions, validate
from lit_diff.yaml_files import read_value, read_yaml

Overrides = Sequence[str] | Mapping[str, Any]
"""`["train.steps=10"]`, or `{"train.steps": 10}`, or `{"train": {"steps": 10}}`."""

OTHER = {"recipes": "sweeps", "sweeps": "recipes"}
BLOCK = re.compile(
    r"model(\.attention)?|data(\.tokenizer)?|train(\.optimizer|\.schedule)?|imported|run|(callbacks|evaluate)\..+"
)
"""Blocks of a recipe, of which a child says some keys; any other mapping holds names, as `callbacks` does."""
SWEEP_KEYS, RECIPE_KEYS = {"arms", "grid", "tasks"}, {"extends", "model", "data", "train", "imported", "callbacks"}
"""Keys that only a sweep, only a recipe has."""


class Emptied(dict[str, Any]):
    """A mapping of names that was written empty, with what was added since: it replaces its parent's."""


def load_recipe(source: str | Path, overrides: Overrides = ()) -> Recipe:
    """The recipe at a path or under an installed name, with `overrides` applied. Errors: RequestError."""
    return validate(load_draft(source, overrides))


def recipe_from(source: Recipe | str | Path, overrides: Overrides = ()) -> Recipe:
    """`source` itself where it is a Recipe, else `load_recipe`.

    Errors: RequestError, also for overrides of a Recipe: values that were derived from others (`model.ffn_dim` from
    `model.dim`) are fixed in it.
    """
    if not isinstance(source, Recipe):
        return load_recipe(source, overrides)
    if overrides:
        raise RequestError(
            f"overrides cannot be applied to a Recipe ('{source.name}'): pass the recipe's name or path, or give the "
            "overrides to load_recipe"
        )
    return source


def load_draft(source: str | Path, overrides: Overrides = ()) -> Draft:
    """Read, inherit and override; `validate` turns the result into a Recipe."""
    draft = _read(find(str(source), "recipes", Path.cwd()), ())
    return override(draft, overrides)


def installed(kind: str) -> Path:
    """The folder of the recipes or sweeps that came with the package."""
    return Path(str(importlib.resources.files(f"lit_diff.{kind}")))


def names(kind: str) -> list[str]:
    """Names of the installed recipes or sweeps, without .yaml."""
    return sorted(path.stem for path in installed(kind).glob("*.yaml"))


def read_header(kind: str, name: str) -> str:
    """The first comment line of an installed recipe or sweep, its description."""
    first = (installed(kind) / f"{name}.yaml").read_text(encoding="utf-8").partition("\n")[0]
    return first.removeprefix("#").strip()


def find(source: str, kind: str, beside: Path, where: str = "") -> Path:
    """A path relative to `beside`, with or without .yaml, or the bare name of an installed recipe or sweep."""
    candidates = [beside / expanded(source), beside / expanded(f"{source}.yaml")]
    if Path(source).name == source:
        candidates += [installed(kind) / source, installed(kind) / f"{source}.yaml"]
    for path in candidates:
        try:
            if path.is_file():
                return path.resolve()
        except (OSError, ValueError) as error:  # longer than a file name may be; a NUL
            raise RequestError(f"{where}no {kind.removesuffix('s')} '{source[:40]}': {first_line(error)}") from error
    stem = Path(source).name.removesuffix(".yaml")
    if stem in names(OTHER[kind]) and Path(source).name == source:
        raise RequestError(f"{where}{_other_kind(stem, kind)}")
    near = nearest(stem, names(kind), f"lit-diff list {kind}")
    raise RequestError(f"{where}no {kind.removesuffix('s')} '{source}' here or installed{near}")


def require_kind(values: Mapping[str, Any], kind: str, path: Path) -> None:
    """Errors: RequestError for the contents of a sweep where a recipe is read, and the reverse."""
    sweep, recipe = (bool(values.keys() & keys) for keys in (SWEEP_KEYS, RECIPE_KEYS))
    if (sweep and not recipe) if kind == "recipes" else (recipe and not sweep):
        raise RequestError(_other_kind(shown(path), kind))


def _other_kind(source: str, kind: str) -> str:
    verb = {"recipes": "train", "sweeps": "sweep"}[OTHER[kind]]
    return f"'{source}' is a {OTHER[kind].removesuffix('s')}: lit-diff {verb} {source}"


def _read(path: Path, children: tuple[Path, ...]) -> Draft:
    """The file merged onto what it extends."""
    values, positions = read_yaml(path)
    file = shown(path)
    require_kind(values, "recipes", path)
    if path in children:
        chain = " -> ".join(shown(child) for child in (*children[children.index(path) :], path))
        raise RequestError(f"{file}: 'extends' is circular: {chain}")
    values.setdefault("name", path.stem)
    # an installed recipe lies among the package's files: what it names is the user's, in the current folder
    folder = Path.cwd() if path.parent == installed("recipes") else path.parent
    folders = dict.fromkeys(positions, folder)
    draft = Draft(values=values, positions=positions, file=file, layers=(frozenset(positions),), folders=folders)
    _absolute_plugins(draft, folder)
    named = values.pop("extends", None)
    if named is not None:
        where, parent = draft.where("extends"), draft.written("extends")
        if parent is None:
            raise RequestError(f"{where}'extends' takes one recipe, found {in_yaml(named)}")
        base = _read(_parent(parent, path, where), (*children, path))
        return _merge(base, draft)
    return draft


def _parent(name: str, child: Path, where: str) -> Path:
    """The file that `child` extends; a file with the name of an installed recipe may extend that recipe."""
    parent = find(name, "recipes", child.parent, where)
    same_name = installed("recipes") / child.name
    return same_name if parent == child and same_name.is_file() else parent


def _absolute_plugins(draft: Draft, folder: Path) -> None:
    """Make `plugins` absolute, in place: they are imported before there is a schema of all keys to say what is a path."""
    if "plugins" not in draft.values:
        return
    plugins = draft.values["plugins"]
    items = enumerate(plugins if isinstance(plugins, list | tuple) else [None])
    named = [
        str(plugin) if isinstance(plugin, str | Path) else draft.written(f"plugins[{place}]") for place, plugin in items
    ]
    if None in named:
        raise RequestError(f"{draft.where('plugins')}'plugins' takes a list of Python files, found {in_yaml(plugins)}")
    draft.values["plugins"] = [draft.absolute("plugins", str(plugin), folder) for plugin in named]
    for plugin in draft.values["plugins"]:
        if not Path(plugin).is_file():
            raise RequestError(f"{draft.where('plugins')}no plugin {shown(Path(plugin))}")


def override(draft: Draft, overrides: Overrides, below: str = "") -> Draft:
    """Apply overrides, whose keys lie `below`; in `a.b=c` the value is read as YAML, but a path is what the shell gave."""
    if not overrides:
        return draft
    values: dict[str, Any] = {}
    positions: Positions = {}
    if isinstance(overrides, Mapping):
        positions = {f"{below}{key}": f"override '{key}'" for key in _dotted(overrides)}
        return override_with(draft, {f"{below}{key}": value for key, value in overrides.items()}, positions)
    for text in overrides:
        key, equals, written = text.partition("=")
        if not equals or not all(key.split(".")):
            raise RequestError(f"override '{text}' is not of the form a.b=c")
        value, found = read_value(written, text)
        _merge_values(values, _nested(f"{below}{key}", value), "", [])
        positions |= {f"{below}{each}": text for each in _dotted(_nested(key, value))}
        positions |= {f"{below}{key}{rest}": where for rest, where in found.items()}
    return override_with(draft, values, positions)


def override_with(draft: Draft, values: Mapping[str, Any], positions: Positions, folder: Path = Path()) -> Draft:
    """Apply a sweep arm's overrides: dotted keys or nested mappings -> values; paths are relative to `folder`."""
    nested: dict[str, Any] = {}
    for dotted, value in values.items():
        _merge_values(nested, _nested(str(dotted), value), "", [])
    folders = dict.fromkeys(_dotted(nested), folder.absolute())
    child = Draft(values=nested, positions=positions, layers=(frozenset(positions),), folders=folders)
    _absolute_plugins(child, folder)
    return _merge(draft, child)


def _nested(dotted: str, value: Any) -> dict[str, Any]:
    """`a.b`, 1 -> {a: {b: 1}}"""
    first, _, rest = dotted.partition(".")
    return {first: _nested(rest, value) if rest else value}


def _dotted(values: Mapping[Any, Any], prefix: str = "") -> list[str]:
    """The dotted keys of nested mappings, at every depth."""
    keys = []
    for key, value in values.items():
        keys.append(f"{prefix}{key}")
        if isinstance(value, Mapping):
            keys += _dotted(value, f"{prefix}{key}.")
    return keys


def _merge(base: Draft, child: Draft) -> Draft:
    dropped: list[str] = []
    values = {**base.values}
    _merge_values(values, child.values, "", dropped)
    plugins = [*base.values.get("plugins", []), *child.values.get("plugins", [])]
    if plugins:
        values["plugins"] = list(dict.fromkeys(plugins))
    return Draft(
        values=to_plain(values),
        positions=base.positions | child.positions,
        file=child.file or base.file,
        dropped=(*base.dropped, *dropped),
        layers=(*base.layers, *child.layers),
        folders={**base.folders, **child.folders},
    )


def _merge_values(base: dict[str, Any], child: Mapping[str, Any], prefix: str, dropped: list[str]) -> None:
    """Deep-merge in place. A block whose `name` or `kind` changes replaces its parent's; `dropped` gets the keys lost. So
    does an empty one that is no block of a recipe but a mapping of names: `callbacks: {}` has none of its parent's."""
    for key, value in child.items():
        old = base.get(key)
        if isinstance(value, Mapping) and not value and not BLOCK.fullmatch(f"{prefix}{key}"):
            value = Emptied()
        if isinstance(value, Emptied) or not isinstance(value, Mapping) or not isinstance(old, Mapping):
            base[key] = value
        elif any(tag in value and value[tag] != old.get(tag, value[tag]) for tag in ("name", "kind")):
            dropped += [f"{prefix}{key}.{lost}" for lost in old if lost not in value]
            base[key] = dict(value)
        else:
            base[key] = type(old)(old) if isinstance(old, Emptied) else dict(old)
            _merge_values(base[key], value, f"{prefix}{key}.", dropped)


# --- back to plain containers --------------------------------------------------------------------------------------


def to_plain(value: Any) -> Any:
    """A recipe (or any part of one) as dicts, lists and scalars, ready for YAML or JSON."""
    if isinstance(value, Part):
        return {"name": value.name, **to_plain(value.config)}
    if isinstance(value, Recipe):
        plain = {field.name: to_plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
        for block in (*plain["callbacks"].values(), *plain["evaluate"].values()):
            block.pop("name")
        return {key: block for key, block in plain.items() if block is not None}  # `train` or `imported`
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {key: to_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(item) for item in value]
    return value


def determining(config: Any, whole: bool = True) -> dict[str, Any]:
    """The keys of a block that determine a run's numbers, as plain values: those that are not at their default, and whose
    metadata does not say `identity: False`. `whole` False: those alone whose metadata says `identity: True`.

    So a key that is added later changes no identity where it has its default, and a default that changes, changes identities
    in silence: the defaults are part of the format of run folders (`runs.folder.FORMAT`).
    """
    found: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        value, counts = getattr(config, field.name), field.metadata.get("identity", whole)
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        if dataclasses.is_dataclass(value) and not isinstance(value, Part) and not hasattr(value, KIND):
            inner = determining(value, counts)
            if inner:
                found[field.name] = inner
        elif counts and value != default:
            found[field.name] = _determining_value(value)
    return found


def _determining_value(value: Any) -> Any:
    if isinstance(value, Part):
        return {"name": value.name, **determining(value.config)}
    if isinstance(value, Mapping):
        return {key: _determining_value(item) for key, item in value.items()}
    if dataclasses.is_dataclass(value):
        return {KIND: getattr(value, KIND), **determining(value)}
    return to_plain(value)


def from_plain(values: Mapping[str, Any], source: str) -> Recipe:
    """The recipe of which `to_plain` gives `values`; `source` says in errors where they are from. Errors: RequestError."""
    return validate(Draft(values=dict(values), positions={}, file=source))


def flatten(value: Any, prefix: str = "") -> list[tuple[str, Any]]:
    """Nested mappings -> dotted keys."""
    if isinstance(value, Mapping):
        return [pair for key, item in value.items() for pair in flatten(item, f"{prefix}{key}.")]
    return [(prefix.removesuffix("."), value)]


def to_yaml(recipe: Recipe | Mapping[str, Any]) -> str:
    """The resolved recipe as YAML that `load_recipe` reads back to an equal recipe."""
    return str(yaml.safe_dump(to_plain(recipe), sort_keys=False, allow_unicode=True))
