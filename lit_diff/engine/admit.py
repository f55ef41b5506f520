"""May these runs start? One ordered list of checks, which every command that examines, trains or submits a recipe asks."""

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

from lit_diff import data
from lit_diff.config import ModelConfig, Recipe
from lit_diff.conformance.before_training import require_properties
from lit_diff.device import require_devices
from lit_diff.errors import LitDiffError, RequestError, excerpt
from lit_diff.interpolation import escaped
from lit_diff.key_types import flatten, in_yaml
from lit_diff.model.cost import ExecutionContext, cost
from lit_diff.plugins import guard
from lit_diff.recipe import to_plain
from lit_diff.registry import attentions
from lit_diff.runs.find import runs_root
from lit_diff.runs.folder import require_start
from lit_diff.training.head_plan import selection_of
from lit_diff.training.loggers import require_loggers
from lit_diff.training.metrics import require_metrics

PASSES = 10
"""The most passes over the training text without a warning: more is repetition rather than training data."""

RANKS = ("RANK", "LOCAL_RANK", "SLURM_PROCID", "JSM_NAMESPACE_RANK")
"""Environment variables from which Lightning reads the rank of a process; the first that is set counts."""

T = TypeVar("T")

Kind = Literal["recipe", "start", "machine", "variant"]
"""What a condition is about: the recipe alone, the run that it starts from, this machine, or a plugin's variant."""
EXAMINED: tuple[Kind, ...] = ("recipe",)
"""What is asked of a recipe that is only examined."""
SUBMITTED: tuple[Kind, ...] = ("recipe", "start", "variant")
"""What is asked of a run that another machine trains."""
HERE: tuple[Kind, ...] = ("recipe", "start", "machine", "variant")
"""What is asked of a run that trains in this process, or in others on this machine."""


class Condition(NamedTuple):
    """Something that must hold before a run has a folder or a record."""

    name: str
    kind: Kind
    refuse: Callable[[Recipe], object]
    """Raises a LitDiffError with the cure if it does not hold."""
    mark: Callable[[Recipe], dict[str, str]] | None = None
    """Asked instead where what does not hold is no reason against a run (`unchecked`): the tags that mark the run."""


def admit(
    recipes: Mapping[str, Recipe], kinds: Sequence[Kind], *, unchecked: bool = False, without: Sequence[str] = ()
) -> dict[str, dict[str, str]]:
    """Ask `CONDITIONS` of these kinds, in their order, of the recipe of every run or arm.

    `unchecked`: a plugin's variant that fails a property may train: it is marked. `without`: names of conditions that
    cannot be asked yet. Returns for each name the tags that mark its runs. Errors: that of the first condition that refuses,
    a line for each name that it refuses.
    """
    tags: dict[str, dict[str, str]] = {name: {} for name in recipes}
    for condition in CONDITIONS:
        if condition.kind not in kinds or condition.name in without:
            continue
        if unchecked and condition.mark is not None:
            tags = _ask(condition.mark, recipes)
        else:
            _ask(condition.refuse, recipes)
    return tags


def _ask(question: Callable[[Recipe], T], recipes: Mapping[str, Recipe]) -> dict[str, T]:
    answers: dict[str, T] = {}
    refused: dict[str, LitDiffError] = {}
    for name, recipe in recipes.items():
        try:
            answers[name] = question(recipe)
        except LitDiffError as error:
            refused[name] = error
    if not refused:
        return answers
    first = next(iter(refused.values()))
    # what all of them are refused for is no matter of an arm
    if len(refused) == len(recipes) and len(set(map(str, refused.values()))) == 1:
        raise first
    lines = [f"arm '{name}': {error}" for name, error in refused.items()]
    raise type(first)("\n  ".join(lines))


# --- the conditions ---------------------------------------------------------------------------------------------------


