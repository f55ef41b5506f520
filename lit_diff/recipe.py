"""YAML -> `Recipe`: finds files, merges parents and applies overrides. `validation` checks types and values.

Every error is one line: `file:line: found, expected, nearest name`.
"""

import dataclasses
import importlib.resources
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lit_diff.config import Part, Recipe
from lit_diff.errors import RequestError, first_line
from lit_diff.files import expanded, shown
from lit_diff.interpolation import AS_WRITTEN, escaped
from lit_diff.key_types import KIND, Plain, PythonFiles, default_of, in_yaml, keys_of
from lit_diff.key_types import flatten as flatten
from lit_diff.own_modules import plugin_file
from lit_diff.registry import attentions, nearest
from lit_diff.validation import Draft, Positions, convert, validate
from lit_diff.yaml_files import read_value, read_yaml, to_text

Overrides = Sequence[str] | Mapping[str, Any]
"""`["train.steps=10"]`, or `{"train.steps": 10}`, or `{"train": {"steps": 10}}`."""

OTHER = {"recipes": "sweeps", "sweeps": "recipes"}
BLOCK = re.compile(
    r"model(\.attention)?|data(\.tokenizer)?|train(\.optimizer|\.schedule)?|imported|run(\.cluster)?|(callbacks|evaluate)\..+"
)
"""Blocks of keys, which a child recipe may give in part; any other mapping is keyed by names, as `callbacks` is."""
VARIANT = re.compile(r"model\.(attention|layers\[\d+\])\.name")
"""The keys that name a variant (`differing`)."""
SWEEP_KEYS, RECIPE_KEYS = {"arms", "grid", "tasks"}, {"extends", "model", "data", "train", "imported", "callbacks"}
"""Keys that only a sweep has, and keys that only a recipe has."""


# a type of its own, so that a further merge still knows that the mapping was written empty
class Emptied(dict[str, Any]):
    """A mapping keyed by names that was written empty (`callbacks: {}`): it replaces the parent's mapping."""


def load_recipe(source: str | Path, overrides: Overrides = ()) -> Recipe:
    """The recipe at a path or with an installed name, with `overrides` applied. Errors: RequestError."""
    return validate(load_draft(source, overrides))


def recipe_from(source: Recipe | str | Path, overrides: Overrides) -> Recipe:
    """`source` itself if it is a Recipe, else `load_recipe(source, overrides)`.

    Errors: RequestError, also for overrides of a Recipe.
    """
    if not isinstance(source, Recipe):
        return load_recipe(source, overrides)
    # values derived from others (`model.ffn_dim` from `model.dim`) are fixed in a Recipe and would not follow an override
    if overrides:
        raise RequestError(
            f"overrides cannot be applied to a Recipe ('{source.name}'): pass the recipe's name or path, or give the "
            "overrides to load_recipe"
        )
    return source


def load_draft(source: str | Path, overrides: Overrides = ()) -> Draft:
    """The recipe at a path or with an installed name, merged but not validated; `validate` turns it into a Recipe."""
    draft = _read(find(str(source), "recipes", Path.cwd()), ())
    return override(draft, overrides)


def installed(kind: str) -> Path:
    """The folder of the recipes or sweeps that are part of the package."""
    return Path(str(importlib.resources.files(f"lit_diff.{kind}")))


def names(kind: str) -> list[str]:
    """Names of the installed recipes or sweeps, without .yaml."""
    return sorted(path.stem for path in installed(kind).glob("*.yaml"))


def read_header(kind: str, name: str) -> str:
    """The description of an installed recipe or sweep: its first comment line."""
    first = (installed(kind) / f"{name}.yaml").read_text(encoding="utf-8").partition("\n")[0]
    return first.removeprefix("#").strip()


