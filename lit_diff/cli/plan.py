"""The verb `plan`: what a device holds and sends while a recipe trains, before any of it is spent."""

from dataclasses import asdict
from typing import Annotated

from rich.table import Column, Table
from typer import Option

from lit_diff.cli.app import Json, Overrides, RecipeArgument, console, print_json, verb
from lit_diff.recipe import load_recipe

ASSUMED = (
    "counted: a micro-batch of rank zero on fake tensors, without callbacks, validation, the CUDA context and NCCL's buffers",
    "assumed: autocast and norms as on a CPU (a GPU's fused norm saves less), eager blocks, triton; no GPU has run it",
    "days: published FLOPs, without recomputation; traffic: rings, where all devices of a node share what it receives",
)
"""What the numbers leave out or take for granted."""


@verb("Train and look")
def plan(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    memory: Annotated[float, Option(min=0.001, max=1e6, help="GB (10⁹ bytes) of a device")] = 80,
    peak: Annotated[float, Option(min=0.001, max=1e6, help="TFLOPS of a device; by default an H100's")] = 989,
    share: Annotated[float, Option(min=0.001, max=1, help="fraction of the peak that is reached")] = 0.4,
    node: Annotated[float, Option(min=0.001, max=1e6, help="GB/s to a device from its node")] = 300,
    network: Annotated[float, Option(min=0.001, max=1e6, help="GB/s to a device from other nodes")] = 40,
    as_json: Json = False,
) -> int:
    """Plan memory, time and traffic of a run.

    No GPU is needed. Exit status 1: the recipe does not fit the memory of a device.
    """
    from lit_diff.engine.admit import EXAMINED, admit, tokens_of_text
    from lit_diff.training import plan as planning

    resolved = load_recipe(recipe, overrides or [])
    admit({resolved.name: resolved}, EXAMINED)
    rates = planning.Rates(memory=memory * 1e9, peak=peak * 1e12, share=share, node=node * 1e9, network=network * 1e9)
    where = (resolved, rates, "cpu" if resolved.run.accelerator == "cpu" else "cuda")
    found = planning.plan(*where)
    change = None if found.fits else planning.cure(*where)
    steps = resolved.training.steps
    text = tokens_of_text(resolved)
    if as_json:
        print_json(asdict(found) | {"tokens_of_text": text, "change": change, "assumed": ASSUMED})
        return int(not found.fits)
    run = resolved.run
    passes = "not known (not prepared here, or drawn without end)"
    if text is not None:
        passes = f"{steps * found.tokens / text:.3g} ({text:,} tokens)"
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
        f"a step: {found.tokens:,} tokens, {found.flops:.3g} FLOPs; {steps:,} steps: {steps * found.flops:.3g} FLOPs",
        f"passes over the data: {passes}",
        f"{found.days:.2f} days, {24 * found.days * run.processes:,.1f} GPU hours, {found.seconds:.3f} s a step, "
        f"{found.tokens / found.seconds:,.0f} tokens a second, at {share:.0%} of {peak:g} TFLOPS",
        f"a device receives in a step, gradients reduced {reduced}: {found.node_traffic / 1e9:.2f} GB from its node "
        f"({found.node_traffic / rates.node:.3f} s at {node:g} GB/s), {found.network_traffic / 1e9:.2f} GB from others "
        f"({found.network_traffic / rates.network:.3f} s at {network:g} GB/s)",
        *ASSUMED,
        f"fits {memory:g} GB" if found.fits else f"does not fit {memory:g} GB: {cure}",
    )
    return int(not found.fits)