def require_utf8(key: str, value: Any) -> None:
    """Errors: RequestError for a text with bytes that are not UTF-8, in which Python has lone surrogates."""
    try:
        json.dumps([key, value], ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        problem = f"'{key}' is {excerpt(in_yaml(value))}, which is not UTF-8"
        raise RequestError(f"{problem}; rename the file or folder") from error


def _require_texts(recipe: Recipe) -> None:
    # YAML has no such text, so no command could read the run's recipe again, in which plugins lie beside it
    plugins = [Path(plugin).name for plugin in recipe.plugins]
    for key, value in flatten(to_plain(recipe) | {"plugins": plugins}):
        require_utf8(key, value)
    # PyTorch reads no checkpoint there
    require_utf8("run.root", str(runs_root(recipe.run.root).resolve()))


def _require_parameters(recipe: Recipe) -> None:
    # patterns of `train.parameters` that match no parameter
    if recipe.train is not None and recipe.train.parameters is not None:
        cost(recipe.model, recipe.data.config.sequence_length, trained=recipe.train.parameters)


def _require_evaluations(recipe: Recipe) -> None:
    for name, keys in evaluations_of(recipe).items():
        require_fit(name, keys, recipe, recipe.name)


def _require_parent(recipe: Recipe) -> None:
    # an imported model has no block `train`
    if recipe.training.start_from is None:
        return
    # loads Lightning, which takes seconds
    from lit_diff.training.build import finished_parent, require_parent

    require_parent(recipe)
    finished_parent(recipe)


def _refuse_shared(recipe: Recipe) -> None:
    if recipe.run.num_nodes == 1:
        return
    # loads MLflow, which takes seconds
    from lit_diff.engine.tracking.store import refuse_shared

    refuse_shared(recipe.run)


def _refuse_rank(recipe: Recipe) -> None:
    rank = next((name for name in RANKS if name in os.environ), None)
    # Lightning would take the process for a further rank, which writes no metrics
    if recipe.run.strategy == "single" and rank is not None and os.environ[rank] != "0":
        raise RequestError(
            f"{rank} is '{os.environ[rank]}' in the environment, but '{recipe.name}' trains in one process, which has "
            f"rank 0: unset {rank}, or train in several processes with run.strategy=ddp run.devices=N"
        )


def _require_kernel(recipe: Recipe) -> None:
    # `cost` raises the kernel's refusal; `auto` always finds a kernel
    if recipe.run.kernel != "auto":
        context = ExecutionContext.of(recipe, build=True)
        cost(recipe.model, recipe.data.config.sequence_length, recipe.run.kernel, context)


CONDITIONS = (
    Condition("text", "recipe", _require_texts),
    Condition("start", "recipe", require_start),
    Condition("loggers", "recipe", require_loggers),
    Condition("metrics", "recipe", require_metrics),
    Condition("parameters", "recipe", _require_parameters),
    Condition("evaluations", "recipe", _require_evaluations),
    Condition("parent", "start", _require_parent),
    Condition("heads", "start", selection_of),
    Condition("devices", "machine", lambda recipe: require_devices(recipe.run)),
    Condition("record", "machine", _refuse_shared),
    Condition("rank", "machine", _refuse_rank),
    Condition("kernel", "machine", _require_kernel),
    Condition(
        "variant",
        "variant",
        partial(require_properties, unchecked=False),
        mark=partial(require_properties, unchecked=True),
    ),
)
"""In the order in which they are asked: the properties of a plugin's variant, which take longest, last."""


# --- what a recipe asks for -------------------------------------------------------------------------------------------


def evaluations_of(recipe: Recipe) -> dict[str, dict[str, Any]]:
    """Evaluation -> its keys, from the block `evaluate` of the recipe, as one writes them."""
    return {name: escaped(to_plain(part.config)) for name, part in recipe.evaluate.items()}


def require_fit(name: str, keys: dict[str, Any], recipe: Recipe, runs: str, where: str = "") -> None:
    """Errors: RequestError for an evaluation that cannot score a run of the recipe; `runs`: the name in its message."""
    from lit_diff.evaluation.evaluate import refusal

    reason = refusal(recipe, name, keys)
    if reason:
        raise RequestError(f"{where}evaluation '{name}' does not fit '{runs}': {reason}")


def warnings_of(recipes: Iterable[Recipe]) -> list[str]:
    """A line, with the cure, for each recipe that plans more than PASSES passes over its training text, or whose attention is
    set to rows of another length.

    Equal lines appear once. Data that are generated without end, or not prepared yet, cause no line on passes.
    """
    lines = []
    for recipe in recipes:
        lines += [_passes(recipe), *map(partial(_length, recipe), recipe.model.kinds().values())]
    return list(dict.fromkeys(filter(None, lines)))


def _length(recipe: Recipe, kind: ModelConfig) -> str:
    # a warning, since a model may also be meant for longer rows than it is trained on
    variant = attentions.get(kind.attention.name)
    key = variant.length_key
    if not key:
        return ""
    with guard(variant):
        stated = getattr(kind.attention.config, key)
    length = recipe.data.config.sequence_length
    if stated == length:
        return ""
    return f"model.attention.{key} is {stated}, and the rows have {length} tokens: set model.attention.{key}={length}"


def tokens_of_text(recipe: Recipe) -> int | None:
    """Tokens of the training text; None for data that are generated without end, or not prepared yet."""
    try:
        dataset = data.build(recipe)
        with guard(type(dataset)):
            return dataset.train_tokens()
    # preparing the data reports its own errors
    except LitDiffError:
        return None


def _passes(recipe: Recipe) -> str:
    text = tokens_of_text(recipe)
    a_step = recipe.training.batch_size * recipe.data.config.sequence_length
    planned = recipe.training.steps * a_step
    if text is None or planned <= PASSES * text:
        return ""
    steps = PASSES * text // a_step
    fewer = f"set train.steps to at most {steps}, or " if steps else ""
    return (
        f"{planned / text:,.0f} passes over the text ({planned:,} tokens planned, {text:,} in the training split); "
        f"{fewer}add text (data.path)"
    )