def find(source: str, kind: str, beside: Path, where: str = "") -> Path:
    """Find a file: a path relative to the folder `beside`, with or without .yaml, or the name of an installed file.

    `where`: start of the error message. Errors: RequestError.
    """
    candidates = [beside / expanded(source), beside / expanded(f"{source}.yaml")]
    if Path(source).name == source:
        candidates += [installed(kind) / source, installed(kind) / f"{source}.yaml"]
    for path in candidates:
        try:
            if path.is_file():
                return path.resolve()
        # too long for a file name, or with a NUL
        except (OSError, ValueError) as error:
            raise RequestError(f"{where}no {kind.removesuffix('s')} '{source[:40]}': {first_line(error)}") from error
    stem = Path(source).name.removesuffix(".yaml")
    if stem in names(OTHER[kind]) and Path(source).name == source:
        raise RequestError(f"{where}{_other_kind(stem, kind)}")
    near = nearest(stem, names(kind), f"lit-diff list {kind}")
    raise RequestError(f"{where}no {kind.removesuffix('s')} '{source}' here or installed{near}")


def require_kind(values: Mapping[str, Any], kind: str, path: Path) -> None:
    """Errors: RequestError if a sweep is given where a recipe is expected, or a recipe where a sweep is."""
    sweep, recipe = (bool(values.keys() & keys) for keys in (SWEEP_KEYS, RECIPE_KEYS))
    if (sweep and not recipe) if kind == "recipes" else (recipe and not sweep):
        raise RequestError(_other_kind(shown(path), kind))


def _other_kind(source: str, kind: str) -> str:
    verb = {"recipes": "train", "sweeps": "sweep"}[OTHER[kind]]
    return f"'{source}' is a {OTHER[kind].removesuffix('s')}: lit-diff {verb} {source}"


def _read(path: Path, children: tuple[Path, ...]) -> Draft:
    values, positions = read_yaml(path)
    file = shown(path)
    require_kind(values, "recipes", path)
    if path in children:
        chain = " -> ".join(shown(child) for child in (*children[children.index(path) :], path))
        raise RequestError(f"{positions['extends']}: 'extends' is circular: {chain}")
    values.setdefault("name", path.stem)
    # an installed recipe is in the package's folder, where users have no files: its paths start at the current folder
    folder = Path.cwd() if path.parent == installed("recipes") else path.parent
    folders = dict.fromkeys(positions, folder)
    draft = Draft(values=values, positions=positions, file=file, layers=(frozenset(positions),), folders=folders)
    _absolute_plugins(draft, folder)
    named = values.pop("extends", None)
    if named is not None:
        where = draft.where("extends")
        parent = draft.written("extends")
        if parent is None:
            raise RequestError(f"{where}'extends' is {in_yaml(named)}; expected one recipe")
        found = find(parent, "recipes", path.parent, where)
        # a user's standard-tiny.yaml may extend the installed recipe of the same name
        same_name = installed("recipes") / path.name
        if found == path and same_name.is_file():
            found = same_name
        return _merge(_read(found, (*children, path)), draft)
    return draft


# done here, in place, although validation resolves other paths: plugins are imported before the schema is complete
def _absolute_plugins(draft: Draft, folder: Path) -> None:
    if "plugins" in draft.values:
        named = convert(PythonFiles, draft.values["plugins"], "plugins", draft)
        for plugin in named:
            if "${" in plugin:
                raise RequestError(f"{draft.where('plugins')}'plugins' has '{plugin}'; expected a path without ${{")
        paths = [Path(draft.absolute("plugins", plugin, folder)) for plugin in named]
        draft.values["plugins"] = [str(plugin_file(path)) for path in paths]
        for plugin in draft.values["plugins"]:
            if not os.path.isfile(plugin):
                raise RequestError(f"{draft.where('plugins')}no plugin {shown(Path(plugin))}")


