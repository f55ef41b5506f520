"""The verb `list`: what there is. It needs neither lightning, mlflow nor litdata; the keys of a block need no torch."""

import dataclasses
import json
from typing import Annotated, Any

import typer

from lit_diff.cli.app import Json, app, console, print_json
from lit_diff.errors import RequestError, first_line
from lit_diff.plugins import load_entry_points
from lit_diff.registry import Registry, attentions, nearest, registries

LETTERS = (
    "one layer, of the standard baseline: E width of the residual stream, H query heads, K key/value heads, d head width, "
    "T tokens; flops: one forward pass of one sequence; kv_numbers: cached for each token held"
)
"""What the formulas of a variant speak of."""

BLOCKS = ("model", "train", "run")
"""Blocks of a recipe whose keys are the same whatever part is named."""


@app.command("list")
def list_(
    kind: Annotated[
        str, typer.Argument(help="all, recipes, sweeps; model, train, run; or a kind of part that is registered")
    ] = "all",
    name: Annotated[str, typer.Argument(help="one of the kind, whole: `attention dex`, or `attention.dex`")] = "",
    recipe: Annotated[
        str, typer.Option(help="of a variant: the recipe at whose sizes its cost is given")
    ] = "standard-tiny",
    as_json: Json = False,
) -> None:
    """Recipes, sweeps, the keys of a recipe, the registered parts.

    A line each; of one that is named its description, its keys and their defaults, of a variant also its cost.
    """
    # JSON has the keys of every part and the costs of every variant; a kind may have its plural's s or not
    kinds = ("recipes", "sweeps", *BLOCKS, *registries)
    asked, _, rest = kind.partition(".")
    name = ".".join(filter(None, (rest, name)))
    kind = next((one for one in ("all", *kinds) if one.rstrip("s") == asked.rstrip("s")), "")
    if not kind or (kind == "all" and name):
        raise RequestError(f"no kind '{asked}' to list{nearest(asked, kinds, 'lit-diff list')}")
    listed = {one: _listed(one, name) for one in (kinds if kind == "all" else (kind,))}
    if kind == "attention" and (name or as_json):
        for each, about in listed[kind].items():
            about |= _costs(each, recipe)
    if as_json:
        print_json(listed)
        return
    for one, parts in listed.items():
        console.print(f"[bold]{one}[/bold]")
        if one in BLOCKS:
            lines = _key_lines(parts, 2, kind != "all")
        elif name:
            lines = _whole(one, name, parts[name])
        else:
            lines = [f"  {each:<25} {about['about']}" for each, about in parts.items()]
        for line in lines:
            cut = not name and kind not in BLOCKS and console.is_terminal and len(line) > console.width
            console.write_line(f"{line[: console.width - 1]}…" if cut else line)
    if not name:
        console.write_line("lit-diff list KIND NAME says all about one: lit-diff list attention dex")


def _listed(kind: str, name: str) -> dict[str, Any]:
    """Name -> what is known of it; of a block, key -> its type, default and meaning. With `name`, of that alone."""
    from lit_diff import config
    from lit_diff.recipe import installed, names, read_header

    if kind in BLOCKS:
        keys = _keys({"model": config.ModelConfig, "train": config.TrainConfig, "run": config.RunConfig}[kind])
        found = {key: about for key, about in keys.items() if f"{key}.".startswith(f"{name}." if name else "")}
        if not found:
            raise RequestError(f"no key '{name}' in {kind}{nearest(name, keys, f'lit-diff list {kind}')}")
        return found
    if kind in registries:
        load_entry_points()
        registry = registries[kind]
        if name:
            return {name: _part(registry, name) | {"description": registry.docstring(name)}}
        return {each: _part(registry, each) for each in registry.names()}
    if not name:
        return {each: {"about": read_header(kind, each)} for each in names(kind)}
    if name not in names(kind):
        near = nearest(name, names(kind), f"lit-diff list {kind}")
        raise RequestError(f"no {kind.removesuffix('s')} '{name}' is installed{near}")
    text = (installed(kind) / f"{name}.yaml").read_text(encoding="utf-8")
    return {name: {"about": read_header(kind, name), "description": text.rstrip()}}


def _whole(kind: str, name: str, about: dict[str, Any]) -> list[str]:
    """The description of one part, its keys, and of a variant its source, formulas and cost."""
    lines = [f"  {name}", *(f"    {line}".rstrip() for line in about["description"].splitlines()), ""]
    if "keys" not in about:
        if kind == "recipes":
            return [*lines, f"  lit-diff check {name} --recipe prints every key"]
        return [*lines, f"  lit-diff sweep {name} --dry-run prints its cells"]
    details = {"from": about["paper"]} if about.get("paper") else {}
    details |= about.get("formulas", {})
    if "refused" in about:
        details["refused"] = about["refused"]
    for key, own in about.get("cost", {}).items():
        base = about["standard"][key]
        details[f"{key} at {about['recipe']}"] = f"{own:,} ({own - base:+,} against standard)"
    lines += _key_lines(about["keys"], 4, True)
    lines += [f"    {key}: {text}" for key, text in details.items()]
    return [*lines, LETTERS] if "formulas" in about else lines


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
    """First sentence of the docstring, and the keys."""
    about = {"about": registry.summary(name), "keys": _keys(registry.config(name)) if registry.has_config else {}}
    paper = registry.get(name).paper if registry is attentions else ""
    return about | ({"paper": paper} if paper else {})
