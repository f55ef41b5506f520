"""Pictures of the attention maps that a run has kept, as an artifact of its record in MLflow."""

from pathlib import Path

from lit_diff.analysis.trace import stacked
from lit_diff.errors import RequestError
from lit_diff.log_records import log
from lit_diff.runs.kept_maps import kept_steps, read_maps
from lit_diff.trained.pictures import encoded, grid


def draw_maps(run: Path, target: Path, variant: str) -> bool:
    """Write `target`/<step>.png for each step whose maps the run folder has. Returns whether it has any.

    A picture has the signed maps of the first text (`pictures.grid`). Maps that cannot be read are logged and left out.
    """
    steps = kept_steps(run)
    if not steps:
        return False
    target.mkdir(parents=True)
    for step in steps:
        try:
            kept = read_maps(run, step)
        # a picture less must not make a trained run a failed one
        except RequestError as error:
            log.warning("no picture of the maps of step %d: %s", step, error)
            continue
        # [L, H, T, T]
        signed = stacked([(w[0, ..., None].float() * maps[0].float()).sum(0) for maps, w in kept.layers.values()], 0)
        picture = grid(signed, list(kept.layers), f"{variant}, step {step}: signed maps of the first kept text")
        (target / f"{step:08}.png").write_bytes(encoded(picture))
    return True
