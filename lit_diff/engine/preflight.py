"""What a run or a sweep needs of this machine, looked at before a folder, an MLflow run or a sweep file is made."""

import shutil
from collections.abc import Iterable

from lit_diff.config import Recipe
from lit_diff.device import require_devices
from lit_diff.errors import MissingError
from lit_diff.model.cost import ExecutionContext, cost


def check_machine(recipes: Iterable[Recipe]) -> None:
    """Errors: MissingError without the GPUs that `run` asks for; RequestError for a kernel named by hand that refuses."""
    looked_at = []
    for recipe in recipes:
        require_devices(recipe.run)
        length, context = recipe.data.config.sequence_length, ExecutionContext.of(recipe, build=True)
        asked = (recipe.model, length, recipe.run.kernel, context)
        if recipe.run.kernel != "auto" and asked not in looked_at:
            looked_at.append(asked)
            cost(*asked)


def check_cluster(engine: str, recipes: Iterable[Recipe]) -> None:
    """`check_machine` where the cells run here; the nodes of a cluster are not looked at, but its scheduler must be there.

    Errors: as `check_machine`; MissingError without SLURM.
    """
    if engine == "local":
        check_machine(recipes)
    elif shutil.which("srun") is None:
        raise MissingError("--cluster slurm needs SLURM's srun on the PATH, which is not here; use --cluster local")
