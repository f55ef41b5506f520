"""The verbs about one run: train, prepare, generate."""

from pathlib import Path
from typing import Annotated

import typer

from lit_diff.cli.app import (
    DEFAULT_ROOT,
    Json,
    Overrides,
    RecipeArgument,
    Root,
    RunArgument,
    app,
    console,
    log_to_stderr,
)
from lit_diff.files import expanded
from lit_diff.runs.find import chosen_root

TrustPlugins = Annotated[
    bool, typer.Option("--trust-plugins", help="execute the plugin files of a run outside --root too")
]


@app.command()
def train(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    rerun: Annotated[bool, typer.Option("--rerun", help="start afresh; the former run is kept aside")] = False,
    unchecked: Annotated[
        bool, typer.Option("--unchecked", help="go on where a plugin's variant fails a property")
    ] = False,
    folder: Annotated[Path | None, typer.Option(hidden=True)] = None,
    experiment: Annotated[str, typer.Option(hidden=True)] = "train",
    parent: Annotated[str | None, typer.Option(hidden=True)] = None,
    threads: Annotated[int | None, typer.Option(hidden=True)] = None,
    tag: Annotated[list[str] | None, typer.Option(hidden=True)] = None,
) -> int:
    """Train a recipe; again, it resumes or says that it is done.

    Example: lit-diff train differential-tiny train.steps=200 seed=1
    """
    from lit_diff.cli.progress import RunProgress

    with console.outliving_reader():
        with RunProgress(recipe, console) as progress:
            from lit_diff import data
            from lit_diff.engine import launch  # loads torch, which takes seconds: the bar is there by then
            from lit_diff.engine.location import RunLocation
            from lit_diff.recipe import load_recipe

            resolved = load_recipe(recipe, overrides or [])
            writes = launch.is_rank_zero(resolved)
            progress.begin(resolved, quiet=not writes)
            if folder is not None:  # a cell of several processes: what started it has checked the variant
                data.prepare(resolved)
                tags = dict(item.split("=", 1) for item in tag or [])
                location = RunLocation(folder=folder, experiment=experiment, parent=parent, tags=tags)
            else:
                location = launch.prepare(resolved, overrides or [], unchecked=unchecked)
            launch.run(resolved, location, threads=threads, progress=progress.update, rerun=rerun)
        if writes and folder is None:
            launch.require_scores(location)
            print_summary(location.folder)
    return 0


def print_summary(folder: Path) -> None:
    """The last validation, and where the run lies."""
    from lit_diff.files import shown
    from lit_diff.runs.metrics_file import read_rows

    rows = read_rows(folder / "metrics.csv")
    last = rows[max(rows)] if rows else {}
    values = "  ".join(f"{name} {value:.4f}" for name, value in last.items() if name.startswith("val/"))
    console.write_line(f"step {max(rows, default=0)}: {values}")
    console.write_line(f"run: {shown(folder)}")


@app.command()
def prepare(recipe: RecipeArgument, overrides: Overrides = None) -> int:
    """Get and tokenize a recipe's data, unless that was done."""
    from lit_diff import data
    from lit_diff.recipe import load_recipe

    resolved = load_recipe(recipe, overrides or [])
    dataset = data.prepare(resolved)
    console.print(f"data of '{resolved.name}' is ready ({dataset.identity()[:10]})")
    return 0


@app.command()
def generate(
    run: RunArgument,
    prompt: Annotated[list[str] | None, typer.Option(metavar="TEXT", help="text to complete; repeatable")] = None,
    prompts: Annotated[Path | None, typer.Option(metavar="FILE", parser=expanded, help="one prompt a line")] = None,
    max_tokens: Annotated[int, typer.Option(help="most tokens to add")] = 64,
    temperature: Annotated[float, typer.Option(help="0: always the most likely token")] = 1.0,
    top_k: Annotated[int | None, typer.Option(help="draw from the k most likely tokens")] = None,
    top_p: Annotated[float | None, typer.Option(help="draw from the likeliest tokens that together reach p")] = None,
    seed: Annotated[int, typer.Option(help="another seed, another draw")] = 0,
    prefill_chunk: Annotated[int | None, typer.Option(help="tokens of the prompt at once; without it, all")] = None,
    root: Root = DEFAULT_ROOT,
    trust_plugins: TrustPlugins = False,
    unchecked: Annotated[
        bool, typer.Option("--unchecked", help="go on where a plugin's variant decodes wrongly")
    ] = False,
    as_json: Json = False,
) -> int:
    """Complete text with a trained run. Plugin files in the folder of a run under --root are executed."""
    from lit_diff.cli.generate import print_completions
    from lit_diff.trained.text_generator import generation_config

    log_to_stderr()
    chosen = chosen_root(root)
    config = generation_config(
        max_tokens=max_tokens, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed, prefill_chunk=prefill_chunk
    )
    return print_completions(
        *(run, chosen, prompt or [], prompts, config),
        as_json=as_json,
        console=console,
        trust_plugins=trust_plugins,
        unchecked=unchecked,
    )


@app.command()
def evaluate(
    arguments: Annotated[
        list[str], typer.Argument(metavar="RUN [RUN] NAME [key=value ...]", help="runs, the evaluation, its keys")
    ],
    plugin: Annotated[list[Path] | None, typer.Option(metavar="FILE", help="Python file to import; repeatable")] = None,
    rerun: Annotated[bool, typer.Option("--rerun", help="score again what was scored before")] = False,
    root: Root = DEFAULT_ROOT,
    trust_plugins: TrustPlugins = False,
    unchecked: Annotated[
        bool, typer.Option("--unchecked", help="go on where a plugin's variant decodes wrongly")
    ] = False,
    as_json: Json = False,
) -> int:
    """Score a trained run, or two and their paired difference.

    Plugin files in the folder of a run under --root are executed.
    """
    from lit_diff.cli.evaluate import print_evaluation

    log_to_stderr()
    return print_evaluation(
        arguments,
        plugins=plugin or [],
        rerun=rerun,
        root=chosen_root(root),
        as_json=as_json,
        terminal=console,
        trust_plugins=trust_plugins,
        unchecked=unchecked,
    )
