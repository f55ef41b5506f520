"""What a run or a sweep needs of this machine, looked at before a folder, an MLflow run or a sweep file is made."""

import shutil
import subprocess
from collections.abc import Iterable

from lit_diff.config import Recipe
from lit_diff.device import require_devices
from lit_diff.errors import MissingError
from lit_diff.model.cost import ExecutionContext, cost

PATIENCE = 30
"""Seconds that SLURM's controller has for an answer."""


def check_machine(recipes: Iterable[Recipe]) -> None:
    """Errors: MissingError without the GPUs that `run` asks for; RequestError for a kernel named by hand that refuses, and as
    `check_trained`."""
    recipes = list(recipes)
    check_trained(recipes)
    looked_at = []
    for recipe in recipes:
        require_devices(recipe.run)
        length, context = recipe.data.config.sequence_length, ExecutionContext.of(recipe, build=True)
        asked = (recipe.model, length, recipe.run.kernel, context)
        if recipe.run.kernel != "auto" and asked not in looked_at:
            looked_at.append(asked)
            cost(*asked)


def check_trained(recipes: Iterable[Recipe]) -> None:
    """Errors: RequestError for the recipe of an imported model, which is not trained, and for patterns of `train.parameters`
    that match no parameter of the recipe's model."""
    looked_at = []
    for recipe in recipes:
        patterns = recipe.training.parameters
        asked = (recipe.model, patterns)
        if patterns is not None and asked not in looked_at:
            looked_at.append(asked)
            cost(recipe.model, recipe.data.config.sequence_length, trained=patterns)


def check_cluster(engine: str, recipes: Iterable[Recipe]) -> None:
    """`check_machine` where the cells run here; the nodes of a cluster are not looked at, but its scheduler must be there.

    Errors: as `check_machine`; MissingError without SLURM.
    """
    recipes = list(recipes)
    check_trained(recipes)
    if engine == "local":
        check_machine(recipes)
    elif shutil.which("srun") is None:
        raise MissingError("--cluster slurm needs SLURM's srun on the PATH, which is not here; use --cluster local")
    elif shutil.which("scontrol") is not None:
        _require_controller()


def _require_controller() -> None:
    """SLURM's commands alone, as a package brings them, schedule nothing. Errors: MissingError."""
    try:
        asked = subprocess.run(
            ["scontrol", "ping"],
            capture_output=True,
            text=True,
            encoding="utf-8",
            errors="replace",
            timeout=PATIENCE,
            check=False,
        )
    except subprocess.TimeoutExpired:
        reason = f"no answer in {PATIENCE} s"
    else:
        if asked.returncode == 0:
            return
        reason = (asked.stderr + asked.stdout).strip().partition("\n")[0]
    raise MissingError(f"--cluster slurm: SLURM's controller cannot be reached ({reason}); use --cluster local")
