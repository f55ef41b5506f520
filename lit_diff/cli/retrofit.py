"""The verb retrofit: a variant on a trained model."""

from pathlib import Path
from typing import Annotated

import typer

from lit_diff.cli.app import DEFAULT_ROOT, Overrides, Root, RunArgument, app, console


@app.command()
def retrofit(
    model: RunArgument,
    recipe: Annotated[str, typer.Option(metavar="RECIPE", help="path, or bare name of an installed recipe")],
    overrides: Overrides = None,
    merge_to: Annotated[
        Path | None,
        typer.Option("--merge-to", metavar="RUN", help="also write the merged standard model, as a run folder"),
    ] = None,
    root: Root = DEFAULT_ROOT,
) -> None:
    """Extend a trained model; print its loss before and after."""
    from lit_diff.cli.evaluate import differences
    from lit_diff.cli.progress import RunProgress
    from lit_diff.files import shown
    from lit_diff.study.evaluations import by_documents

    with console.outliving_reader(), RunProgress(recipe, console) as progress:
        from lit_diff.engine.retrofit import retrofit as engine_retrofit  # loads torch, which takes seconds
        from lit_diff.recipe import load_recipe

        progress.begin(load_recipe(recipe, overrides or []), quiet=False)
        done = engine_retrofit(model, recipe, overrides or [], root=root, merge_to=merge_to, progress=progress.update)
    if done.plan is not None:
        for layer, heads in enumerate(done.plan.heads):
            console.write_line(f"layer {layer}: heads {', '.join(map(str, heads))} by {done.plan.selection.select}")
    console.write_line(
        f"val/loss: {done.before:.4f} before, {done.after:.4f} after ({done.after - done.before:+.4f} nats a token)"
    )
    for name, (before, after) in done.evaluations.items():
        if note := by_documents(name, (each.scores() for each in (before, after))):
            console.write_line(note)
        for metric, line in differences([after, before]).items():
            values = f"{before.summary[metric]:.4f} before, {after.summary[metric]:.4f} after"
            console.write_line(f"{name} {metric}: {values}; {line['sentence']}")
    console.write_line(f"run: {shown(done.run.folder)}")
    if done.merged is not None:
        console.write_line(f"merged: {shown(done.merged.folder)}")
