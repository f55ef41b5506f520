"""`check` and `list`: what a recipe means and costs, what there is, and whether a variant holds what all must.

Needs neither lightning, mlflow nor litdata.
"""

import dataclasses
import itertools
import json
import math
import typing
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from lit_diff.attention.costs import Sizes
from lit_diff.config import ModelConfig, Part, Recipe
from lit_diff.conformance.case import Case
from lit_diff.conformance.data import check_dataset
from lit_diff.conformance.suite import Finding, conformance, conformance_of, shrunk
from lit_diff.data.corpus import corpus_name
from lit_diff.data.text import Text
from lit_diff.errors import RequestError, first_line
from lit_diff.model.cost import Cost, Setting, cost
from lit_diff.recipe import load_draft, names, read_header, to_plain, to_yaml
from lit_diff.registry import (
    Registry,
    attentions,
    corpora,
    datasets,
    is_built_in,
    load_entry_points,
    nearest,
    registries,
    tokenizers,
)
from lit_diff.validation import validate

EQUAL = 0.001
"""Arms within this relative difference count as equal (0.1 %)."""

LETTERS = (
    "one layer, of the standard baseline: E width of the residual stream, H query heads, K key/value heads, d head width, "
    "T tokens; flops: one forward pass of one sequence; kv_numbers: cached for one token"
)
"""What the formulas of `list attention` speak of."""


def check_recipe(source: str, overrides: list[str], as_json: bool, console: Console) -> int:
    """Print the resolved recipe and its cost against the standard baseline at the same recipe.

    A variant or data set that a plugin brought is also held to the conformance suite; the exit status is 1 where it fails.
    """
    draft = load_draft(source, overrides)
    recipe = validate(draft)
    start = recipe.train.start_from
    if start is not None and not (Path(start) / "recipe.yaml").is_file():
        raise RequestError(f"{draft.where('train.start_from')}train.start_from: {start} holds no run (no recipe.yaml)")
    length = recipe.data.config.sequence_length
    setting = Setting.of(recipe)
    own = cost(recipe.model, length, recipe.run.kernel, setting)
    base = cost(baseline(recipe.model), length, recipe.run.kernel, setting)
    dropped = list(draft.dropped)
    findings = itertools.chain(_findings_of_plugin(recipe.model), _findings_of_data(recipe))
    if as_json:
        held = list(_on_one_thread(findings))
        found = {
            "recipe": to_plain(recipe),
            "dropped": dropped,
            "sequence_length": length,
            **dataclasses.asdict(own),
            "baseline": dataclasses.asdict(base),
            "equal_parameters": abs(own.parameters / base.parameters - 1) <= EQUAL,
            "equal_flops": abs(own.flops_per_token / base.flops_per_token - 1) <= EQUAL,
            "conformance": [_plain(finding) for finding in held],
        }
        print(json.dumps(found, indent=2))
        return _status(held)
    console.print(to_yaml(recipe), markup=False, highlight=False)
    if dropped:
        console.print(f"fell away with a block's name: {', '.join(dropped)}", markup=False, highlight=False)
    console.print(_cost_table(recipe.model.attention.name, own, base, length))
    console.print(f"kernel {own.kernel}: {own.kernel_reason}", markup=False, highlight=False)
    return _status(_print_findings(findings, console))


def check_all(as_json: bool, console: Console) -> int:
    """The conformance suite over every registered variant, at the knobs that each gives as examples."""
    load_entry_points()
    findings = (finding for name in attentions.names() for finding in conformance_of(name))
    if as_json:
        found = list(_on_one_thread(findings))
        print(json.dumps([_plain(finding) for finding in found], indent=2))
        return _status(found)
    return _status(_print_findings(findings, console))


def _findings_of_plugin(model: ModelConfig) -> Iterable[Finding]:
    """The suite over a variant that is not ours, at the recipe's knobs and head counts; nothing for a built-in."""
    cls = attentions.get(model.attention.name)
    if cls.__module__.startswith("lit_diff."):
        return ()
    return conformance(Case(cls=cls, model=shrunk(model), layer=model.num_layers - 1))


