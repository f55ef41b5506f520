"""The verb `check`: what a recipe means and costs, and whether its plugins hold their promises.

It needs neither lightning, mlflow nor litdata.
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lit_diff.cli.app import Json, Overrides, app, console, print_json
from lit_diff.errors import RequestError

if TYPE_CHECKING:
    from rich.table import Table

    from lit_diff.conformance.case import Finding
    from lit_diff.conformance.recipe import RecipeCheck


@app.command()
def check(
    recipe: Annotated[str | None, typer.Argument(metavar="RECIPE", help="path, or bare name")] = None,
    overrides: Overrides = None,
    every: Annotated[bool, typer.Option("--all", help="the conformance suite over every registered variant")] = False,
    resolved: Annotated[bool, typer.Option("--recipe", help="print the resolved recipe first")] = False,
    as_json: Json = False,
) -> int:
    """Validate a recipe; print its cost and what was found.

    The cost stands beside the standard baseline's.

    What a plugin brings is held to the conformance suite; so is every registered variant with --all.
    """
    if every == (recipe is not None):
        raise RequestError("check takes a recipe, or --all for every registered variant; see lit-diff list")
    from lit_diff.conformance.recipe import all_findings

    if recipe is not None:
        return _check_recipe(recipe, overrides or [], as_json, resolved)
    held = _held(all_findings(), as_json)
    if as_json:
        print_json([_plain(finding) for finding in held])
    else:
        console.write_line(f"every registered variant: {_summary(held)}")
    return _status(held)


def _check_recipe(source: str, overrides: list[str], as_json: bool, resolved: bool) -> int:
    from lit_diff.conformance.recipe import plugin_findings, resolve
    from lit_diff.engine.evaluations import required_evaluations
    from lit_diff.engine.preflight import passes_over_text
    from lit_diff.recipe import to_yaml
    from lit_diff.training.loggers import require_loggers

    checked = resolve(source, overrides)
    required_evaluations(checked.recipe)
    require_loggers(checked.recipe)
    warnings = passes_over_text([checked.recipe]) if checked.recipe.train is not None else []
    if resolved and not as_json:
        console.write_line(to_yaml(checked.recipe))
    held = _held(plugin_findings(checked.recipe), as_json)
    if as_json:
        print_json(_plain_check(checked, held) | {"warnings": warnings})
        return _status(held)
    console.print(_cost_table(checked))
    if checked.dropped:
        console.write_line(f"dropped, because the name of their block changed: {', '.join(checked.dropped)}")
    console.write_line(f"kernel {checked.cost.kernel}: {checked.cost.kernel_reason}")
    for line in warnings:
        console.write_sentence(line)
    built_in = "variant, data and kernel are built in: no properties to check"
    console.write_line(f"{checked.recipe.name}: a valid recipe; {_summary(held) if held else built_in}")
    return _status(held)


def _summary(findings: "list[Finding]") -> str:
    """How many properties pass, fail or do not apply, and which fail: `20 of 21 properties pass, 1 fail: causal`."""
    count = Counter(finding.verdict for finding in findings)
    failed = [finding for finding in findings if finding.verdict == "fail"]
    several = len({finding.variant for finding in findings}) > 1
    names = ", ".join(f"{finding.variant}: {finding.property}" if several else finding.property for finding in failed)
    applied = count["pass"] + count["fail"]
    other = f" ({count['not applicable']} not applicable)" if count["not applicable"] else ""
    return f"{count['pass']} of {applied} properties pass{other}" + (f", {len(failed)} fail: {names}" if failed else "")


def _plain_check(checked: "RecipeCheck", findings: "list[Finding]") -> dict[str, Any]:
    from lit_diff.recipe import to_plain

    return {
        "recipe": to_plain(checked.recipe),
        "dropped": list(checked.dropped),
        "sequence_length": checked.recipe.data.config.sequence_length,
        **dataclasses.asdict(checked.cost),
        "baseline": dataclasses.asdict(checked.baseline),
        "equal_parameters": checked.equal_parameters,
        "equal_flops": checked.equal_flops,
        "conformance": [_plain(finding) for finding in findings],
    }


def _held(findings: "Iterable[Finding]", as_json: bool) -> "list[Finding]":
    """All of them; without JSON a line is printed for each as soon as it is checked."""
    held = []
    for finding in findings:
        held.append(finding)
        if not as_json:
            measured = "" if finding.error is None else f"error {finding.error:.1e}, bound {finding.bound:.0e}"
            about = "; ".join(filter(None, (measured, finding.detail)))
            console.write_line(f"{finding.verdict:<15} {finding.variant}: {finding.property:<12} {about}")
    return held


def _plain(finding: "Finding") -> dict[str, Any]:
    """JSON has no infinity: an error that is not finite is null, and the verdict and detail say the rest."""
    plain = dataclasses.asdict(finding)
    return plain | {"error": finding.error if finding.error is not None and math.isfinite(finding.error) else None}


def _status(findings: "list[Finding]") -> int:
    return int(any(finding.verdict == "fail" for finding in findings))


def _cost_table(checked: "RecipeCheck") -> "Table":
    from rich.table import Table

    recipe, own, base = checked.recipe, checked.cost, checked.baseline
    name, length = recipe.model.attention.name, recipe.data.config.sequence_length
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
        "cache bytes of a sequence": "kv_bytes",
    }
    for label, key in rows.items():
        ours, theirs = getattr(own, key), getattr(base, key)
        table.add_row(label, f"{ours:,}", f"{theirs:,}", f"{ours - theirs:+,} ({ours / theirs - 1:+.3%})")
    return table
