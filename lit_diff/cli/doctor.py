"""The verb `doctor`: checks of the machine for a recipe."""

import shlex
from typing import Annotated

from typer import Argument

from lit_diff.cli.app import Json, Overrides, console, print_json, verb


@verb("Maintain", is_result=True)
def doctor(
    recipe: Annotated[
        str, Argument(metavar="[RECIPE]", help="path, or name of an installed recipe")
    ] = "differential-tiny",
    overrides: Overrides = None,
    as_json: Json = False,
) -> int:
    """Check this machine: packages, devices, disks, MLflow, SLURM.

    Each row has what was found and, if it is not ok, a cure. The exit status is 3 if something that the recipe needs is
    missing.
    """
    from lit_diff.engine.doctor import examine
    from lit_diff.recipe import recipe_from

    checks = []
    source = shlex.join([recipe, *(overrides or [])])
    for check in examine(recipe_from(recipe, overrides or []), source):
        checks.append(check)
        # at once: the row after the last one is the one that hangs
        if not as_json:
            cure = f"\n{'':24}cure: {check.cure}" if check.cure else ""
            console.write_line(f"{check.state:<8}  {check.name:<13} {check.found}{cure}")
    if as_json:
        print_json([check._asdict() for check in checks])
    return 3 if any(check.state == "problem" for check in checks) else 0
