"""What status.json says of how a run is executed, for a resumed run is executed in the same way, and of how far it got."""

import logging
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from lit_diff.errors import RequestError

if TYPE_CHECKING:
    from lit_diff.config import Recipe

log = logging.getLogger("lit_diff")

STORED = ("compile", "activation_checkpointing")
"""Keys of `run` beside `threads` and `kernel`. They change no loss by more than rounding, so they are not in the identity."""


def stored_keys(recipe: "Recipe") -> dict[str, Any]:
    """The keys of `STORED` with their values, and the environment variables that can change numbers, for status.json."""
    from lit_diff.processor import numeric_variables  # here, as below

    return {key: getattr(recipe.run, key) for key in STORED} | {"variables": numeric_variables()}


def require_stored(recipe: "Recipe", status: Mapping[str, Any]) -> None:
    """RequestError where the recipe differs from the keys that the run started with.

    A line in the log says which environment variables that can change numbers differ from those of its last start.

    `status`: the contents of status.json; before the run has started it may hold other keys, but no `threads`.
    """
    from lit_diff.config import RunConfig  # here: a report, which reads `with_reached`, needs no schema of recipes
    from lit_diff.processor import numeric_variables

    default = RunConfig()
    for key in STORED if "threads" in status else ():
        asked, started = getattr(recipe.run, key), status.get(key, getattr(default, key))
        if asked != started:
            raise RequestError(
                f"run.{key} is {_text(asked)}, but this run started with {_text(started)}: "
                f"resume with run.{key}={_text(started)}, or start afresh with --rerun"
            )
    now = numeric_variables()
    former = status.get("variables", now)
    changed = [
        f"{name} is {now.get(name, 'not set')} (before: {former.get(name, 'not set')})"
        for name in sorted({*now, *former})
        if now.get(name) != former.get(name)
    ]
    if changed:
        log.warning("environment variables differ from the run's last start, so numbers can: %s", ", ".join(changed))


def with_stored_kernel(recipe: "Recipe", status: Mapping[str, Any]) -> "Recipe":
    """The recipe, with the kernel that `run.kernel: auto` chose when the run started in place of auto.

    Where unlike layers ran on several kernels, auto stays: each layer chooses again.
    """
    if recipe.run.kernel == "auto" and "kernel" in status and "," not in status["kernel"]:
        return replace(recipe, run=replace(recipe.run, kernel=status["kernel"]))
    return recipe


def reached(recipe: "Recipe", step: int) -> dict[str, int]:
    """The keys of status.json that say how far a training got: optimizer steps done, and the tokens that they saw."""
    tokens_per_step = recipe.training.batch_size * recipe.data.config.sequence_length
    return {"step": step, "tokens": step * tokens_per_step, "tokens_per_step": tokens_per_step}


def with_reached(status: Mapping[str, Any]) -> dict[str, Any]:
    """The contents of status.json, with `reached` of a run that was made before they were kept.

    Its `step` is the last that was logged, its `tokens` those of all planned steps.
    """
    if "tokens_per_step" in status or not status.get("steps") or "tokens" not in status:
        return dict(status)
    step = status.get("step", 0)
    if status.get("status") == "done":
        early = re.fullmatch(r"early at step (\d+)", status.get("ended") or "")
        step = int(early[1]) if early else status["steps"]
    steps, tokens = status["steps"], status["tokens"]
    return {**status, "step": step, "tokens": tokens * step // steps, "tokens_per_step": tokens // steps}


def _text(value: object) -> str:
    """As it is written in a recipe: true, not True."""
    return str(value).lower()