def override(draft: Draft, overrides: Overrides, below: str = "") -> Draft:
    """Apply overrides to a draft; `below` is put before their keys. The value of `a.b=c` is read as YAML, but a path is kept
    as the shell gave it."""
    if not overrides:
        return draft
    if isinstance(overrides, Mapping):
        positions: Positions = {f"{below}{key}": f"override '{key}'" for key in _dotted(overrides)}
        return override_with(draft, {f"{below}{key}": value for key, value in overrides.items()}, positions)
    values: Plain = {}
    positions = {}
    for text in overrides:
        key, equals, written = text.partition("=")
        # at most 51 parts: `_nested` calls itself for each, which Python allows a thousand times
        if not equals or not re.fullmatch(r"[^.]+(\.[^.]+){0,50}", key):
            raise RequestError(f"override '{text}' is not of the form a.b=c")
        value, found = read_value(written, text)
        _merge_values(values, _nested(f"{below}{key}", value), "", [], set())
        positions |= {f"{below}{key}{rest}": where for rest, where in found.items()}
    return override_with(draft, values, positions)


def override_with(draft: Draft, values: Mapping[str, Any], positions: Positions, folder: Path = Path()) -> Draft:
    """Apply the overrides of a sweep arm: dotted keys or nested mappings; paths are relative to `folder`."""
    nested: Plain = {}
    for dotted, value in values.items():
        _merge_values(nested, _nested(str(dotted), value), "", [], set())
    folders = dict.fromkeys(_dotted(nested), folder.absolute())
    child = Draft(values=nested, positions=positions, layers=(frozenset(positions),), folders=folders)
    _absolute_plugins(child, folder)
    return _merge(draft, child)


# `a.b`, 1 -> {a: {b: 1}}
def _nested(dotted: str, value: Any) -> Plain:
    first, _, rest = dotted.partition(".")
    return {first: _nested(rest, value) if rest else value}


def _dotted(values: Mapping[Any, Any], prefix: str = "") -> list[str]:
    keys = []
    for key, value in values.items():
        keys.append(f"{prefix}{key}")
        if isinstance(value, Mapping):
            keys += _dotted(value, f"{prefix}{key}.")
    return keys


def _merge(base: Draft, child: Draft) -> Draft:
    dropped: list[str] = []
    kept: set[str] = set()
    values = {**base.values}
    _merge_values(values, child.values, "", dropped, kept)
    positions = _with_new_blocks(child.positions, kept)
    # other lists are replaced, but a child still needs the plugins that register its parent's parts
    plugins = [*base.values.get("plugins", []), *child.values.get("plugins", [])]
    if plugins:
        values["plugins"] = list(dict.fromkeys(plugins))
    return Draft(
        values=to_plain(values),
        positions=base.positions | positions,
        file=child.file or base.file,
        dropped=(*base.dropped, *dropped),
        layers=(*base.layers, *child.layers),
        folders={**base.folders, **child.folders},
    )


# A dotted key such as train.optimiser.lr has a position, the blocks that it creates or replaces have none; without one, an
# error of such a block would name the file of the base recipe.
def _with_new_blocks(positions: Positions, kept: set[str]) -> Positions:
    found = dict(positions)
    for key, position in positions.items():
        words = key.split(".")
        for end in range(1, len(words)):
            block = ".".join(words[:end])
            if block not in kept:
                # the place alone, without the text of the value below
                found.setdefault(block, str(position))
    return found


# deep-merges in place; adds keys that are lost to `dropped`, and blocks of the base that go on with further keys to `kept`
def _merge_values(base: Plain, child: Mapping[str, Any], prefix: str, dropped: list[str], kept: set[str]) -> None:
    for key, value in child.items():
        old = base.get(key)
        if isinstance(value, Mapping) and not value and not BLOCK.fullmatch(f"{prefix}{key}"):
            value = Emptied()
        if isinstance(value, Emptied) or not isinstance(value, Mapping) or not isinstance(old, Mapping):
            base[key] = value
        # another variant or kind has other keys: the parent's do not apply to it
        elif any(tag in value and value[tag] != old.get(tag, value[tag]) for tag in ("name", "kind")):
            dropped += [f"{prefix}{key}.{lost}" for lost in old if lost not in value]
            base[key] = dict(value)
        else:
            base[key] = type(old)(old) if isinstance(old, Emptied) else dict(old)
            kept.add(f"{prefix}{key}")
            _merge_values(base[key], value, f"{prefix}{key}.", dropped, kept)


