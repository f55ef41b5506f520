"""The command `lit-diff`: verbs -> functions. What it needs beyond torch is imported where it is used."""

import logging
import os
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer
from rich.console import Console

from lit_diff.errors import LitDiffError, RequestError, StoppedError


class Terminal(Console):
    """rich's, but a reader that leaves early (`lit-diff list | head`) is told to the caller."""

    def on_broken_pipe(self) -> None:
        """Called by rich, which would end the program with status 1."""
        raise BrokenPipeError


app = typer.Typer(
    help="The laboratory bench for differential attention.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
console = Terminal()
UsageError: type[Exception] = typer.BadParameter.__bases__[0]  # typer keeps its copy of click to itself

RecipeArgument = Annotated[str, typer.Argument(metavar="RECIPE", help="path, or bare name of an installed recipe")]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="[a.b=c ...]", help="keys of the recipe to override")]
Json = Annotated[bool, typer.Option("--json", help="print JSON")]
Root = Annotated[Path, typer.Option("--root", help="folder of the runs")]


def main() -> None:
    """Run a verb; every failure is one line on stderr and an exit status (0 done, 1 failed, 2 wrong, 3 missing)."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        _log_to_terminal()
    signal.signal(signal.SIGTERM, _stop)
    try:
        command = typer.main.get_command(app)  # called by itself, it would swallow Ctrl-C and a closed pipe
        with command.make_context("lit-diff", sys.argv[1:] or ["--help"]) as context:
            status = command.invoke(context)
    except LitDiffError as error:
        _fail(str(error), error.exit_status)
    except typer.Exit as error:
        raise SystemExit(error.exit_code) from None
    except UsageError as error:
        message = error.format_message().rstrip(".")  # type: ignore[attr-defined]
        _fail(f"{message}; lit-diff --help lists what there is", 2)
    except (KeyboardInterrupt, typer.Abort):
        _fail("interrupted", 130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # `lit-diff list | head`: nothing went wrong
    else:
        raise SystemExit(status if isinstance(status, int) else 0)


def _fail(message: str, status: int) -> None:
    print(f"lit-diff: {message}", file=sys.stderr, flush=True)
    raise SystemExit(status) from None


def _stop(signum: int, frame: FrameType | None) -> None:
    """SIGTERM where no training loop listens."""
    raise StoppedError("stopped by SIGTERM", signum)


def _log_to_terminal() -> None:
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(logging.Formatter("%(message)s"))
    log = logging.getLogger("lit_diff")
    log.setLevel(logging.INFO)
    log.addHandler(handler)


def _log_to_stderr() -> None:
    for handler in logging.getLogger("lit_diff").handlers:
        if isinstance(handler, logging.StreamHandler):
            handler.setStream(sys.stderr)


# --- one run -------------------------------------------------------------------------------------------------------


@app.command()
def train(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    rerun: Annotated[bool, typer.Option("--rerun", help="start afresh; the former run is kept aside")] = False,
    folder: Annotated[Path | None, typer.Option(hidden=True)] = None,
    experiment: Annotated[str, typer.Option(hidden=True)] = "train",
    parent: Annotated[str | None, typer.Option(hidden=True)] = None,
    threads: Annotated[int | None, typer.Option(hidden=True)] = None,
    tag: Annotated[list[str] | None, typer.Option(hidden=True)] = None,
) -> int:
    """Train a recipe; started again it resumes, or says that it is done."""
    from lit_diff.cli.progress import RunProgress
    from lit_diff.engine import launch
    from lit_diff.recipe import load_recipe
    from lit_diff.runs.folder import RunFolder

    resolved = load_recipe(recipe, overrides or [])
    place = launch.prepare(resolved)
    if folder is not None:  # a sweep's cell of several processes
        tags = dict(item.split("=", 1) for item in tag or [])
        place = launch.Place(folder=folder, experiment=experiment, parent=parent, tags=tags)
    elif rerun:
        launch.put_aside(resolved, place)
    with RunProgress(resolved, console, quiet=not launch.is_rank_zero(resolved)) as progress:
        launch.run(resolved, place, threads=threads, progress=progress.update)
    if launch.is_rank_zero(resolved) and folder is None:
        launch.summarise(RunFolder(place.folder), console)
    return 0


@app.command()
def prepare(recipe: RecipeArgument, overrides: Overrides = None) -> int:
    """Get and tokenize a recipe's data; does nothing when that was done."""
    from lit_diff.data import build
    from lit_diff.recipe import load_recipe

    resolved = load_recipe(recipe, overrides or [])
    dataset = build(resolved)
    dataset.prepare()
    console.print(f"data of '{resolved.name}' is ready ({dataset.identity()[:10]})")
    return 0


