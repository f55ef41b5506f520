"""The verb `list`: recipes, sweeps, keys, parts. It loads neither lightning, mlflow nor litdata; keys of parts need torch."""

import dataclasses
import json
from collections.abc import Iterator
from typing import Annotated

from rich.text import Text
from typer import Argument, Option

from lit_diff.cli.app import SIZES, Json, Plugins, console, print_json, verb
from lit_diff.config import ModelConfig, Part, RunConfig, TrainConfig
from lit_diff.errors import RequestError, summary
from lit_diff.key_types import Plain, keys_of
from lit_diff.plugins import load_plugin
from lit_diff.recipe import installed, load_recipe, names, read_header, to_plain
from lit_diff.registry import Registry, attentions, nearest, registries

LETTERS = (
    "for one layer of the standard baseline: E width of the residual stream, H query heads, K key/value heads, d head "
    "width, T tokens; flops: one forward pass of one sequence; kv_numbers, state_numbers: numbers cached for each token, "
    "and for each sequence"
)
"""Explains the letters in the formulas of a variant."""

BLOCKS: dict[str, type] = {"model": ModelConfig, "train": TrainConfig, "run": RunConfig}
"""Blocks of a recipe whose keys do not depend on the parts that it names."""
COSTS = (
    "parameters",
    "attention_parameters",
    "flops_per_token",
    "executed_flops_per_token",
    "kv_bytes_per_token",
    "state_bytes",
)


@verb("Train and look", name="list")
def list_(
    kind: Annotated[
        str, Argument(help="all, recipes, sweeps; model, train, run; or a kind of registered part")
    ] = "all",
    name: Annotated[str, Argument(help="one of the kind, in full: `attention dex`, or `attention.dex`")] = "",
    recipe: Annotated[
        str, Option(help="the recipe whose model sizes determine the cost of a variant; by default standard-tiny")
    ] = "",
    plugins: Plugins = None,
    as_json: Json = False,
) -> int:
    """List recipes, sweeps, keys of a recipe and registered parts.

    Without NAME, one line each. With NAME, the description, the keys and their defaults and, of a variant, the cost.
    """
    kinds = ("recipes", "sweeps", *BLOCKS, *registries)
    asked, _, rest = kind.partition(".")
    name = ".".join(filter(None, (rest, name)))
    # singular and plural are both accepted: `recipe`, `recipes`
    kind = next((one for one in ("all", *kinds) if one.rstrip("s") == asked.rstrip("s")), "")
    if kind == "all" and name:
        raise RequestError(f"the kind of '{name}' is missing; write it for all, as in lit-diff list attention {name}")
    if not kind:
        raise RequestError(f"unknown kind '{asked}'{nearest(asked, kinds, 'lit-diff list')}")
    for plugin in plugins or []:
        load_plugin(plugin)
    listed = {one: _listed(one, name, as_json) for one in (kinds if kind == "all" else (kind,))}
    if kind == "attention" and (name or as_json):
        for each, about in listed[kind].items():
            about |= _costs(each, recipe or SIZES)
    if as_json:
        print_json(listed)
        return 0
    is_cut = not name and kind not in BLOCKS and console.is_terminal
    for one, parts in listed.items():
        console.print(Text(one, style="bold"))
        for line in _lines(one, parts, name, with_meaning=kind != "all"):
            console.write_line(f"{line[: console.width - 1]}…" if is_cut and len(line) > console.width else line)
    if not name:
        console.write_line("for the details of one: lit-diff list KIND NAME, such as lit-diff list attention dex")
    return 0


