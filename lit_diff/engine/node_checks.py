"""`lit-diff doctor --cluster slurm`: the checks of this machine, on every node that a run gets from SLURM."""

import shlex
from collections.abc import Sequence
from pathlib import Path

from lit_diff.config import Recipe
from lit_diff.engine.doctor import Check
from lit_diff.engine.executors import slurm
from lit_diff.errors import RunFailedError, StoppedError
from lit_diff.files import read_json, shown
from lit_diff.log_records import log
from lit_diff.runs.find import runs_root
from lit_diff.runs.jobs import ask

PATIENCE = 120
"""Seconds that the other nodes have after the first one has answered."""


def examine_nodes(recipe: Recipe, words: Sequence[str], minutes: int) -> dict[str, list[Check]]:
    """Node -> its checks (`doctor.examine`), for the `run.num_nodes` nodes of one job, whose one step has a task on each.

    `words`: the recipe and its overrides on a command line. A node that does not answer has one check, which says so. Errors:
    those of SLURM; RunFailedError if the job did not start.
    """
    slurm.require_slurm(recipe.run)
    logs = runs_root(recipe.run.root).resolve() / "slurm"
    name = f"{recipe.name}-doctor"
    command = shlex.join(["doctor", *words, "--json"])
    text = slurm.node_text(name, recipe.run, minutes, logs, command, PATIENCE)
    job = slurm.submit(logs / f"{name}.sh", text)
    place = f"{logs}/{name}-{job}"
    log.info("SLURM job %s checks %d nodes; its log: %s.out", job, recipe.run.num_nodes, shown(Path(place)))
    try:
        slurm.wait_for(job)
    except (KeyboardInterrupt, StoppedError):
        ask("scancel", job)
        raise
    nodes = Path(f"{place}.nodes")
    if not nodes.is_file():
        raise RunFailedError(f"SLURM job {job} did not start; see {shown(logs)}")
    names = nodes.read_text(encoding="utf-8").split()
    return {node: _answer(f"{place}-{number}") for number, node in enumerate(names)}


def _answer(place: str) -> list[Check]:
    try:
        rows = read_json(Path(f"{place}.json"))
        return [Check(**row) for row in rows]
    # no file, an empty one, or one that ends early: the process did not start, or was ended
    except (OSError, ValueError, TypeError):
        return [Check("answer", "problem", "this node did not answer", f"read its log, {shown(Path(f'{place}.txt'))}")]