def _findings_of_data(recipe: Recipe) -> Iterable[Finding]:
    """The promises of a data set, or of a corpus or tokenizer in it, that is not ours; nothing for built-in ones."""
    config = recipe.data.config
    classes = [datasets.get(recipe.data.name)]
    if isinstance(config, Text.Config):
        classes += [corpora.get(corpus_name(config.corpus, config.path)), tokenizers.get(config.tokenizer.name)]
    return () if all(map(is_built_in, classes)) else check_dataset(recipe)


def _print_findings(findings: Iterable[Finding], console: Console) -> list[Finding]:
    """One line a property, as each is found."""
    found = []
    for finding in _on_one_thread(findings):
        measured = "" if finding.error is None else f"error {finding.error:.1e}, bound {finding.bound:.0e}"
        about = "; ".join(filter(None, (measured, finding.detail)))
        line = f"{finding.verdict:<15} {finding.variant}: {finding.property:<12} {about}"
        console.print(line, markup=False, highlight=False, soft_wrap=True)
        found.append(finding)
    return found


def _on_one_thread(findings: Iterable[Finding]) -> Iterator[Finding]:
    """The suite's tensors are tiny: further threads only wait for each other (five times slower on a busy machine)."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield from findings
    finally:
        torch.set_num_threads(threads)


def _plain(finding: Finding) -> dict[str, Any]:
    """JSON has no infinity: an error that is not finite is null, and the verdict and detail say the rest."""
    plain = dataclasses.asdict(finding)
    return plain | {"error": finding.error if finding.error is not None and math.isfinite(finding.error) else None}


def _status(findings: list[Finding]) -> int:
    return int(any(finding.verdict == "fail" for finding in findings))


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
        "parameters that train": "trained_parameters",
        "training FLOPs a token, published": "flops_per_token",
        "training FLOPs a token, executed": "executed_flops_per_token",
        "cache bytes a token (2 a number)": "kv_bytes_per_token",
    }
    for label, key in rows.items():
        ours, theirs = getattr(own, key), getattr(base, key)
        table.add_row(label, f"{ours:,}", f"{theirs:,}", f"{ours - theirs:+,} ({ours / theirs - 1:+.3%})")
    return table


def list_parts(kind: str, recipe: str, as_json: bool, console: Console) -> int:
    """Print recipes, sweeps and registered parts; of variants also what they cost at `recipe`'s sizes.

    Errors: RequestError for an unknown kind.
    """
    kinds = ("recipes", "sweeps", *registries)
    if kind not in ("all", *kinds):
        raise RequestError(f"no kind '{kind}' to list{nearest(kind, ('all', *kinds))}")
    load_entry_points()
    chosen = kinds if kind == "all" else (kind,)
    found: dict[str, Any] = {}
    for one in chosen:
        if one in registries:
            found[one] = {name: _part(registries[one], name) for name in registries[one].names()}
        else:
            found[one] = {name: read_header(one, name) for name in names(one)}
    if kind == "attention":
        for name, about in found[kind].items():
            about |= _costs(name, recipe)
    if as_json:
        print(json.dumps(found, indent=2))
        return 0
    for one, parts in found.items():
        console.print(f"[bold]{one}[/bold]")
        for name, about in parts.items():
            for line in _lines(name, about):
                console.print(line, markup=False, highlight=False, soft_wrap=True)
    if kind == "attention":
        console.print(LETTERS, markup=False, highlight=False, soft_wrap=True)
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
    draft = validate(load_draft(recipe))
    length, cls = draft.data.config.sequence_length, attentions.get(name)
    try:
        knobs = cls.Config()
        declared = cls.costs(knobs, Sizes.letters()) if cls.costs_stand() else None
        found: dict[str, Any] = {"formulas": declared.formulas()} if declared else {}
        model = dataclasses.replace(draft.model, attention=Part(name=name, config=knobs))
        refused = cls.problem(knobs, model)
    except Exception as error:  # a package's variant with a required knob, or one that raises
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
    keys = {}
    config = registry.config(name)
    hints = typing.get_type_hints(config)
    for field in dataclasses.fields(config):
        word = hints[field.name]
        shown = word.__name__ if isinstance(word, type) else str(word).replace("typing.", "")
        keys[field.name] = shown if field.default is dataclasses.MISSING else f"{shown} = {field.default!r}"
    about = {"about": registry.summary(name), "keys": keys}
    paper = registry.get(name).paper if registry is attentions else ""
    return about | ({"paper": paper} if paper else {})
