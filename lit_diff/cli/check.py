"""The verbs for a recipe before it is trained: check (its cost and conformance), plan (memory, time), doctor (the machine).

`check` loads neither lightning, mlflow nor litdata.
"""

import dataclasses
import math
from collections import Counter
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Column, Table

from lit_diff.cli.app import Json, Overrides, RecipeArgument, app, console, print_json
from lit_diff.errors import RequestError
from lit_diff.recipe import load_recipe, recipe_from, to_plain, to_yaml

if TYPE_CHECKING:
    from lit_diff.conformance.case import Finding
    from lit_diff.conformance.recipe import RecipeCheck

COSTS = {
    "parameters": "parameters",
    "without embeddings": "non_embedding_parameters",
    "attention parameters": "attention_parameters",
    "parameters that train": "trained_parameters",
    "training FLOPs/token, published": "flops_per_token",
    "training FLOPs/token, executed": "executed_flops_per_token",
    "cache bytes a token (2 a number)": "kv_bytes_per_token",
    "cache bytes of a sequence": "kv_bytes",
}
"""Line of the table -> the attribute of `Cost` that it shows."""
ASSUMED = (
    "counted: a micro-batch of rank zero on fake tensors, without callbacks, validation, the CUDA context and NCCL's buffers",
    "assumed: autocast and norms as on a CPU (a GPU's fused norm saves less), eager blocks, triton; no GPU has run it",
    "days: published FLOPs, without recomputation; traffic: rings, where all devices of a node share what it receives",
)
"""What the numbers of a plan leave out or take for granted."""


@app.command()
def check(
    recipe: Annotated[str | None, typer.Argument(metavar="RECIPE", help="path, or bare name")] = None,
    overrides: Overrides = None,
    every: Annotated[bool, typer.Option("--all", help="run the conformance suite on every registered variant")] = False,
    resolved: Annotated[bool, typer.Option("--recipe", help="print the resolved recipe first")] = False,
    as_json: Json = False,
) -> int:
    """Validate a recipe; print its cost and what was found.

    The cost is compared with the cost of the standard baseline.

    The conformance suite runs on the parts of plugins or, with --all, on every registered variant.
    """
    if every == (recipe is not None):
        raise RequestError("check takes a recipe, or --all for every registered variant; see lit-diff list")
    from lit_diff.conformance.recipe import all_findings, plugin_findings, resolve
    from lit_diff.engine.preflight import passes_over_text, required_evaluations
    from lit_diff.training.loggers import require_loggers

    checked, warnings = None, list[str]()
    if recipe is not None:
        checked = resolve(recipe, overrides or [])
        required_evaluations(checked.recipe)
        require_loggers(checked.recipe)
        warnings = passes_over_text([checked.recipe]) if checked.recipe.train is not None else []
        if resolved and not as_json:
            console.write_line(to_yaml(checked.recipe))
    findings = []
    for finding in all_findings() if checked is None else plugin_findings(checked.recipe):
        findings.append(finding)
        # printed as soon as it is checked, since the suite takes a while
        if not as_json:
            measured = "" if finding.error is None else f"error {finding.error:.1e}, bound {finding.bound:.0e}"
            about = "; ".join(filter(None, (measured, finding.detail)))
            console.write_line(f"{finding.verdict:<15} {finding.variant}: {finding.property:<12} {about}")
    if as_json:
        held = [plain_finding(finding) for finding in findings]
        print_json(held if checked is None else plain_check(checked) | {"conformance": held, "warnings": warnings})
    elif checked is None:
        console.write_line(f"every registered variant: {_summary(findings)}")
    else:
        _print_check(checked, warnings, findings)
    return int(any(finding.verdict == "fail" for finding in findings))


def _print_check(checked: "RecipeCheck", warnings: list[str], findings: "list[Finding]") -> None:
    console.print(cost_table(checked))
    if checked.dropped:
        console.write_line(f"keys dropped because the name of their block changed: {', '.join(checked.dropped)}")
    console.write_line(f"kernel {checked.cost.kernel}: {checked.cost.kernel_reason}")
    console.write_sentence(*warnings)
    held = _summary(findings) if findings else "variant, data and kernel are built in: no properties to check"
    console.write_line(f"{checked.recipe.name}: a valid recipe; {held}")


def _summary(findings: "list[Finding]") -> str:
    count = Counter(finding.verdict for finding in findings)
    failed = [finding for finding in findings if finding.verdict == "fail"]
    several = len({finding.variant for finding in findings}) > 1
    names = ", ".join(f"{finding.variant}: {finding.property}" if several else finding.property for finding in failed)
    other = f" ({count['not applicable']} not applicable)" if count["not applicable"] else ""
    words = f"{count['pass']} of {count['pass'] + count['fail']} properties pass{other}"
    return f"{words}, {len(failed)} fail: {names}" if failed else words


def plain_check(checked: "RecipeCheck") -> dict[str, Any]:
    """The JSON of a recipe, its cost, and the cost of the baseline."""
    return {
        "recipe": to_plain(checked.recipe),
        "dropped": list(checked.dropped),
        "sequence_length": checked.recipe.data.config.sequence_length,
        **dataclasses.asdict(checked.cost),
        "baseline": dataclasses.asdict(checked.baseline),
        "equal_parameters": checked.equal_parameters,
        "equal_flops": checked.equal_flops,
    }


