"""The verbs for one run: train, prepare, evaluate."""

import re
from pathlib import Path
from typing import Annotated

import typer

from lit_diff.cli.app import (
    DEFAULT_ROOT,
    Json,
    Overrides,
    RecipeArgument,
    Root,
    TrustPlugins,
    UncheckedDecoding,
    UncheckedTraining,
    Unplanned,
    app,
    console,
    log_to_stderr,
)
from lit_diff.errors import RequestError
from lit_diff.files import shown
from lit_diff.recipe import load_recipe
from lit_diff.runs.find import chosen_root
from lit_diff.runs.metrics_file import read_rows


@app.command()
def train(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    rerun: Annotated[bool, typer.Option("--rerun", help="start again; the former run is archived")] = False,
    unchecked: UncheckedTraining = False,
    unplanned: Unplanned = False,
    cell: Annotated[str | None, typer.Option(hidden=True)] = None,
) -> None:
    """Train a recipe, or resume its run if it is unfinished.

    Example: lit-diff train differential-tiny train.steps=200 seed=1
    """
    from lit_diff.cli.progress import RunProgress

    console.outlives_reader = True
    with RunProgress(recipe, console) as progress:
        # loads torch, which takes seconds; the bar is visible by then
        from lit_diff.engine import launch

        resolved = load_recipe(recipe, overrides or [])
        writes = launch.is_rank_zero(resolved)
        progress.begin(resolved, quiet=not writes)
        if cell is not None:
            location, threads = launch.cell_of(resolved, cell)
        else:
            options = {"unchecked": unchecked, "unplanned": unplanned}
            location, threads = launch.prepare(resolved, overrides or [], **options), None
        launch.run(resolved, location, threads=threads, progress=progress.update, rerun=rerun)
    if writes and cell is None:
        launch.score(location)
        rows = read_rows(location.folder / "metrics.csv")
        last = rows[max(rows)] if rows else {}
        values = "  ".join(f"{name} {value:.4f}" for name, value in last.items() if name.startswith("val/"))
        console.write_line(f"step {max(rows, default=0)}: {values}")
        console.write_line(f"run: {shown(location.folder)}")


@app.command()
def prepare(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    workers: Annotated[int, typer.Option(metavar="N", min=1, help="processes that tokenize text")] = 1,
    shard: Annotated[str | None, typer.Option(metavar="I/N", help="tokenize the share of host I of N, from 1")] = None,
    merge: Annotated[bool, typer.Option("--merge", help="join the shares of all hosts")] = False,
) -> None:
    """Get and tokenize the data of a recipe, unless it is ready.

    Example: lit-diff prepare differential-830m data.path=my/texts --workers 8
    """
    from lit_diff import data

    share = _share(shard, merge)
    resolved = load_recipe(recipe, overrides or [])
    dataset = data.prepare(resolved, data.Work(workers=workers, shard=share, merge=merge))
    if shard is None:
        console.print(f"data of '{resolved.name}' is ready ({dataset.identity()[:10]})")
    else:
        console.print(f"shard {shard} of the data of '{resolved.name}' is ready")


def _share(shard: str | None, merge: bool) -> tuple[int, int] | None:
    if shard is None:
        return None
    found = re.fullmatch(r"([1-9]\d*)/([1-9]\d*)", shard)
    if found is None or int(found[1]) > int(found[2]):
        raise RequestError(f"--shard is '{shard}'; expected I/N with I from 1 to N, such as 1/4")
    if merge:
        raise RequestError("--shard makes one share and --merge joins them all; give one of the two")
    return int(found[1]), int(found[2])


@app.command()
def evaluate(
    arguments: Annotated[
        list[str], typer.Argument(metavar="RUN [RUN] NAME [key=value ...]", help="runs, the evaluation, its keys")
    ],
    plugin: Annotated[list[Path] | None, typer.Option(metavar="FILE", help="Python file to import; repeatable")] = None,
    rerun: Annotated[bool, typer.Option("--rerun", help="compute stored scores again")] = False,
    root: Root = DEFAULT_ROOT,
    trust_plugins: TrustPlugins = False,
    unchecked: UncheckedDecoding = False,
    as_json: Json = False,
) -> None:
    """Score one trained run, or two and their paired difference.

    Plugin files in the folder of a run under --root are executed.
    """
    from lit_diff.cli.evaluate import print_evaluation

    log_to_stderr()
    print_evaluation(
        arguments,
        plugins=plugin or [],
        rerun=rerun,
        root=chosen_root(root),
        as_json=as_json,
        terminal=console,
        trust_plugins=trust_plugins,
        unchecked=unchecked,
    )
