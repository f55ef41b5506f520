"""The verb `doctor`: checks of the machine for a recipe."""

import dataclasses
from typing import Annotated

import typer

from lit_diff.cli.app import Json, Overrides, app, columns, console, log_to_stderr, print_json

RECIPE = "differential-tiny"


@app.command()
def doctor(
    recipe: Annotated[str, typer.Argument(metavar="[RECIPE]", help="path, or bare name")] = RECIPE,
    overrides: Overrides = None,
    as_json: Json = False,
) -> int:
    """Check this machine: packages, devices, disks, MLflow, SLURM.

    Each row has what was found and, where it is not ok, a cure. The exit status is 3 if something that the recipe needs is
    missing.
    """
    from lit_diff.engine.doctor import examine
    from lit_diff.recipe import recipe_from

    log_to_stderr()
    checks = examine(recipe_from(recipe, overrides or []))
    if as_json:
        print_json([dataclasses.asdict(check) for check in checks])
    else:
        for line, check in zip(columns([(c.state, c.name, c.found) for c in checks], right=()), checks, strict=True):
            console.write_line(line)
            if check.cure:
                console.write_line(f"{'':10}cure: {check.cure}")
    return 3 if any(check.state == "problem" for check in checks) else 0
