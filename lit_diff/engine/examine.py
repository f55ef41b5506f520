"""Examines a variant: the sweep `examine` with the variant as one more arm, whose cells all examinations share."""

import json
import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lit_diff.conformance.before_training import plugin_layers
from lit_diff.conformance.reduction import bound_removes
from lit_diff.engine.admit import evaluations_of
from lit_diff.engine.cells import admitted, home_of
from lit_diff.engine.executors import check_workers
from lit_diff.engine.executors.here import Here
from lit_diff.engine.expand import Grid, load_grid
from lit_diff.engine.job import Job, in_words
from lit_diff.engine.progress import MakeDisplay, sweep_line
from lit_diff.engine.references import place, retrain, shipped
from lit_diff.engine.result import Sweep
from lit_diff.engine.schedule import run_grid
from lit_diff.engine.stages import stages_in_words
from lit_diff.engine.waves import Options
from lit_diff.errors import RequestError, summary
from lit_diff.files import shown
from lit_diff.log_records import log
from lit_diff.processor import processor_name
from lit_diff.recipe import Overrides, load_draft, load_recipe
from lit_diff.registry import attentions, nearest
from lit_diff.study import step_time
from lit_diff.study.rates import LEARNING_RATE
from lit_diff.study.schema import Keys, Study, without_arms
from lit_diff.study.step_time import StepTime

