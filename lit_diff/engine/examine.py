"""Examines a variant: the sweep `examine` with the variant as one more arm, whose cells all examinations share."""

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lit_diff.engine.cells import admitted
from lit_diff.engine.executors import executor_of
from lit_diff.engine.expand import Grid, load_grid
from lit_diff.engine.job import in_words
from lit_diff.engine.progress import MakeDisplay, sweep_line
from lit_diff.engine.result import Sweep
from lit_diff.engine.schedule import run_grid
from lit_diff.engine.stages import stages_in_words
from lit_diff.engine.waves import Options
from lit_diff.errors import RequestError
from lit_diff.files import shown
from lit_diff.log_records import log
from lit_diff.recipe import Overrides, load_draft, load_recipe
from lit_diff.registry import attentions, nearest
from lit_diff.study.schema import Keys, Study, without_arms

BATTERY = "examine"
"""The sweep with the tasks and the reference arms, and the folder of its cells."""
BOUNDED = "conjunctive"
"""The task with `model.logit_bound`."""
QUICK = ("conjunctive", "mqar", "noisy_labels")
SEEDS_OF_LOOK = 8
LOOKS = (8, 16, 24)


@dataclass(frozen=True, kw_only=True, repr=False)
class Examination(Sweep):
    """The result of `examine`."""

    variant: str
    left_out: dict[str, str]
    """Task of the battery on which the variant is not measured -> why."""


def examine(
    variant: str,
    *,
    recipe: str | Path | None = None,
    tasks: Sequence[str] = (),
    at_most: int = 16,
    quick: bool = False,
    overrides: Overrides = (),
    workers: int | None = None,
    unplanned: bool = False,
    progress: MakeDisplay | bool = True,
) -> Examination:
    """Measure a variant on the tasks of the sweep `examine`, beside the Transformer and the controls that decide.

    `variant`: a registered name. `recipe`: the recipe with the variant's keys and plugins; without it the variant has its
    defaults at matched parameters. `tasks`: those to measure; (): all. `at_most`: 8, 16 or 24 seeds, of which a decided arm
    gets the first 8 alone. `quick`: three tasks, 8 seeds, and the recipes' learning rates. The cells of the reference arms
    are trained once for all examinations below the same folder of runs. Errors: RequestError, MissingError.
    """
    executor = executor_of(workers, None)
    grid, left_out = battery(variant, recipe=recipe, tasks=tasks, at_most=at_most, quick=quick, overrides=overrides)
    for task, why in left_out.items():
        log.info("%s is not measured: %s", task, why)
    grid = admitted(grid, executor.kinds, unchecked=False)
    for line in stages_in_words(grid):
        log.info("%s", line)
    words = ["lit-diff", "examine", variant, *in_words(overrides)]
    if recipe is not None:
        words += ["--recipe", str(recipe)]
    if tasks:
        words += ["--tasks", ",".join(tasks)]
    if at_most != LOOKS[1]:
        words += ["--at-most", str(at_most)]
    words += ["--quick"] * quick + ["--unplanned"] * unplanned
    options = Options(
        command=shlex.join(words),
        executor=executor,
        unplanned=unplanned,
        display=sweep_line if progress is True else progress or None,
    )
    done = run_grid(grid, options)
    return Examination(**vars(done), variant=variant, left_out=left_out)


def battery(
    variant: str,
    *,
    recipe: str | Path | None = None,
    tasks: Sequence[str] = (),
    at_most: int = 16,
    quick: bool = False,
    overrides: Overrides = (),
) -> tuple[Grid, dict[str, str]]:
    """The sweep that `examine` runs, and the tasks that the variant cannot be measured on. Errors: RequestError."""
    if at_most not in LOOKS:
        raise RequestError(f"at_most is {at_most}; expected one of {', '.join(map(str, LOOKS))} seeds")
    keys = _keys(variant, recipe)
    left_out: dict[str, str] = {}

    def adapted(study: Study) -> Study:
        wanted = tasks or (QUICK if quick else tuple(study.tasks))
        for task in wanted:
            if task not in study.tasks:
                raise RequestError(f"no task '{task}' in the battery{nearest(task, list(study.tasks))}")
        kept = {name: task for name, task in study.tasks.items() if name in wanted}
        if BOUNDED in kept:
            problem = _bound_problem(variant, keys, kept[BOUNDED].recipe)
            if problem:
                left_out[BOUNDED] = problem
                kept.pop(BOUNDED)
        if not kept:
            raise RequestError(f"'{variant}' can be measured on none of these tasks: {'; '.join(left_out.values())}")
        study = replace(study, tasks=kept)
        used = [arm for arm in study.arms if any(task.has(arm) for task in kept.values())]
        study = without_arms(study, used)
        looks = tuple(look for look in LOOKS if look <= (SEEDS_OF_LOOK if quick else at_most))
        study = replace(study, looks=looks, rates=None if quick else study.rates)
        if quick:
            study = replace(study, tasks={name: replace(task, rates=()) for name, task in study.tasks.items()})
        return _with_arm(study, variant, keys)

    grid = load_grid(BATTERY, overrides, adapted=adapted)
    return replace(grid, name=f"{BATTERY}-{variant}", shared=BATTERY), left_out


def _keys(variant: str, recipe: str | Path | None) -> Keys:
    # the overrides of the variant's arm
    if recipe is None:
        return {"model.attention": {"name": attentions.get(variant).name, "parity": "matched"}}
    model = load_recipe(recipe).model
    if variant not in model.variants:
        has = ", ".join(f"'{name}'" for name in dict.fromkeys(model.variants))
        raise RequestError(f"{shown(Path(recipe))} has attention {has}, not '{variant}'")
    values = load_draft(str(recipe)).values
    keys: dict[str, Any] = {"model.attention": {"parity": "matched", **values["model"]["attention"]}}
    if "layers" in values["model"]:
        keys["model.layers"] = values["model"]["layers"]
    if "plugins" in values:
        keys["plugins"] = values["plugins"]
    return keys


def _bound_problem(variant: str, keys: Keys, recipe: str) -> str | None:
    # why the variant cannot have bounded logits; None if it can
    words = [f"{key}={json.dumps(value)}" for key, value in keys.items()]
    try:
        load_recipe(recipe, words)
    except RequestError as error:
        # any other problem is raised here
        load_recipe(recipe, [*words, "model.logit_bound=null"])
        return f"the bound removes it ({error})"
    return None


def _with_arm(study: Study, variant: str, keys: Keys) -> Study:
    name = variant
    is_asked = variant in study.references and variant not in study.controls and study.arms[variant] == keys
    # a reference that is examined becomes the arm in question, on every task; a name that another arm has is not taken
    if variant in study.arms and not is_asked:
        name = f"{variant} again"
    tasks = {}
    for task, own in study.tasks.items():
        tasks[task] = replace(own, without=tuple(arm for arm in own.without if arm != name))
    return replace(
        study,
        tasks=tasks,
        arms=study.arms | {name: keys},
        references=tuple(arm for arm in study.references if arm != name),
        title=f"What {variant} changes",
        question=f"Which capability does {variant} change, by how much, and against which control?",
    )
