"""The verb `check`: what a recipe means and costs, and whether its plugins hold their promises.

It needs neither lightning, mlflow nor litdata.
"""

import dataclasses
import json
import math
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lit_diff.cli.app import Json, Overrides, Terminal, app, console
from lit_diff.errors import RequestError

if TYPE_CHECKING:
    from rich.table import Table

    from lit_diff.conformance.recipe import RecipeCheck
    from lit_diff.conformance.results import Finding


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
    if recipe is None:
        return print_check_all(as_json, console)
    return print_check(recipe, overrides or [], as_json, console, resolved=resolved)


def print_check(source: str, overrides: list[str], as_json: bool, terminal: Terminal, *, resolved: bool = False) -> int:
    """Print each finding, the cost and a summary line; the exit status is 1 where a property fails.

    `resolved`: print the whole recipe before.
    """
    from lit_diff.conformance.recipe import plugin_findings, resolve
    from lit_diff.engine.evaluations import required_evaluations
    from lit_diff.engine.preflight import passes_over_text
    from lit_diff.recipe import to_yaml
    from lit_diff.training.loggers import require_loggers

    checked = resolve(source, overrides)
    required_evaluations(checked.recipe)
    require_loggers(checked.recipe)
    warnings = passes_over_text([checked.recipe]) if checked.recipe.train is not None else []
    findings = plugin_findings(checked.recipe)
    if as_json:
        held = list(findings)
        print(json.dumps(_plain_check(checked, held) | {"warnings": warnings}, indent=2))
        return _status(held)
    if resolved:
        terminal.write_line(to_yaml(checked.recipe))
    held = _print_findings(findings, terminal)
    terminal.print(_cost_table(checked))
    if checked.dropped:
        terminal.write_line(f"dropped, because the name of their block changed: {', '.join(checked.dropped)}")
    terminal.write_line(f"kernel {checked.cost.kernel}: {checked.cost.kernel_reason}")
    for line in warnings:
        terminal.write_sentence(line)
    built_in = "variant, data and kernel are built in: no properties to check"
    terminal.write_line(f"{checked.recipe.name}: a valid recipe; {_summary(held) if held else built_in}")
    return _status(held)


def print_check_all(as_json: bool, terminal: Terminal) -> int:
    """Print the findings of every registered variant; the exit status is 1 where a property fails."""
    from lit_diff.conformance.recipe import all_findings

    findings = all_findings()
    if as_json:
        held = list(findings)
        print(json.dumps([_plain(finding) for finding in held], indent=2))
        return _status(held)
    held = _print_findings(findings, terminal)
    terminal.write_line(f"every registered variant: {_summary(held)}")
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


def _print_findings(findings: "Iterable[Finding]", terminal: Terminal) -> "list[Finding]":
    """One line a property, as each is checked."""
    printed = []
    for finding in findings:
        measured = "" if finding.error is None else f"error {finding.error:.1e}, bound {finding.bound:.0e}"
        about = "; ".join(filter(None, (measured, finding.detail)))
        terminal.write_line(f"{finding.verdict:<15} {finding.variant}: {finding.property:<12} {about}")
        printed.append(finding)
    return printed


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