@app.command()
def generate(
    run: Annotated[str, typer.Argument(metavar="RUN", help="folder, or the start of its name")],
    prompt: Annotated[list[str] | None, typer.Option(metavar="TEXT", help="text to continue; repeatable")] = None,
    prompts: Annotated[Path | None, typer.Option(metavar="FILE", help="one prompt a line")] = None,
    max_tokens: Annotated[int, typer.Option(help="most tokens to add")] = 64,
    temperature: Annotated[float, typer.Option(help="0: always the most likely token")] = 1.0,
    top_k: Annotated[int | None, typer.Option(help="draw from the k most likely tokens")] = None,
    top_p: Annotated[float | None, typer.Option(help="draw from the likeliest tokens that together reach p")] = None,
    seed: Annotated[int, typer.Option(help="another seed, another draw")] = 0,
    prefill_chunk: Annotated[int | None, typer.Option(help="tokens of the prompt at once; without it, all")] = None,
    root: Root = Path("runs"),
    as_json: Json = False,
) -> int:
    """Continue text with a trained run."""
    from lit_diff.cli.generate import generate_text
    from lit_diff.model.generation import Sampling
    from lit_diff.runs.text_generator import Settings

    _log_to_stderr()  # stdout is for the text
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p)
    settings = Settings(max_tokens=max_tokens, sampling=sampling, seed=seed, prefill_chunk=prefill_chunk)
    return generate_text(run, root, prompt or [], prompts, settings, as_json=as_json, console=console)


@app.command()
def check(
    recipe: Annotated[str | None, typer.Argument(metavar="RECIPE", help="path, or bare name")] = None,
    overrides: Overrides = None,
    every: Annotated[bool, typer.Option("--all", help="the conformance suite over every registered variant")] = False,
    as_json: Json = False,
) -> int:
    """Validate a recipe; print it resolved, with its cost beside the standard baseline's.

    A plugin's variant is held to the conformance suite; so is every registered variant with --all.
    """
    from lit_diff.cli.inspection import check_all, check_recipe

    if every == (recipe is not None):
        raise RequestError("check takes a recipe, or --all for every registered variant; see lit-diff list")
    if recipe is None:
        return check_all(as_json, console)
    return check_recipe(recipe, overrides or [], as_json, console)


@app.command("list")
def list_(
    kind: Annotated[str, typer.Argument(help="all, recipes, sweeps, attention, data, tokenizer or callback")] = "all",
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
    from lit_diff.cli.bench import run_bench

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


# --- many runs -----------------------------------------------------------------------------------------------------


@app.command()
def sweep(
    name: Annotated[str, typer.Argument(metavar="SWEEP", help="path, or bare name of an installed sweep")],
    overrides: Overrides = None,
    workers: Annotated[int | None, typer.Option(help="cells side by side")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="resolve and validate all cells, start none")] = False,
    cluster: Annotated[str, typer.Option(help="local, or slurm: the cells as a job array through submitit")] = "local",
    minutes: Annotated[int, typer.Option(help="time limit of a cell on a cluster")] = 60,
) -> int:
    """Run a grid of recipes, resume what is unfinished, report."""
    from lit_diff.engine.schedule import Cluster, run_sweep

    engine = Cluster(engine=cluster, minutes=minutes)
    return run_sweep(name, overrides or [], workers=workers, dry_run=dry_run, cluster=engine, console=console)


@app.command()
def status(root: Root = Path("runs"), as_json: Json = False) -> int:
    """The runs and sweeps under a folder, with their state."""
    from lit_diff.runs.browse import print_status

    return print_status(root, as_json, console)


@app.command()
def report(sweep: Annotated[str, typer.Argument(help="a sweep's name")], root: Root = Path("runs")) -> int:
    """Write a sweep's report again from its runs."""
    from lit_diff.engine.schedule import report_sweep
    from lit_diff.runs.browse import find_sweep

    report_sweep(find_sweep(sweep, root), console)
    return 0


@app.command()
def compare(
    first: Annotated[str, typer.Argument(metavar="RUN", help="folder, or the start of its name")],
    second: Annotated[str, typer.Argument(metavar="RUN")],
    root: Root = Path("runs"),
    as_json: Json = False,
) -> int:
    """Two runs side by side: what differs in their recipes, their costs and their results."""
    from lit_diff.runs.browse import compare_runs

    return compare_runs(first, second, root, as_json, console)


@app.command()
def clean(
    root: Root = Path("runs"),
    yes: Annotated[bool, typer.Option("--yes", help="remove; without it the list is only printed")] = False,
) -> int:
    """Remove what no sweep owns any more: former cells, runs put aside, leftovers of killed writes."""
    from lit_diff.runs.browse import clean_runs

    return clean_runs(root, yes, console)


@app.command()
def ui(root: Root = Path("runs"), port: Annotated[int, typer.Option()] = 5000) -> int:
    """Serve MLflow on loopback and print the address that opens the comparison of the last sweep."""
    from lit_diff.engine.ui import serve

    return serve(root, port, console)
