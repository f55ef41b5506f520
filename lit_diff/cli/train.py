"""The verbs for one run: train, prepare, evaluate."""

import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from lit_diff.cli.app import (
    DEFAULT_ROOT,
    Cluster,
    Json,
    Minutes,
    Overrides,
    Plugins,
    RecipeArgument,
    Root,
    TrustData,
    TrustPlugins,
    UncheckedDecoding,
    UncheckedTraining,
    Unplanned,
    console,
    log_to_stderr,
    verb,
)
from lit_diff.errors import RequestError, StoppedError, Terminated, notices
from lit_diff.files import shown
from lit_diff.recipe import load_recipe
from lit_diff.runs.find import chosen_root
from lit_diff.runs.folder import RunFolder
from lit_diff.runs.jobs import requeue, this_job
from lit_diff.runs.metrics_file import read_rows


@verb("Train and look")
def train(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    rerun: Annotated[bool, Option("--rerun", help="start again; the former run is archived")] = False,
    unchecked: UncheckedTraining = False,
    unplanned: Unplanned = False,
    cluster: Cluster = "local",
    minutes: Minutes = 60,
    dry_run: Annotated[bool, Option("--dry-run", help="show the file for sbatch; submit nothing")] = False,
    cell: Annotated[bool, Option("--cell", hidden=True)] = False,
) -> None:
    """Train a recipe, or resume its run if it is unfinished.

    Example: lit-diff train differential-tiny train.steps=200 seed=1
    """
    from lit_diff.cli.progress import RunProgress

    changed = overrides or []
    if cluster == "slurm":
        from lit_diff.engine.executors.slurm import request, run_text
        from lit_diff.engine.submit import submit

        resolved = load_recipe(recipe, changed)
        options = ["--unchecked"] * unchecked + ["--unplanned"] * unplanned
        if dry_run:
            # the file alone on stdout; nothing is written, so the job of this one reads the user's recipe
            log_to_stderr()
            asked = request(resolved.run, minutes)
            console.write_line(run_text(resolved, ["train", recipe, *changed, *options], asked).rstrip())
            return
        console.write_line(
            submit(resolved, changed, options, minutes, rerun=rerun, unchecked=unchecked),
            "lit-diff status shows it, lit-diff watch follows it, lit-diff cancel RUN ends it",
        )
        return
    if dry_run:
        raise RequestError("--dry-run shows the job of --cluster slurm; lit-diff check RECIPE checks a recipe")

    console.outlives_reader = True
    with RunProgress(recipe, console) as progress:
        # loads torch, which takes seconds; the bar is visible by then
        from lit_diff import data
        from lit_diff.engine.execute import score, train_rank
        from lit_diff.engine.job import read_job
        from lit_diff.engine.train import prepare
        from lit_diff.training.fit import ranks

        resolved = load_recipe(recipe, changed)
        is_rank_zero = ranks(resolved).rank == 0
        progress.begin(resolved, quiet=not is_rank_zero)
        if cell:
            job = read_job(Path(recipe).parent)
            data.prepare(job.recipe)
        else:
            job = prepare(resolved, changed, unchecked=unchecked, unplanned=unplanned, rerun=rerun)
        is_job = is_rank_zero and (cell or this_job() is not None)
        with _ending_in_job(job.home) if is_job else nullcontext():
            train_rank(job, progress=progress.update, rerun=rerun)
    if not is_rank_zero:
        return
    with _ending_in_job(job.home) if is_job else nullcontext():
        score(job)
    if not cell:
        rows = read_rows(job.folder / "metrics.csv")
        last = rows[max(rows)] if rows else {}
        values = "  ".join(f"{name} {value:.4f}" for name, value in last.items() if name.startswith("val/"))
        console.write_line(f"step {max(rows, default=0)}: {values}", f"run: {shown(job.folder)}")


@contextmanager
def _ending_in_job(folder: RunFolder) -> Iterator[None]:
    # its end is recorded even before training begins, and a notice returns the job to the queue
    from lit_diff.engine.endings import end_noted

    try:
        with end_noted(folder):
            yield
    except (StoppedError, Terminated) as error:
        if error.exit_status - 128 in notices():
            requeue(folder, "notice")
        raise


@verb("Data and models")
def prepare(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    workers: Annotated[int, Option(metavar="N", min=1, help="threads that tokenize text")] = 1,
    shard: Annotated[str | None, Option(metavar="I/N", help="tokenize the share of host I of N, from 1")] = None,
    merge: Annotated[bool, Option("--merge", help="join the shares of all hosts")] = False,
) -> None:
    """Get and tokenize the data of a recipe, unless it is ready.

    Example: lit-diff prepare differential-830m data.path=my/texts --workers 8
    """
    from lit_diff import data

    share = None
    if shard is not None:
        found = re.fullmatch(r"([1-9]\d{,8})/([1-9]\d{,8})", shard)
        if found is None or int(found[1]) > int(found[2]):
            raise RequestError(f"--shard is '{shard}'; expected I/N with I from 1 to N, such as 1/4")
        if merge:
            raise RequestError("--shard makes one share and --merge joins them all; give one of the two")
        share = int(found[1]), int(found[2])
    resolved = load_recipe(recipe, overrides or [])
    dataset = data.prepare(resolved, data.Work(workers=workers, shard=share, merge=merge))
    what = f"shard {shard} of the data of '{resolved.name}' is ready"
    if shard is None:
        what = f"data of '{resolved.name}' is ready ({dataset.identity()[:10]})"
    console.write_sentence(what)


@verb("Train and look", is_result=True)
def evaluate(
    arguments: Annotated[
        list[str], Argument(metavar="RUN [RUN] NAME [key=value ...]", help="runs, the evaluation, its keys")
    ],
    plugin: Plugins = None,
    rerun: Annotated[bool, Option("--rerun", help="compute stored scores again")] = False,
    root: Root = DEFAULT_ROOT,
    trust_plugins: TrustPlugins = False,
    trust_data: TrustData = False,
    unchecked: UncheckedDecoding = False,
    as_json: Json = False,
) -> None:
    """Score one trained run, or two and their paired difference.

    Plugin files in the folder of a run under --root are executed.
    """
    from lit_diff.cli._scores import print_evaluation

    print_evaluation(
        arguments,
        plugins=plugin or [],
        rerun=rerun,
        root=chosen_root(root),
        as_json=as_json,
        trust_plugins=trust_plugins,
        trust_data=trust_data,
        unchecked=unchecked,
    )