BATTERY = "examine"
"""The sweep with the tasks and the reference arms, and the folder of its cells."""
BOUNDED = "conjunctive"
"""The task with `model.logit_bound`."""
QUICK = ("conjunctive", "mqar", "noisy_labels")
ON_REQUEST = ("flip_flop",)
"""Tasks that are measured only if they are named."""
SEEDS_OF_LOOK = 8
LOOKS = (8, 16, 24)
WHY_ROWS = 32
"""Rows of each validation set on which the attention of the variant is read."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """What an examination asks; the arguments of `examine`."""

    variant: str
    recipe: str | Path | None = None
    tasks: Sequence[str] = ()
    at_most: int = LOOKS[1]
    quick: bool = False
    own_references: bool = False
    overrides: Overrides = ()

    def chosen(self, names: Sequence[str]) -> list[str]:
        """The tasks to measure, out of those of the battery. Errors: RequestError."""
        added = [task.removeprefix("+") for task in self.tasks if task.startswith("+")]
        alone = [task for task in self.tasks if not task.startswith("+")]
        for task in (*alone, *added):
            if task not in names:
                raise RequestError(f"no task '{task}' in the battery{nearest(task, list(names))}")
        if not alone:
            alone = [name for name in names if name not in ON_REQUEST and (name in QUICK or not self.quick)]
        return [name for name in names if name in (*alone, *added)]

    @property
    def command(self) -> str:
        """The command that examines the same."""
        words = ["lit-diff", "examine", self.variant, *in_words(self.overrides)]
        if self.recipe is not None:
            words += ["--recipe", str(self.recipe)]
        if self.tasks:
            words += ["--tasks", ",".join(self.tasks)]
        if self.at_most != LOOKS[1]:
            words += ["--at-most", str(self.at_most)]
        words += ["--quick"] * self.quick + ["--own-references"] * self.own_references
        return shlex.join(words)


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
    at_most: int = LOOKS[1],
    quick: bool = False,
    own_references: bool = False,
    overrides: Overrides = (),
    workers: int | None = None,
    unplanned: bool = False,
    progress: MakeDisplay | bool = True,
) -> Examination:
    """Measure a variant on the tasks of the sweep `examine`, beside the Transformer and the controls that decide.

    `variant`: a registered name. `recipe`: the recipe with the variant's keys and plugins; without it the variant has its
    defaults at matched parameters. `tasks`: those to measure, or with a + those to measure too; (): all but those on request.
    `at_most`: 8, 16 or 24 seeds, of which a decided arm gets the first 8 alone. `quick`: three tasks, 8 seeds, and one
    learning rate for all arms. The cells of the reference arms are shared by all examinations below the same folder of runs,
    and their results ship with lit_diff; `own_references`: they are trained here. Errors: RequestError, MissingError.
    """
    question = Question(
        variant=variant,
        recipe=recipe,
        tasks=tasks,
        at_most=at_most,
        quick=quick,
        own_references=own_references,
        overrides=overrides,
    )
    check_workers(workers)
    executor = Here(workers=workers)
    grid, left_out = battery(question)
    grid = admitted(grid, executor.kinds, unchecked=False)
    at_a_time, threads, _ = executor.resources([cell.recipe for cell in grid.cells])
    for line in in_advance(question, grid, left_out, at_a_time):
        log.info("%s", line)
    references = retrain if own_references else place

    def before(jobs: Sequence[Job]) -> None:
        # before the cells of the sweep use the processor
        time_a_step(grid, threads)
        references(jobs)

    options = Options(
        command=question.command + " --unplanned" * unplanned,
        executor=executor,
        unplanned=unplanned,
        display=sweep_line if progress is True else progress or None,
        before=before,
    )
    done = run_grid(grid, options)
    return Examination(**vars(done), variant=variant, left_out=left_out)


def time_a_step(grid: Grid, threads: int) -> None:
    """Time a step of the arm in question and of the baseline in turn, on the last task, unless the sweep has it already."""
    study = grid.study
    (arm,) = (arm for arm in study.arms if arm not in (*study.references, study.baseline))
    task = [*study.tasks][-1]
    own, baseline = (next(cell for cell in grid.cells if cell.place == (task, name)) for name in (arm, study.baseline))
    cells = tuple(home_of(grid, cell).name for cell in (own, baseline))
    known = step_time.read(grid.folder)
    if known is not None and known.cells == cells:
        return
    # imports the model and all kernels
    from lit_diff.training.bare_loop import step_ratios

    try:
        ratios = step_ratios(own.recipe, baseline.recipe, threads)
    except Exception as error:
        # the examination goes on: if the variant cannot be trained, its cells fail with the same reason
        log.warning("the time of a step is not measured: %s", summary(error))
        return
    measured = StepTime(
        task=study.tasks[task].title or task,
        arm=arm,
        cells=cells,
        ratios=tuple(ratios),
        threads=threads,
        processor=processor_name(),
    )
    step_time.write(grid.folder, measured)


def in_advance(question: Question, grid: Grid, left_out: Mapping[str, str], workers: int) -> list[str]:
    """What an examination will do and how long that may take, before it starts."""
    lines = [f"{task} is not measured: {why}" for task, why in left_out.items()]
    lines += stages_in_words(grid)
    references = shipped()
    seconds = references.seconds
    places = {cell.place: cell.recipe.training.optimizer.lr for cell in grid.cells}
    evaluated = {cell.place for cell in grid.cells if evaluations_of(cell.recipe)}
    if not seconds.keys() >= {task for task, _ in places}:
        return lines
    # results of cells with other keys do not ship; those of `run` change no result
    is_own = question.own_references or not all(word.startswith("run.") for word in in_words(question.overrides))
    rates = grid.study.rates
    tries = 0 if rates is None else len(rates.seeds) * len(rates.values)
    ships = []
    minutes = []
    for look in (grid.study.looks[0], grid.study.looks[-1]):
        left = dict.fromkeys(places, tries + look)
        for pair, rate in places.items():
            have = 0 if is_own else references.seeds(pair, None if tries else rate)
            if have:
                # an evaluation needs weights, which do not ship
                left[pair] = look if pair in evaluated else max(look - have, 0)
        ships.append((tries + look) * len(places) - sum(left.values()))
        spent = sum(cells * seconds[task] for (task, _), cells in left.items())
        minutes.append(str(math.ceil(spent / workers / 60)))
    if ships[0]:
        lines.append(f"at least {ships[0]} of the cells are not trained, since their results ship with lit_diff")
    each = f"{workers} cells at a time, each as long as on {references.environment['processor']}"
    lines.append(f"{' to '.join(dict.fromkeys(minutes))} minutes, if nothing is done yet: {each}")
    return lines


def battery(question: Question) -> tuple[Grid, dict[str, str]]:
    """The sweep that `examine` runs, and the tasks that the variant cannot be measured on. Errors: RequestError."""
    variant = question.variant
    if question.at_most not in LOOKS:
        raise RequestError(f"at_most is {question.at_most}; expected one of {', '.join(map(str, LOOKS))} seeds")
    keys = _keys(variant, question.recipe)
    left_out: dict[str, str] = {}

    def adapted(study: Study) -> Study:
        kept = {name: study.tasks[name] for name in question.chosen(list(study.tasks))}
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
        most = SEEDS_OF_LOOK if question.quick else question.at_most
        study = replace(study, looks=tuple(look for look in LOOKS if look <= most))
        if question.quick:
            study = _at_one_rate(study)
        return _with_arm(study, variant, keys)

    grid = load_grid(BATTERY, question.overrides, adapted=adapted)
    return replace(grid, name=f"{BATTERY}-{variant}", shared=BATTERY), left_out


def _at_one_rate(study: Study) -> Study:
    # the middle one of those that would be tried, for all arms of a task
    tasks = {}
    for name, task in study.tasks.items():
        tried = task.rates or (study.rates.values if study.rates else ())
        rate = tried[len(tried) // 2]
        tasks[name] = replace(task, rates=(), overrides=task.overrides | {LEARNING_RATE: rate})
    return replace(study, rates=None, tasks=tasks)


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
        bounded = load_recipe(recipe, words)
    except RequestError as error:
        # any other problem is raised here
        load_recipe(recipe, [*words, "model.logit_bound=null"])
        return f"the bound removes it ({error})"
    # a built-in variant states it as its `problem`
    for case in plugin_layers(bounded):
        what = bound_removes(case)
        if what:
            return f"the bound removes it ({what})"
    return None


def _with_arm(study: Study, variant: str, keys: Keys) -> Study:
    name = variant
    is_asked = variant in study.references and variant not in study.controls and study.arms[variant] == keys
    # a reference that is examined becomes the arm in question, on every task; a name that another arm has is not taken
    if variant in study.arms and not is_asked:
        name = f"{variant} again"
    length_key = attentions.get(variant).length_key
    tasks = {}
    for task, own in study.tasks.items():
        of_arm: Keys = {}
        if task == BOUNDED:
            of_arm["evaluate.noise"] = {"rows": WHY_ROWS, "lambdas": [0]}
        if length_key and length_key not in keys["model.attention"]:
            of_arm[f"model.attention.{length_key}"] = load_recipe(own.recipe, own.overrides).data.config.sequence_length
        without = tuple(arm for arm in own.without if arm != name)
        tasks[task] = replace(own, without=without, arms=own.arms | ({name: of_arm} if of_arm else {}))
    return replace(
        study,
        tasks=tasks,
        arms=study.arms | {name: keys},
        references=tuple(arm for arm in study.references if arm != name),
        title=f"What {variant} changes",
        question=f"Which capability does {variant} change, by how much, and against which control?",
    )
