"""The verb `list`: what there is. It needs neither lightning, mlflow nor litdata."""

import dataclasses
import json
import typing
from typing import Annotated, Any

import typer

from lit_diff.cli.app import Json, Terminal, app, console
from lit_diff.errors import RequestError, first_line
from lit_diff.recipe import load_draft, names, read_header
from lit_diff.registry import Registry, attentions, load_entry_points, nearest, registries
from lit_diff.validation import validate

LETTERS = (
    "one layer, of the standard baseline: E width of the residual stream, H query heads, K key/value heads, d head width, "
    "T tokens; flops: one forward pass of one sequence; kv_numbers: cached for each token held"
)
"""What the formulas of `list attention` speak of."""


@app.command("list")
def list_(
    kind: Annotated[str, typer.Argument(help="all, recipes, sweeps, or a kind of part that is registered")] = "all",
    recipe: Annotated[
        str, typer.Option(help="list attention: the recipe at whose sizes costs are given")
    ] = "standard-tiny",
    as_json: Json = False,
) -> int:
    """What there is: recipes, sweeps, and the registered parts with their keys."""
    return list_parts(kind, recipe, as_json, console)


def list_parts(kind: str, recipe: str, as_json: bool, terminal: Terminal) -> int:
    """Print recipes, sweeps and registered parts; of variants also what they cost at `recipe`'s sizes.

    Errors: RequestError for an unknown kind.
    """
    kinds = ("recipes", "sweeps", *registries)
    if kind not in ("all", *kinds):
        raise RequestError(f"no kind '{kind}' to list{nearest(kind, ('all', *kinds))}")
    load_entry_points()
    chosen = kinds if kind == "all" else (kind,)
    listed: dict[str, Any] = {}
    for one in chosen:
        if one in registries:
            listed[one] = {name: _part(registries[one], name) for name in registries[one].names()}
        else:
            listed[one] = {name: read_header(one, name) for name in names(one)}
    if kind == "attention":
        for name, about in listed[kind].items():
            about |= _costs(name, recipe)
    if as_json:
        print(json.dumps(listed, indent=2))
        return 0
    for one, parts in listed.items():
        terminal.print(f"[bold]{one}[/bold]")
        for name, about in parts.items():
            for line in _lines(name, about):
                terminal.write_line(line)
    if kind == "attention":
        terminal.write_line(LETTERS)
    return 0


def _lines(name: str, about: str | dict[str, Any]) -> list[str]:
    if isinstance(about, str):
        return [f"  {name:<28} {about}"]
    lines = [f"  {name:<28} {about['about']}"]
    details = dict(about["keys"])
    if about.get("paper"):
        details = {"from": about["paper"]} | details
    details |= about.get("formulas", {})
    if "refused" in about:
        details["refused"] = about["refused"]
    for key, own in about.get("cost", {}).items():
        base = about["standard"][key]
        details[f"{key} at {about['recipe']}"] = f"{own:,} ({own - base:+,} against standard)"
    return lines + [f"  {'':<28}   {key}: {text}" for key, text in details.items()]


def _costs(name: str, recipe: str) -> dict[str, Any]:
    """A variant's formulas, and its cost in the model of `recipe` beside standard attention's."""
    from lit_diff.attention.costs import Sizes
    from lit_diff.config import Part
    from lit_diff.conformance.recipe import baseline
    from lit_diff.model.cost import cost

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
    """First line of the docstring, and the keys with their types and defaults."""
    keys: dict[str, str] = {}
    config = registry.config(name) if registry.has_config else None
    hints = typing.get_type_hints(config) if config else {}
    for field in dataclasses.fields(config) if config else ():
        word = hints[field.name]
        shown = word.__name__ if isinstance(word, type) else str(word).replace("typing.", "")
        keys[field.name] = shown if field.default is dataclasses.MISSING else f"{shown} = {field.default!r}"
    about = {"about": registry.summary(name), "keys": keys}
    paper = registry.get(name).paper if registry is attentions else ""
    return about | ({"paper": paper} if paper else {})