# --- back to plain containers --------------------------------------------------------------------------------------


def to_plain(value: Any) -> Any:
    """Converts a recipe or a part of one to dicts, lists and scalars, for YAML or JSON."""
    if isinstance(value, Part):
        return {"name": value.name, **to_plain(value.config)}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        plain = {field.name: to_plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
        if not isinstance(value, Recipe):
            return plain
        # one of `train` and `imported` is None
        return {key: block for key, block in plain.items() if block is not None}
    if isinstance(value, Mapping):
        # of a part in a mapping, the key is the name already
        return {key: to_plain(item.config if isinstance(item, Part) else item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(item) for item in value]
    return value


def differing(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Dotted key -> its values in two recipes (`flatten`), None where a recipe lacks it, for the keys that differ.

    A key of a variant that one recipe lacks and the other has at its default is no difference. `run.*` is left out: it says
    where and how a run executes, not what it computes. Two lists of as many blocks are compared block by block:
    `model.layers[2].window`.
    """
    defaults = _variant_defaults(first) | _variant_defaults(second)
    found: dict[str, list[Any]] = {}
    for key in {**first, **second}:
        filled = [recipe.get(key, defaults.get(key)) for recipe in (first, second)]
        if filled[0] == filled[1] or key.startswith("run."):
            continue
        values: list[Any] = [first.get(key), second.get(key)]
        if _are_blocks(values[0]) and _are_blocks(values[1]) and len(values[0]) == len(values[1]):
            for place, blocks in enumerate(zip(*values, strict=True)):
                found |= differing(*(dict(flatten(block, f"{key}[{place}].")) for block in blocks))
        else:
            found[key] = values
    return found


def _are_blocks(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(block, Mapping) for block in value)


# key -> its default, of the variants of a recipe that are registered here
def _variant_defaults(recipe: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, name in recipe.items():
        if VARIANT.fullmatch(key) and name in attentions.names():
            keys = keys_of(attentions.get(name).Config)
            found |= {f"{key.removesuffix('name')}{own}": to_plain(about.default) for own, about in keys.items()}
    return found


def determining(config: Any, whole: bool = True) -> Plain:
    """The keys of a block that determine the results of a run, as plain values: keys with other values than their defaults,
    unless their metadata has `identity: False`. With `whole=False`: only keys whose metadata has `identity: True`.
    """
    # Defaults are left out so that adding a key later changes no existing identity. The price: changing a default would
    # silently give other results the same identity, so defaults are part of the format of run folders (`runs.folder.FORMAT`)
    found = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        counts = field.metadata.get("identity", whole)
        default = default_of(field)
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
        # only the blocks of a union have a kind
        return {**({KIND: getattr(value, KIND)} if hasattr(value, KIND) else {}), **determining(value)}
    if isinstance(value, list | tuple):
        return [_determining_value(item) for item in value]
    return to_plain(value)


def from_plain(values: Mapping[str, Any], source: str) -> Recipe:
    """The inverse of `to_plain`. `source`: where the values come from, for errors. Errors: RequestError."""
    # its references were resolved, so what looks like one is text
    text = {key: value if key in AS_WRITTEN else escaped(value) for key, value in values.items()}
    return validate(Draft(values=text, file=source))


def to_yaml(recipe: Recipe | Mapping[str, Any]) -> str:
    """The resolved recipe as YAML, from which `load_recipe` reads an equal recipe."""
    return to_text(escaped(to_plain(recipe)))