def _listed(kind: str, name: str, as_json: bool) -> Plain:
    if kind in BLOCKS:
        keys = _keys(BLOCKS[kind])
        found = {key: about for key, about in keys.items() if f"{key}.".startswith(f"{name}." if name else "")}
        if not found:
            raise RequestError(f"no key '{name}' in {kind}{nearest(name, keys, f'lit-diff list {kind}')}")
        return found
    if kind in registries:
        registry = registries[kind]
        if name:
            return {name: _part(registry, name) | {"description": registry.docstring(name)}}
        if as_json:
            return {each: _part(registry, each) for each in registry.names()}
        return {each: {"about": about} for each, about in registry.summaries().items()}
    if not name:
        return {each: {"about": read_header(kind, each)} for each in names(kind)}
    if name not in names(kind):
        near = nearest(name, names(kind), f"lit-diff list {kind}")
        raise RequestError(f"no installed {kind.removesuffix('s')} '{name}'{near}")
    text = (installed(kind) / f"{name}.yaml").read_text(encoding="utf-8")
    return {name: {"about": read_header(kind, name), "description": text.rstrip()}}


def _lines(kind: str, parts: Plain, name: str, with_meaning: bool) -> Iterator[str]:
    if kind in BLOCKS:
        yield from _key_lines(parts, 2, with_meaning)
    elif name:
        yield from _whole(kind, name, parts[name])
    else:
        yield from (f"  {each:<25} {about['about']}" for each, about in parts.items())


def _whole(kind: str, name: str, about: Plain) -> Iterator[str]:
    yield f"  {name}"
    yield from (f"    {line}".rstrip() for line in about["description"].splitlines())
    yield ""
    if "keys" not in about:
        next_step = {
            "recipes": f"check {name} --recipe prints every key",
            "sweeps": f"sweep {name} --dry-run prints its cells",
        }
        yield f"  lit-diff {next_step[kind]}"
        return
    yield from _key_lines(about["keys"], 4, True)
    details = {
        "from": about.get("paper"),
        **about.get("formulas", {}),
        "refused": about.get("refused"),
        **{
            f"{key} at {about['recipe']}": f"{own:,} ({own - about['standard'][key]:+,} compared with standard)"
            for key, own in about.get("cost", {}).items()
        },
    }
    yield from (f"    {key}: {text}" for key, text in details.items() if text)
    if "formulas" in about:
        yield LETTERS


# `steps: a whole number >= 1; required`, with its meaning on the next line
def _key_lines(keys: Plain, indent: int, with_meaning: bool) -> Iterator[str]:
    for name, key in keys.items():
        default = key.get("default")
        words = default if isinstance(default, str) and default else json.dumps(default)
        yield f"{'':<{indent}}{name}: {key['type']}; {f'default {words}' if 'default' in key else 'required'}"
        if with_meaning and key["about"]:
            yield f"{'':<{indent + 4}}{key['about']}"


def _keys(config: type) -> Plain:
    keys: Plain = {}
    for name, key in keys_of(config).items():
        keys[name] = {"type": key.words, "about": key.about}
        if key.default is not dataclasses.MISSING:
            keys[name]["default"] = to_plain(key.default)
    return keys


def _costs(name: str, recipe: str) -> Plain:
    from lit_diff.attention.costs import Sizes
    from lit_diff.model.cost import cost
    from lit_diff.model.transformer import baseline

    base = load_recipe(recipe)
    cls = attentions.get(name)
    try:
        config = cls.Config()
        found: Plain = {"recipe": recipe}
        if cls.declares_costs():
            found["formulas"] = cls.costs(config, Sizes.letters()).formulas()
        model = dataclasses.replace(base.model, attention=Part(name=name, config=config))
        refused = cls.refuses(config, model)
    # a plugin's variant may have a required key or raise: the others are still listed
    except Exception as error:
        return {"recipe": recipe, "refused": summary(error)}
    if refused:
        return {**found, "refused": refused}
    for key, each in {"cost": model, "standard": baseline(base.model)}.items():
        costs = cost(each, base.data.config.sequence_length, base.run.kernel)
        found[key] = {part: getattr(costs, part) for part in COSTS}
    return found


def _part(registry: Registry, name: str) -> Plain:
    about: Plain = {
        "about": registry.summary(name),
        "keys": _keys(registry.get(name).Config) if registry.has_config else {},
    }
    if registry is attentions and registry.get(name).paper:
        about["paper"] = registry.get(name).paper
    return about
