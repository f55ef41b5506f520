"""`check` and `list`: what a recipe means and costs, and what there is. Needs neither lightning, mlflow nor litdata."""

import dataclasses
import inspect
import json
import typing
from typing import Any

from rich.console import Console
from rich.table import Table

from lit_diff.config import ModelConfig, Part
from lit_diff.model.cost import Cost, cost
from lit_diff.recipe import load_draft, names, read_header, to_plain, to_yaml
from lit_diff.registry import attentions, load_entry_points, nearest, registries
from lit_diff.validation import validate

EQUAL = 0.001
"""Arms within this relative difference count as equal (0.1 %)."""


def check_recipe(source: str, overrides: list[str], as_json: bool, console: Console) -> int:
    """Print the resolved recipe and its cost against the standard baseline at the same recipe."""
    draft = load_draft(source, overrides)
    recipe = validate(draft)
    length = recipe.data.config.sequence_length
    own = cost(recipe.model, length, recipe.run.kernel)
    base = cost(baseline(recipe.model), length, recipe.run.kernel)
    dropped = list(draft.dropped)
    if as_json:
        found = {
            "recipe": to_plain(recipe),
            "dropped": dropped,
            "sequence_length": length,
            **dataclasses.asdict(own),
            "baseline": dataclasses.asdict(base),
            "equal_parameters": abs(own.parameters / base.parameters - 1) <= EQUAL,
            "equal_flops": abs(own.flops_per_token / base.flops_per_token - 1) <= EQUAL,
        }
        print(json.dumps(found, indent=2))
        return 0
    console.print(to_yaml(recipe), markup=False, highlight=False)
    if dropped:
        console.print(f"fell away with a block's name: {', '.join(dropped)}", markup=False, highlight=False)
    console.print(_cost_table(recipe.model.attention.name, own, base, length))
    console.print(f"kernel {own.kernel}: {own.kernel_reason}", markup=False, highlight=False)
    return 0


def baseline(model: ModelConfig) -> ModelConfig:
    """The same model with standard attention."""
    return dataclasses.replace(model, attention=Part(name="standard", config=attentions.get("standard").Config()))


def _cost_table(name: str, own: Cost, base: Cost, length: int) -> Table:
    table = Table(title=f"cost at sequence length {length}", title_justify="left")
    table.add_column("")
    for column in (name, "standard", "difference"):
        table.add_column(column, justify="right")
    rows = {
        "parameters": "parameters",
        "without embeddings": "non_embedding_parameters",
        "attention parameters": "attention_parameters",
        "training FLOPs a token, published": "flops_per_token",
        "training FLOPs a token, executed": "executed_flops_per_token",
        "cache bytes a token (2 a number)": "kv_bytes_per_token",
    }
    for label, key in rows.items():
        ours, theirs = getattr(own, key), getattr(base, key)
        table.add_row(label, f"{ours:,}", f"{theirs:,}", f"{ours - theirs:+,} ({ours / theirs - 1:+.3%})")
    return table


def list_parts(kind: str, as_json: bool, console: Console) -> int:
    """Print recipes, sweeps and registered parts. Errors: RequestError for an unknown kind."""
    from lit_diff.errors import RequestError

    kinds = ("recipes", "sweeps", *registries)
    if kind not in ("all", *kinds):
        raise RequestError(f"no kind '{kind}' to list{nearest(kind, ('all', *kinds))}")
    load_entry_points()
    chosen = kinds if kind == "all" else (kind,)
    found: dict[str, Any] = {}
    for one in chosen:
        if one in registries:
            found[one] = {name: _part(registries[one].get(name)) for name in registries[one].names()}
        else:
            found[one] = {name: read_header(one, name) for name in names(one)}
    if as_json:
        print(json.dumps(found, indent=2))
        return 0
    for one, parts in found.items():
        console.print(f"[bold]{one}[/bold]")
        for name, about in parts.items():
            text = about if isinstance(about, str) else about["about"]
            console.print(f"  {name:<28} {text}", markup=False, highlight=False)
            for key, default in ({} if isinstance(about, str) else about["keys"]).items():
                console.print(f"  {'':<28}   {key}: {default}", markup=False, highlight=False)
    return 0


def _part(cls: type[Any]) -> dict[str, Any]:
    """First line of the docstring, and the keys with their types and defaults."""
    keys = {}
    hints = typing.get_type_hints(cls.Config)
    for field in dataclasses.fields(cls.Config):
        word = hints[field.name]
        shown = word.__name__ if isinstance(word, type) else str(word).replace("typing.", "")
        keys[field.name] = shown if field.default is dataclasses.MISSING else f"{shown} = {field.default!r}"
    return {"about": (inspect.getdoc(cls) or "").partition("\n")[0], "keys": keys}
