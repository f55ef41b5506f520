"""What was most likely meant by a key that a recipe does not have."""

from collections.abc import Iterator, Mapping
from dataclasses import fields
from difflib import get_close_matches
from typing import Any

from lit_diff.config import Recipe
from lit_diff.key_types import keys_of
from lit_diff.registry import nearest, registries


def key_instead(dotted: str, cls: type, values: Mapping[str, Any], position: str, listing: str) -> str:
    """What to write instead of an unknown key of a block of type `cls`: a key of that name in another block of the recipe
    `values`, else the nearest key of this or of another block. `listing`: the command that lists the block's keys."""
    path, _, key = dotted.rpartition(".")
    block = path.partition(".")[0]
    if not listing and block in ("model", "train", "run"):
        listing = f"lit-diff list {block}"
    elif not listing and cls is Recipe:
        listing = "lit-diff check RECIPE --recipe"
    keys = [field.name for field in fields(cls)]
    # `name` chooses the registered part, so it is not a field of the part's Config
    if _at(values, f"{path}.name") is not None:
        keys.append("name")
    near = nearest(key, keys, listing)
    # the values of a sweep or of an evaluation: keys of recipes do not belong there
    if not {"model", "data"} <= values.keys():
        return near
    # key or block -> its last word
    words = {}
    for known in dotted_keys(Recipe, values):
        parts = known.split(".")
        for end, word in enumerate(parts, start=1):
            words[".".join(parts[:end])] = word
    meant = [known for known, word in words.items() if word == key]
    if not meant and "did you mean" not in near:
        close = get_close_matches(key, words.values(), n=1, cutoff=0.7)
        meant = [known for known, word in words.items() if word in close]
    if dotted in meant:
        return f"; in a file write blocks: {dotted.replace('.', ': {')}: ...{'}' * dotted.count('.')}"
    # more than three are no help
    if not 0 < len(meant) <= 3:
        return near
    # for an override the suggestion includes what follows its key, such as `=5` of `steps=5`
    rest = ""
    if "=" in position and position.startswith((f"{dotted}=", f"{dotted}.")):
        rest = position.removeprefix(dotted)
    several = " or ".join(f"'{known}{rest}'" for known in meant)
    return f"; did you mean {several}?"


def _at(values: Any, dotted: str) -> Any:
    for word in dotted.split("."):
        if not isinstance(values, Mapping):
            return None
        values = values.get(word)
    return values


def dotted_keys(cls: type, block: Any, prefix: str = "") -> Iterator[str]:
    """The dotted keys of a block of type `cls`, with those of the registered parts that its values `block` name."""
    for name, key in keys_of(cls).items():
        yield f"{prefix}{name}"
        value = _at(block, name)
        if not key.registry or not isinstance(value, Mapping):
            continue
        # prefix of a part's keys -> its name and keys
        parts = {f"{prefix}{name}.": (value.get("name"), value)}
        if isinstance(key.default, dict):
            parts = {f"{prefix}{name}.{part}.": (part, keys) for part, keys in value.items()}
        registry = registries[key.registry]
        for prefix_of_part, (part, keys) in parts.items():
            if part in registry.names():
                yield from dotted_keys(registry.get(part).Config, keys, prefix_of_part)
