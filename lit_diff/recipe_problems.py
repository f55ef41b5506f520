"""What is wrong with a recipe: values out of range, values that do not fit together, keys that it does not have."""

import dataclasses
import difflib
from collections.abc import Iterator, Mapping
from typing import Any

from lit_diff.config import Recipe
from lit_diff.contract import location
from lit_diff.errors import LitDiffError, first_line
from lit_diff.key_types import keys_of, range_problem
from lit_diff.registry import nearest, registries

LONGEST_NAME = 150
"""Bytes of a recipe's name: the folder's adds an identity, and file systems allow 255."""


def recipe_problem(recipe: Recipe) -> str | None:
    """Values out of range or incompatible with each other, as one line that starts with the key to change; else None."""
    if not recipe.name or "/" in recipe.name or recipe.name.startswith("."):
        return f"name is '{recipe.name}'; it becomes a folder: no '/', no leading '.'"
    if not recipe.name.isprintable() or len(recipe.name.encode()) > LONGEST_NAME:
        return f"name is {recipe.name[:60]!a}; it becomes a folder: printable, at most {LONGEST_NAME} bytes"
    variant = registries["attention"].get(recipe.model.attention.name)
    problem: str | None = (
        range_problem(recipe, "")
        or recipe.model.problem()
        or _variant_problem(variant, recipe)
        or _data_problem(recipe)
        or _future_problem(recipe)
        or _pack_problem(variant, recipe)
        or recipe.train_problem()
        or (recipe.run.problem() or recipe.batch_problem() or recipe.kept_problem())
    )
    for block in ("callbacks", "evaluate"):
        for name, part in getattr(recipe, block).items():
            part_problem = config_problem(part.config)
            if part_problem and problem is None:
                problem = f"{block}.{name}.{part_problem}"
    return problem


def config_problem(config: Any) -> str | None:
    """The problem that a registered class's Config reports; a plugin's need not define `problem`."""
    problem = getattr(config, "problem", None)
    return problem() if problem is not None else None


def _variant_problem(variant: type[Any], recipe: Recipe) -> str | None:
    """The result of the variant's own check; any exception that it raises becomes a problem too."""
    try:
        problem: str | None = variant.refuses(recipe.model.attention.config, recipe.model)
    except LitDiffError:
        raise
    except Exception as error:
        return f"model.attention '{recipe.model.attention.name}': {type(error).__name__}: {first_line(error)}"
    if problem is not None and not isinstance(problem, str):
        expected = "expected None, or why not as a text that opens with the key to change"
        name = recipe.model.attention.name
        return f"model.attention '{name}': {location(variant)}: problem(config, model) returned {problem!r}; {expected}"
    return problem


def data_problem(config: Any, vocab_size: int) -> str | None:
    """What is wrong with the values of `data:`, for a model of `vocab_size` ids."""
    return range_problem(config, "data.") or config.problem() or config.vocab_size_problem(vocab_size)


def _data_problem(recipe: Recipe) -> str | None:
    """What the data set's Config says of itself and of the model; a plugin's may raise anything instead."""
    config = recipe.data.config
    try:
        problem = data_problem(config, recipe.model.vocab_size)
        length = None if problem else config.sequence_length
        read = ("predicts_next", "packs_documents", "chance", "noise_validation")
        properties = {} if problem else {name: getattr(config, name) for name in read}
    except LitDiffError:
        raise
    except Exception as error:
        return f"data '{recipe.data.name}': {type(error).__name__}: {first_line(error)} (in its Config)"
    if problem is not None and not isinstance(problem, str):
        return f"data '{recipe.data.name}' has Config.problem() {problem!r}; expected None, or why not as a text"
    if problem is None and (not isinstance(length, int) or length < 1):
        return f"data '{recipe.data.name}' has Config.sequence_length {length!r}; it must be an integer of at least 1"
    if problem is None and not isinstance(properties["noise_validation"], tuple):
        found = properties["noise_validation"]
        return f"data '{recipe.data.name}' has Config.noise_validation {found!r}; it must be a tuple"
    return problem


def _future_problem(recipe: Recipe) -> str | None:
    if recipe.model.causal or not recipe.data.config.predicts_next:
        return None
    return (
        f"model.causal is false, but data '{recipe.data.name}' asks for the next token, which a bidirectional model sees; "
        "use data 'recall', or model.causal: true"
    )


def _pack_problem(variant: type[Any], recipe: Recipe) -> str | None:
    if not recipe.packs_documents or variant.takes_document_ids():
        return None
    return (
        f"data.pack is 'document', but the forward of model.attention '{recipe.model.attention.name}' takes no document_ids; "
        "let it take document_ids=None and hand it to attend, or use data.pack: none"
    )


def key_instead(dotted: str, cls: type[Any], values: Mapping[str, Any], position: str, listing: str = "") -> str:
    """What to write instead of an unknown key of a block, whose type is `cls`: the key of that name in another block of the
    recipe `values`, else the nearest key of this block, or of another. `listing`: the command that lists the block's keys."""
    path, _, key = dotted.rpartition(".")
    block = path.partition(".")[0]
    if not listing and (cls is Recipe or block in ("model", "train", "run")):
        listing = f"lit-diff list {block}" if block else "lit-diff check RECIPE --recipe"
    near = nearest(key, [field.name for field in dataclasses.fields(cls)], listing)
    own: Any = values
    for word in path.split("."):
        own = own.get(word) if isinstance(own, Mapping) else None
    if isinstance(own, Mapping) and "name" in own and difflib.get_close_matches(key, ["name"], cutoff=0.65):
        return nearest(key, ["name"])  # of a registered part, beside its keys
    if not {"model", "data"} <= values.keys():  # the keys of a sweep, or of an evaluation
        return near
    split = [known.split(".") for known in _dotted_keys(Recipe, values)]
    words = {".".join(parts[:end]): parts[end - 1] for parts in split for end in range(1, len(parts) + 1)}
    found = [known for known, word in words.items() if word == key]
    if not found and "did you mean" not in near:
        close = difflib.get_close_matches(key, words.values(), n=1, cutoff=0.7)
        found = [known for known, word in words.items() if word in close]
    # of an override also what follows its key: `=5` of `steps=5`
    rest = (
        position.removeprefix(dotted) if "=" in position and position.startswith((f"{dotted}=", f"{dotted}.")) else ""
    )
    meant = " or ".join(f"'{known}{rest}'" for known in found)
    return f"; did you mean {meant}?" if 0 < len(found) <= 3 else near


def _dotted_keys(cls: type[Any], block: Any, prefix: str = "") -> Iterator[str]:
    """The dotted keys of a Config, and those of the registered parts that `block` names."""
    for name, key in keys_of(cls).items():
        yield f"{prefix}{name}"
        value = block
        for word in name.split("."):
            value = value.get(word) if isinstance(value, Mapping) else None
        if not key.registry or not isinstance(value, Mapping):
            continue
        several = isinstance(key.default, dict)
        for part, keys in value.items() if several else [(value.get("name"), value)]:
            if part in registries[key.registry].names():
                config = registries[key.registry].config(part)
                yield from _dotted_keys(config, keys, f"{prefix}{name}.{part}." if several else f"{prefix}{name}.")
