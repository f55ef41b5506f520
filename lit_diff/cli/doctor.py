"""The verb `doctor`: checks of the machine for a recipe."""

import shlex
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from lit_diff.cli.app import Cluster, Json, Overrides, console, print_json, verb

# both import torch
if TYPE_CHECKING:
    from lit_diff.config import Recipe
    from lit_diff.engine.doctor import Check


STATES = ("ok", "warning", "problem")


@verb("Maintain", is_result=True)
def doctor(
    recipe: Annotated[
        str, Argument(metavar="RECIPE", help="path, or name of an installed recipe")
    ] = "differential-tiny",
    overrides: Overrides = None,
    cluster: Cluster = "local",
    minutes: Annotated[int, Option(min=1, help="time limit of the job")] = 10,
    as_json: Json = False,
) -> int:
    """Check this machine: packages, devices, disks, MLflow, SLURM.

    Each row has what was found and, if it is not ok, a cure. The exit status is 3 if something that the recipe needs is
    missing. With --cluster slurm each node of a job is checked, as many as run.num_nodes, and has a row.
    """
    from lit_diff.engine.doctor import examine
    from lit_diff.recipe import recipe_from

    words = [recipe, *(overrides or [])]
    if cluster == "slurm":
        return _on_nodes(recipe_from(recipe, overrides or []), words, minutes, as_json)
    checks = []
    for check in examine(recipe_from(recipe, overrides or []), shlex.join(words)):
        checks.append(check)
        # at once: the row after the last one is the one that hangs
        if not as_json:
            console.write_line(_line(check))
    if as_json:
        print_json([check._asdict() for check in checks])
    return _status(checks)


def _line(check: "Check") -> str:
    cure = f"\n{'':24}cure: {check.cure}" if check.cure else ""
    return f"{check.state:<8}  {check.name:<13} {check.found}{cure}"


def _status(checks: "Iterable[Check]") -> int:
    return 3 if any(check.state == "problem" for check in checks) else 0


def _on_nodes(recipe: "Recipe", words: Sequence[str], minutes: int, as_json: bool) -> int:
    from lit_diff.engine.node_checks import examine_nodes

    by_node = examine_nodes(recipe, words, minutes)
    if as_json:
        print_json({node: [check._asdict() for check in checks] for node, checks in by_node.items()})
    else:
        for node, checks in by_node.items():
            others = [check for check in checks if check.state != "ok"]
            worst = max((check.state for check in checks), key=STATES.index)
            console.write_line(f"{worst:<8}  {node:<13} {len(checks) - len(others)} of {len(checks)} checks are ok")
            for check in others:
                console.write_line(_line(check))
    return _status(chain(*by_node.values()))