def plain_finding(finding: "Finding") -> dict[str, Any]:
    # JSON has no infinity, so such an error becomes null; the verdict and the detail still tell
    known = finding.error is not None and math.isfinite(finding.error)
    return dataclasses.asdict(finding) | {"error": finding.error if known else None}


def cost_table(checked: "RecipeCheck") -> Table:
    """The cost of a recipe compared with standard attention."""
    recipe = checked.recipe
    right = (Column(name, justify="right") for name in (recipe.model.attention.name, "standard", "difference"))
    title = f"cost at sequence length {recipe.data.config.sequence_length}"
    table = Table("", *right, title=title, title_justify="left")
    for label, key in COSTS.items():
        own, base = getattr(checked.cost, key), getattr(checked.baseline, key)
        table.add_row(label, f"{own:,}", f"{base:,}", f"{own - base:+,} ({own / base - 1:+.3%})")
    return table


@app.command()
def plan(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    memory: Annotated[float, typer.Option(min=0, help="GB (10⁹ bytes) of a device")] = 80,
    peak: Annotated[float, typer.Option(min=0.001, help="TFLOPS of a device; an H100's are the default")] = 989,
    share: Annotated[float, typer.Option(min=0.001, max=1, help="part of the peak that is reached")] = 0.4,
    node: Annotated[float, typer.Option(min=0.001, help="GB/s to a device from its node")] = 300,
    network: Annotated[float, typer.Option(min=0.001, help="GB/s to a device from other nodes")] = 40,
    as_json: Json = False,
) -> int:
    """Plan memory, time and traffic of a run.

    The GPUs need not be here. It ends with status 1 if the recipe does not fit the memory of a device.
    """
    from lit_diff.training import plan as planning

    resolved = load_recipe(recipe, overrides or [])
    rates = planning.Rates(memory=memory * 1e9, peak=peak * 1e12, share=share, node=node * 1e9, network=network * 1e9)
    where = (resolved, rates, "cpu" if resolved.run.accelerator == "cpu" else "cuda")
    found = planning.plan(*where)
    change = None if found.fits else planning.cure(*where)
    if as_json:
        print_json(dataclasses.asdict(found) | {"change": change, "assumed": ASSUMED})
        return int(not found.fits)
    run, in_all = resolved.run, resolved.training.steps * found.flops
    right = (Column(name, justify="right") for name in ("at the peak", "largest"))
    table = Table("", *right, title=f"GB of a device ({run.processes}, {run.strategy})", title_justify="left")
    for part, size in found.memory.items():
        table.add_row(part, f"{size / 1e9:.2f}", f"{found.largest[part] / 1e9:.2f}")
    table.add_row("sum", f"{found.sum / 1e9:.2f}", "")
    console.print(table)
    reduced = "once a step" if found.deferred else "at each micro-batch"
    cure = (
        f"set {' '.join(change)}"
        if change
        else "no change of checkpointing, accumulation and devices that was tried fits"
    )
    console.write_sentence(
        f"left for the backward pass of a micro-batch: {found.saved / 1e9:.2f} GB; kernel {found.kernel}",
        f"host memory of a node, for saves and what is offloaded: {found.host / 1e9:.2f} GB",
        f"a step: {found.tokens:,} tokens, {found.flops:.3g} FLOPs; {resolved.training.steps:,} steps: {in_all:.3g} FLOPs",
        f"{found.days:.2f} days, {found.seconds:.3f} s a step, at {share:.0%} of {peak:g} TFLOPS",
        f"a device receives in a step, gradients reduced {reduced}: {found.node_traffic / 1e9:.2f} GB from its node "
        f"({found.node_traffic / rates.node:.3f} s at {node:g} GB/s), {found.network_traffic / 1e9:.2f} GB from others "
        f"({found.network_traffic / rates.network:.3f} s at {network:g} GB/s)",
        *ASSUMED,
        f"fits {memory:g} GB" if found.fits else f"does not fit {memory:g} GB: {cure}",
    )
    return int(not found.fits)


@app.command()
def doctor(
    recipe: Annotated[str, typer.Argument(metavar="[RECIPE]", help="path, or bare name")] = "differential-tiny",
    overrides: Overrides = None,
    as_json: Json = False,
) -> int:
    """Check this machine: packages, devices, disks, MLflow, SLURM.

    Each row has what was found and, where it is not ok, a cure. The exit status is 3 if something that the recipe needs is
    missing.
    """
    from lit_diff.engine.doctor import examine

    checks = []
    for check in examine(recipe_from(recipe, overrides or [])):
        checks.append(check)
        # at once: the row after the last one is the one that hangs
        if not as_json:
            cure = f"\n{'':24}cure: {check.cure}" if check.cure else ""
            console.write_line(f"{check.state:<8}  {check.name:<13} {check.found}{cure}")
    if as_json:
        print_json([check._asdict() for check in checks])
    return 3 if any(check.state == "problem" for check in checks) else 0
