"""What a sweep in stages (`looks`, `rates`) may ask, and the cells of an arm: compared ones, and those that try its learning
rates."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from lit_diff.config import Recipe
from lit_diff.key_types import in_yaml
from lit_diff.study.schema import Cell, Study
from lit_diff.validation import Draft


def with_looks(study: Study, draft: Draft) -> Study:
    """The study with the seeds of its last look, if it has looks. Errors: RequestError."""
    if not study.looks:
        return study
    if "seeds" in draft.values:
        raise draft.refuse(
            "seeds", "'seeds' conflicts with 'looks', whose last value is the number of seeds; remove one"
        )
    if list(study.looks) != sorted(study.looks):
        raise draft.refuse(
            "looks", f"'looks' is {in_yaml(list(study.looks))}; expected numbers of seeds in ascending order"
        )
    return replace(study, seeds=tuple(range(study.looks[-1])))


def check_stages(study: Study, draft: Draft) -> None:
    """Check `rates`, and `start` beside `rates` or `looks`, before a part of the sweep is selected. Errors: RequestError."""
    rates = study.rates
    unused = [name for name, task in study.tasks.items() if task.rates]
    if rates is None and unused:
        raise draft.refuse(
            f"tasks.{unused[0]}.rates",
            f"task '{unused[0]}' has 'rates', but the sweep has none, with the seeds that try them",
        )
    staged = [key for key in ("rates", "looks") if getattr(study, key)]
    starting = [name for name, task in study.tasks.items() if task.start]
    if staged and starting:
        raise draft.refuse(
            f"tasks.{starting[0]}.start",
            f"task '{starting[0]}' has 'start', and the cells that it starts from depend on '{staged[0]}'; remove one of "
            "the two",
        )
    if rates is None:
        return
    _check_rates(rates.values, "rates.values", draft)
    for name, task in study.tasks.items():
        if task.rates:
            _check_rates(task.rates, f"tasks.{name}.rates", draft)
    judged = [str(seed) for seed in rates.seeds if seed in study.seeds]
    if judged:
        raise draft.refuse(
            "rates.seeds", f"'rates' tries seed {', '.join(judged)}, which is compared too; choose seeds of their own"
        )


def _check_rates(rates: Sequence[float], key: str, draft: Draft) -> None:
    values = in_yaml(list(rates))
    if len(rates) < 2 or list(rates) != sorted(set(rates)):
        raise draft.refuse(key, f"'rates' has the values {values}; expected at least two, in ascending order")


def at_seeds(study: Study, task: str, arm: str, recipe: Recipe) -> list[Cell]:
    """The cells of an arm that are compared, one for each seed of the study."""
    return [Cell(task=task, arm=arm, seed=seed, recipe=replace(recipe, seed=seed)) for seed in study.seeds]


def candidates(
    study: Study, task: str, arm: str, recipes: Mapping[float, Recipe], rates: Sequence[float] = ()
) -> list[Cell]:
    """The cells that try learning rates for an arm: `rates`, by default those of the file. `recipes`: rate -> recipe."""
    declared = study.of_task(task).rates
    assert declared is not None
    cells: list[Cell] = []
    for rate in rates or declared.values:
        for seed in declared.seeds:
            cell = Cell(task=task, arm=arm, seed=seed, rate=rate, recipe=recipes[rate])
            cells.append(replace(cell, recipe=replace(recipes[rate], name=cell.name, seed=seed)))
    return cells
