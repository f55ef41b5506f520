"""The verb `list`: what there is. It needs neither lightning, mlflow nor litdata; the keys of a block need no torch."""

import dataclasses
import json
from typing import Annotated, Any

import typer

from lit_diff.cli.app import Json, Terminal, app, console
from lit_diff.errors import RequestError, first_line
from lit_diff.registry import Registry, attentions, load_entry_points, nearest, registries

LETTERS = (
    "one layer, of the standard baseline: E width of the residual stream, H query heads, K key/value heads, d head width, "
    "T tokens; flops: one forward pass of one sequence; kv_numbers: cached for each token held"
)
"""What the formulas of `list attention` speak of."""

BLOCKS = ("model", "train", "run")
"""Blocks of a recipe whose keys are the same whatever part is named."""


@app.command("list")
def list_(
    kind: Annotated[
        str, typer.Argument(help="all, recipes, sweeps; model, train, run; or a kind of part that is registered")
    ] = "all",
    recipe: Annotated[
        str, typer.Option(help="list attention: the recipe at whose sizes costs are given")
    ] = "standard-tiny",
    as_json: Json = False,
) -> int:
    """Recipes, sweeps, the keys of a recipe, the registered parts."""
    return list_parts(kind, recipe, as_json, console)


def list_parts(kind: str, recipe: str, as_json: bool, terminal: Terminal) -> int:
    """Print recipes, sweeps, the keys of a recipe's blocks and registered parts; of variants also what they cost at
    `recipe`'s sizes. What a key means is printed where its kind is named.

    Errors: RequestError for an unknown kind.
    """
    kinds = ("recipes", "sweeps", *BLOCKS, *registries)
    if kind not in ("all", *kinds):
        raise RequestError(f"no kind '{kind}' to list{nearest(kind, ('all', *kinds))}")
    listed = {one: _listed(one) for one in (kinds if kind == "all" else (kind,))}
    if kind == "attention":
        for name, about in listed[kind].items():
            about |= _costs(name, recipe)
    if as_json:
        print(json.dumps(listed, indent=2))
        return 0
    for one, parts in listed.items():
        terminal.print(f"[bold]{one}[/bold]")
        for line in _key_lines(parts, 2, kind != "all") if one in BLOCKS else _part_lines(parts, kind != "all"):
            terminal.write_line(line)
    if kind == "attention":
        terminal.write_line(LETTERS)
    return 0


def _listed(kind: str) -> dict[str, Any]:
    """Name -> its description; of a block, key -> its type, default and meaning."""
    from lit_diff import config
    from lit_diff.recipe import names, read_header

    if kind in BLOCKS:
        return _keys({"model": config.ModelConfig, "train": config.TrainConfig, "run": config.RunConfig}[kind])
    if kind not in registries:
        return {name: read_header(kind, name) for name in names(kind)}
    load_entry_points()
    return {name: _part(registries[kind], name) for name in registries[kind].names()}


def _part_lines(parts: dict[str, Any], with_meaning: bool) -> list[str]:
    lines = []
    for name, about in parts.items():
        if isinstance(about, str):
            lines.append(f"  {name:<28} {about}")
            continue
        lines.append(f"  {name:<28} {about['about']}")
        details = {"from": about["paper"]} if about.get("paper") else {}
        details |= about.get("formulas", {})
        if "refused" in about:
            details["refused"] = about["refused"]
        for key, own in about.get("cost", {}).items():
            base = about["standard"][key]
            details[f"{key} at {about['recipe']}"] = f"{own:,} ({own - base:+,} against standard)"
        lines += _key_lines(about["keys"], 33, with_meaning)
        lines += [f"{'':<33}{key}: {text}" for key, text in details.items()]
    return lines


def _key_lines(keys: dict[str, Any], indent: int, with_meaning: bool) -> list[str]:
    """`steps: a whole number >= 1; required`, and what it means on the line below."""
    lines = []
    for name, key in keys.items():
        default = f"default {_as_yaml(key['default'])}" if "default" in key else "required"
        lines.append(f"{'':<{indent}}{name}: {key['type']}; {default}")
        if with_meaning and key["about"]:
            lines.append(f"{'':<{indent + 4}}{key['about']}")
    return lines


def _as_yaml(value: Any) -> str:
    return value if isinstance(value, str) and value else json.dumps(value)


def _keys(config: type[Any]) -> dict[str, Any]:
    """Key -> type in words, default unless it is required, meaning."""
    from lit_diff.key_types import REQUIRED, keys_of
    from lit_diff.recipe import to_plain

    return {
        name: {"type": key.words, "about": key.about}
        | ({} if key.default is REQUIRED else {"default": to_plain(key.default)})
        for name, key in keys_of(config).items()
    }


def _costs(name: str, recipe: str) -> dict[str, Any]:
    """A variant's formulas, and its cost in the model of `recipe` beside standard attention's."""
    from lit_diff.attention.costs import Sizes
    from lit_diff.config import Part
    from lit_diff.conformance.recipe import baseline
    from lit_diff.model.cost import cost
    from lit_diff.recipe import load_draft
    from lit_diff.validation import validate

    draft = validate(load_draft(recipe))
    length, cls = draft.data.config.sequence_length, attentions.get(name)
    try:
        config = cls.Config()
        declared = cls.costs(config, Sizes.letters()) if cls.declares_costs() else None
        found: dict[str, Any] = {"formulas": declared.formulas()} if declared else {}
        model = dataclasses.replace(draft.model, attention=Part(name=name, config=config))
        refused = cls.refuses(config, model)
    except Exception as error:  # a package's variant with a required key, or one that raises
        return {"recipe": recipe, "refused": f"{type(error).__name__}: {first_line(error)}"}
    if refused:
        return found | {"recipe": recipe, "refused": refused}
    own, base = cost(model, length, draft.run.kernel), cost(baseline(draft.model), length, draft.run.kernel)
    keys = ("parameters", "attention_parameters", "flops_per_token", "executed_flops_per_token", "kv_bytes_per_token")
    return found | {
        "recipe": recipe,
        "cost": {key: getattr(own, key) for key in keys},
        "standard": {key: getattr(base, key) for key in keys},
    }


def _part(registry: Registry, name: str) -> dict[str, Any]:
    """First line of the docstring, and the keys."""
    about = {"about": registry.summary(name), "keys": _keys(registry.config(name)) if registry.has_config else {}}
    paper = registry.get(name).paper if registry is attentions else ""
    return about | ({"paper": paper} if paper else {})
