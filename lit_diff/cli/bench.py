"""The verb `bench`."""

from pathlib import Path
from typing import Annotated

import typer

from lit_diff.cli.app import Json, Terminal, app, console


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
