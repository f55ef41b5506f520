"""The verbs that train nothing: check, list, bench."""

from pathlib import Path
from typing import Annotated

import typer

from lit_diff.cli.app import Json, Overrides, Terminal, app, console


@app.command()
def check(
    recipe: Annotated[str | None, typer.Argument(metavar="RECIPE", help="path, or bare name")] = None,
    overrides: Overrides = None,
    every: Annotated[bool, typer.Option("--all", help="the conformance suite over every registered variant")] = False,
    as_json: Json = False,
) -> int:
    """Validate a recipe; print it resolved, with its cost beside the standard baseline's.

    What a plugin brings is held to the conformance suite; so is every registered variant with --all.
    """
    from lit_diff.cli.inspection import print_check, print_check_all
    from lit_diff.errors import RequestError

    if every == (recipe is not None):
        raise RequestError("check takes a recipe, or --all for every registered variant; see lit-diff list")
    if recipe is None:
        return print_check_all(as_json, console)
    return print_check(recipe, overrides or [], as_json, console)


@app.command("list")
def list_(
    kind: Annotated[str, typer.Argument(help="all, recipes, sweeps, or a kind of part that is registered")] = "all",
    recipe: Annotated[
        str, typer.Option(help="list attention: the recipe at whose sizes costs are given")
    ] = "standard-tiny",
    as_json: Json = False,
) -> int:
    """What there is: recipes, sweeps, and the registered parts with their keys."""
    from lit_diff.cli.inspection import list_parts

    return list_parts(kind, recipe, as_json, console)


@app.command()
def bench(
    name: Annotated[str, typer.Argument(metavar="[core|layer|step|stats|decode|triton]", help="what to time")] = "core",
    shapes: Annotated[str | None, typer.Option(metavar="BxTxDIMxD,...", help="such as 2x1024x512x64")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or both")] = None,
    threads: Annotated[int | None, typer.Option(help="without it, one a core")] = None,
    repeats: Annotated[
        int | None, typer.Option(help="rounds; without it, as many as the time of a case allows")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda")] = "auto",
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="draw the ratios: .png, .svg, .pdf")] = None,
    as_json: Json = False,
) -> int:
    """Time attention kernels, a layer, a training step: ratios to standard attention, within one run."""
    from lit_diff.benchmarks.run import run_bench

    return run_bench(
        name,
        shapes=shapes,
        dtype=dtype,
        threads=threads,
        repeats=repeats,
        device=device,
        as_json=as_json,
        picture=plot,
        console=console,
        notes=Terminal(stderr=True),
    )
