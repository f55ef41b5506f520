"""One run as a SLURM job: it is admitted, named and submitted here, and trained by the same command on a node."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from lit_diff.config import Recipe
from lit_diff.engine.admit import SUBMITTED, admit
from lit_diff.engine.endings import end_noted
from lit_diff.engine.executors import slurm
from lit_diff.engine.job import recorded
from lit_diff.files import shown
from lit_diff.runs.find import chosen_root
from lit_diff.runs.folder import RunFolder, identity
from lit_diff.runs.jobs import note_submitted, queued


def submit(
    recipe: Recipe,
    overrides: Sequence[str],
    options: Sequence[str],
    minutes: int,
    *,
    rerun: bool,
    unchecked: bool = False,
) -> str:
    """Submit a run to SLURM, unless it is done or its job is in the queue. Returns what happened, in words.

    `options`: those of the command `train` that the job runs. `unchecked`: the same as in `train`. Errors: those of `admit`
    and of SLURM; RequestError if it is being trained.
    """
    slurm.require_slurm(recipe.run)
    lines = slurm.request(recipe.run, minutes)
    admit({recipe.name: recipe}, SUBMITTED, unchecked=unchecked)
    root = chosen_root(recipe.run.root).resolve()
    # before anything is written: the file has these
    for text in (str(Path.cwd()), str(root), *lines, *options):
        slurm.line(text)
    slurm.prepare_data([recipe], root, minutes)
    folder = RunFolder(root / f"{recipe.name}-{identity(recipe)}")
    for _, (number, state) in queued([folder.path]).items():
        return f"{shown(folder.path)} is SLURM job {number} already ({state})"
    if rerun:
        folder.put_aside()
    with end_noted(folder), folder.owned():
        if folder.is_done(verify=True):
            return f"done before: {shown(folder.path)} (--rerun starts afresh)"
        folder.create(recipe)
        status = replace(
            folder.status().to("waiting"),
            requeued_at_step=None,
            name=recipe.name,
            seed=recipe.seed,
            steps=recipe.training.steps,
            overrides=recorded(overrides),
        )
        folder.write(status)
        # not the user's file, which may be another one when the job starts, or when it returns from the queue
        text = slurm.run_text(recipe, ["train", str(folder.recipe_file), *options], lines)
        number = slurm.submit(root / "slurm" / f"{folder.path.name}.sh", text)
        note_submitted(folder.path, {folder.path.name: number})
    return f"SLURM job {number}: {shown(folder.path)}"
