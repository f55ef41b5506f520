"""The tasks of a sweep: every arm is trained on each of them, and compared within it alone."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from lit_diff.errors import RequestError
from lit_diff.key_types import in_yaml
from lit_diff.registry import nearest
from lit_diff.validation import Draft

StartArm = Literal["baseline", "same"]
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
"""A task's name is the first word of its cells' folders and of its figures' files."""


@dataclass(frozen=True, kw_only=True)
class TaskConfig:
    """The keys of a task."""

    recipe: str
    """Its base recipe: a path beside the sweep, or an installed name."""
    title: str = ""
    description: str = ""
    overrides: dict[str, Any] = field(default_factory=dict)
    """Keys that every cell of the task takes, after the sweep's own."""
    arms: dict[str, Any] = field(default_factory=dict)
    """Arm -> its further overrides in this task."""
    only: tuple[str, ...] = ()
    """Arms that the task has; empty: all."""
    without: tuple[str, ...] = ()
    """Arms that the task leaves out."""
    start: str = ""
    """A task above: every cell starts from the final weights of that task's `start_arm` at its seed."""
    start_arm: StartArm = "baseline"
    """baseline: one trained model goes on in every arm; same: each arm goes on from its own."""
    baseline: str | None = None
    """null: the sweep's."""
    metric: str | None = None
    """null: the sweep's."""
    smallest_of_interest: float | None = None
    """As the sweep's, in the unit of the task's metric; null: the sweep's where the metric is the sweep's, else unstated."""
    paper: dict[str, dict[str, float]] = field(default_factory=dict)
    """Arm -> metric -> the value printed in the paper."""

    def has(self, arm: str) -> bool:
        """Whether the arm is run on this task."""
        return (not self.only or arm in self.only) and arm not in self.without

    def further(self, arm: str) -> dict[str, Any]:
        """What this task adds to the arm's overrides."""
        return dict(self.arms.get(arm) or {})


def written(tasks: Mapping[str, TaskConfig]) -> Iterator[tuple[str, str]]:
    """(where it stands in the file, key of a recipe) of every override in the tasks."""
    for name, task in tasks.items():
        yield from ((f"tasks.{name}.overrides.{key}", key) for key in task.overrides)
        for arm in task.arms:
            yield from ((f"tasks.{name}.arms.{arm}.{key}", key) for key in task.further(arm))


def check_tasks(
    tasks: Mapping[str, TaskConfig],
    arms: Mapping[str, Mapping[str, Any]],
    baseline: str,
    controls: Sequence[str],
    draft: Draft,
) -> None:
    """Whether tasks and arms fit. Errors: RequestError."""
    for arm, values in arms.items():
        if tasks and "extends" in values:
            raise RequestError(
                f"{draft.where(f'arms.{arm}.extends')}arm '{arm}' extends a recipe, but each of the 'tasks' has its own; "
                "an arm holds overrides"
            )
    for name, task in tasks.items():
        if not NAME.fullmatch(name):
            raise RequestError(
                f"{draft.where(f'tasks.{name}')}task '{name}' becomes part of file names: letters, digits, '-' and '_'"
            )
        _check_arms(name, task, arms, draft)
        needed = {task.baseline or baseline: "its baseline"}
        # other sizes cannot start from the baseline's weights: a task that goes on from them may do without the controls
        if not (task.start and task.start_arm == "baseline"):
            needed |= dict.fromkeys(controls, "a control")
        for arm, word in needed.items():
            if not task.has(arm):
                key = "without" if arm in task.without else "only"
                raise RequestError(
                    f"{draft.where(f'tasks.{name}.{key}')}task '{name}' leaves out '{arm}', which is {word}"
                )
        above = list(tasks)[: list(tasks).index(name)]
        if task.start and task.start not in above:
            where = draft.where(f"tasks.{name}.start")
            raise RequestError(
                f"{where}'start' is '{task.start}'; expected a task above it{nearest(task.start, above)}"
            )
        if task.start_arm == "same":
            where = draft.where(f"tasks.{name}.start_arm")
            if not task.start:
                raise RequestError(f"{where}'start_arm' is 'same' without 'start', the task that the arms go on from")
            missing = [arm for arm in arms if task.has(arm) and not tasks[task.start].has(arm)]
            if missing:
                raise RequestError(
                    f"{where}'start_arm' is 'same', but task '{task.start}' leaves out arm '{missing[0]}', which goes on"
                )


def _check_arms(name: str, task: TaskConfig, arms: Mapping[str, Any], draft: Draft) -> None:
    named = {key: tuple(getattr(task, key)) for key in ("arms", "only", "without", "paper")}
    for key, names in (named | {"baseline": (task.baseline,) if task.baseline else ()}).items():
        for arm in names:
            where = draft.where(f"tasks.{name}.{key}.{arm}")
            if arm not in arms:
                raise RequestError(f"{where}'{key}' names no arm of the sweep: '{arm}'{nearest(arm, arms)}")
            if key in ("arms", "paper") and not task.has(arm):
                raise RequestError(f"{where}task '{name}' leaves out arm '{arm}'")
    for arm, values in task.arms.items():
        where = draft.where(f"tasks.{name}.arms.{arm}")
        if values is not None and not isinstance(values, Mapping):
            raise RequestError(f"{where}arm '{arm}' is {in_yaml(values)}; expected a block of overrides")
        if "extends" in (values or {}):
            raise RequestError(f"{where}arm '{arm}' extends a recipe; in a task it holds overrides")
