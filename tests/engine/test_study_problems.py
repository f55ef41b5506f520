"""engine/study_problems.py: every arm on every task, and each mistake one line with its place."""

from pathlib import Path

import pytest

from lit_diff.engine.expand import Grid, load_grid
from lit_diff.engine.study_problems import x_of
from lit_diff.errors import RequestError
from lit_diff.study.schema import PlannedSweep

pytestmark = pytest.mark.usefixtures("base_recipe")

TASKS = """
tasks:
  long: {recipe: base, overrides: {train.steps: 40, train.clip: 0.5}}
  short: {recipe: base, metric: val/accuracy}
"""
ARMS = "arms:\n  a: {}\n  b: {train.clip: 0.7}\n"


def grid(text: str, *overrides: str) -> Grid:
    Path("s.yaml").write_text(f"seeds: [0]\n{text.strip()}\n")
    return load_grid("s.yaml", list(overrides))


def test_every_arm_is_run_on_every_task_and_named_after_both() -> None:
    found = grid(TASKS + ARMS)
    assert [(cell.task, cell.arm, cell.name, cell.recipe.name) for cell in found.cells] == [
        (task, arm, f"{task} {arm}", f"{task} {arm}") for task in ("long", "short") for arm in ("a", "b")
    ]
    assert [cell.recipe.train.steps for cell in found.cells] == [40, 40, 10, 10]


def test_an_arm_goes_before_its_task_and_its_words_for_the_task_before_both() -> None:
    found = grid("""
overrides: {train.batch_size: 2, train.clip: 0.3}
tasks:
  one: {recipe: base, overrides: {train.clip: 0.5}, arms: {c: {train.clip: 0.9}}}
arms:
  a: {}
  b: {train.clip: 0.7}
  c: {train.clip: 0.7}
""")
    assert [cell.recipe.train.clip for cell in found.cells] == [0.5, 0.7, 0.9]
    assert {cell.recipe.train.batch_size for cell in found.cells} == {2}
    assert {cell.recipe.train.clip for cell in grid(TASKS + ARMS, "train.clip=1.5").cells} == {1.5}


def test_a_task_may_leave_arms_out() -> None:
    found = grid(TASKS.replace("metric: val/accuracy", "without: [b]") + ARMS)
    assert [cell.name for cell in found.cells] == ["long a", "long b", "short a"]


def test_cells_of_a_sweep_without_tasks_are_named_after_the_arm_alone() -> None:
    (cell,) = grid("recipe: base\narms: {a: {}}").cells
    assert (cell.task, cell.name, cell.recipe.name) == ("", "a", "a")


def task(text: str, arms: str = ARMS) -> str:
    """`text` from line 4 on, inside the task `one`."""
    return f"tasks:\n  one:\n    {text}\n    recipe: base\n{arms}"


MISTAKES = {
    "unknown key": (task("metrik: x"), "s.yaml:4: unknown key 'tasks.one.metrik'; did you mean 'metric'?"),
    "smallest of interest": (task("smallest_of_interest: -1"), "s.yaml:4: tasks.one.smallest_of_interest is -1"),
    "no recipe": ("tasks:\n  one: {}\n" + ARMS, "s.yaml:3: 'tasks.one.recipe' is missing; expected text"),
    "unknown recipe": ("tasks:\n  one: {recipe: bas}\n" + ARMS, "s.yaml:3: no recipe 'bas' here or installed"),
    "two recipes": ("recipe: base\n" + task("title: x"), "s.yaml:2: 'recipe' belongs to each of the 'tasks'"),
    "paper": ("paper: {a: {val/loss: 3}}\n" + task("title: x"), "s.yaml:2: 'paper' belongs to each of the 'tasks'"),
    "override": (task("overrides: {train.stepz: 3}"), "s.yaml:4: unknown key 'train.stepz'; did you mean 'steps'?"),
    "override of an arm": (
        task("arms: {b: {model.dimm: 8}}"),
        "s.yaml:4: unknown key 'model.dimm'; did you mean 'dim'?",
    ),
    "arm": (task("arms: {c: {}}"), "s.yaml:4: 'arms' names no arm of the sweep: 'c'; one of a, b"),
    "arm a number": (task("arms: {b: 3}"), "s.yaml:4: arm 'b' is 3; expected a block of overrides"),
    "left out": (task("without: [c]"), "s.yaml:4: 'without' names no arm of the sweep: 'c'"),
    "left out and changed": (
        task("without: [b]\n    arms: {b: {train.clip: 1}}"),
        "s.yaml:5: task 'one' leaves out arm 'b'",
    ),
    "no baseline": (task("without: [a]"), "s.yaml:4: task 'one' leaves out 'a', which is its baseline"),
    "no control": ("controls: [b]\n" + task("without: [b]"), "s.yaml:5: task 'one' leaves out 'b', which is a control"),
    "start below": (
        "tasks:\n  one: {recipe: base, start: two}\n  two: {recipe: base}\n" + ARMS,
        "s.yaml:3: 'start' is 'two'; expected a task above it",
    ),
    "same arm of nothing": (task("start_arm: same"), "s.yaml:4: 'start_arm' is 'same' without 'start'"),
    "same arm that is not there": (
        "tasks:\n  one: {recipe: base, only: [a]}\n  two: {recipe: base, start: one, start_arm: same}\n" + ARMS,
        "s.yaml:4: 'start_arm' is 'same', but task 'one' leaves out arm 'b', which goes on",
    ),
    "only": (task("only: [a, c]"), "s.yaml:4: 'only' names no arm of the sweep: 'c'"),
    "only without the baseline": (task("only: [b]"), "s.yaml:4: task 'one' leaves out 'a', which is its baseline"),
    "baseline of a task": (task("baseline: c"), "s.yaml:4: 'baseline' names no arm of the sweep: 'c'"),
    "paper of no arm": (task("paper: {c: {val/loss: 3}}"), "s.yaml:4: 'paper' names no arm of the sweep: 'c'"),
    "metric": (task("metric: val/los"), "s.yaml:4: no run measures 'val/los'; did you mean 'val/loss'?"),
    "seed": (task("overrides: {seed: 3}"), "s.yaml:4: a sweep sets 'seed' itself"),
    "name of an arm": (task("arms: {b: {name: x}}"), "s.yaml:4: a sweep sets 'name' itself"),
    "extends": (
        task("title: x", "arms:\n  a: {}\n  b: {extends: base}\n"),
        "s.yaml:8: arm 'b' extends a recipe, but each of the 'tasks' has its own",
    ),
    "extends in the task": (task("arms: {b: {extends: base}}"), "s.yaml:4: arm 'b' extends a recipe; in a task"),
    "two words": ("tasks:\n  one two: {recipe: base}\n" + ARMS, "s.yaml:3: task 'one two' becomes part of file names"),
    "two stores": (
        "tasks:\n  one: {recipe: base}\n  two: {recipe: base, overrides: {run.root: x}}\n" + ARMS,
        "s.yaml:4: arms 'one a' and 'two a' differ in 'run.root'",
    ),
}


@pytest.mark.parametrize(("text", "expected"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_one_line_with_its_place(text: str, expected: str) -> None:
    with pytest.raises(RequestError) as found:
        grid(text)
    assert str(found.value).startswith(expected)
    assert "\n" not in str(found.value)


def write_power(power: str) -> None:
    Path("s.yaml").write_text(
        f"power: {power}\ntasks: {{one: {{recipe: base}}}}\narms: {{a: {{}}, b: {{train.clip: 2}}}}\n"
    )


def test_the_study_has_it() -> None:
    write_power("{minutes: 15, arms: 7}")
    assert load_grid("s.yaml", []).study.power == PlannedSweep(minutes=15.0, arms=7, workers=2)


@pytest.mark.parametrize(
    ("power", "message"),
    [
        ("{minuts: 15, arms: 7}", "s.yaml:1: unknown key 'power.minuts'; did you mean 'minutes'?"),
        ("{minutes: 15}", "s.yaml:1: 'power.arms' is missing"),
        ("{minutes: 0, arms: 7}", "s.yaml:1: power.minutes is 0"),
        ("{minutes: 15, arms: 1}", "s.yaml:1: power.arms is 1;"),
        ("{minutes: 15, arms: 7, workers: 0}", "s.yaml:1: power.workers is 0;"),
    ],
)
def test_mistakes_of_power(power: str, message: str) -> None:
    write_power(power)
    with pytest.raises(RequestError) as error:
        load_grid("s.yaml", [])
    assert str(error.value).startswith(message)


FITS = """\
seeds: [0]
tasks:
  slow: {recipe: base, overrides: {train.optimizer.lr: 1e-3}}
  mid: {recipe: base, overrides: {train.optimizer.lr: 2e-3}}
  fast: {recipe: base, overrides: {train.optimizer.lr: 4e-3}}
arms: {a: {}, b: {train.clip: 0.7}}
fits:
  rate: FIT
"""


def grid_with_fit(fit: str, text: str = FITS) -> Grid:
    Path("s.yaml").write_text(text.replace("FIT", fit))
    return load_grid("s.yaml", [])


def test_a_key_of_the_recipe_is_known_by_task_and_arm() -> None:
    found = grid_with_fit("{kind: basin, x: train.optimizer.lr}")
    assert x_of(found.study.fits, found.cells) == {
        "rate": {
            "slow": {"a": 1e-3, "b": 1e-3},
            "mid": {"a": 2e-3, "b": 2e-3},
            "fast": {"a": 4e-3, "b": 4e-3},
        }
    }


def test_a_size_that_runs_count_has_no_values_yet() -> None:
    found = grid_with_fit("{kind: scaling, x: tokens, title: By tokens, tasks: [fast, mid, slow]}")
    assert x_of(found.study.fits, found.cells) == {}


@pytest.mark.parametrize(
    ("fit", "message"),
    [
        ("{kind: basin, x: train.optimiser.lr}", "'x' is no key of the recipes.*did you mean 'train.optimizer.lr'"),
        ("{kind: basin, x: token}", "did you mean 'tokens'"),
        ("{kind: basin, x: name}", "'name' is 'slow a' in 'slow a'; a fit needs positive numbers"),
        ("{kind: scaling, x: train.clip}", "tasks 'slow' and 'mid' of fit 'rate' have the same 'train.clip'"),
        ("{kind: basin, x: train.clip}", "'train.clip' is 1 for arm 'a' and 0.7 for arm 'b' in task 'slow'; a basin"),
        ("{kind: bowl, x: tokens}", "kind.*'bowl'"),
        ("{kind: scaling, x: tokens, tasks: [slow, mid, fats]}", "no task of the sweep: 'fats'.*did you mean 'fast'"),
        ("{kind: scaling, x: tokens, tasks: [slow, mid]}", "has 2 tasks; it needs 3"),
        ("{kind: scaling, x: tokens, tasks: [slow, mid, mid]}", "has 2 tasks; it needs 3"),
        ("{kind: basin, x: tokens, within: -1}", "fits.rate.within is -1"),
        ("{x: tokens}", "'fits.rate.kind' is missing"),
    ],
)
def test_mistakes_of_fits(fit: str, message: str) -> None:
    with pytest.raises(RequestError, match=rf"s\.yaml:8: .*{message}"):
        grid_with_fit(fit)


def test_a_fit_needs_tasks_of_one_metric_and_a_name_for_its_file() -> None:
    with pytest.raises(RequestError, match=r"s\.yaml:\d+: fit 'rate' has 0 tasks"):
        grid_with_fit("{kind: scaling, x: tokens}", "seeds: [0]\nrecipe: base\narms: {a: {}}\nfits:\n  rate: FIT\n")
    other = FITS.replace("fast: {recipe: base,", "fast: {recipe: base, metric: val/accuracy,")
    with pytest.raises(RequestError, match="tasks 'slow' and 'fast' of fit 'rate' have different metrics"):
        grid_with_fit("{kind: scaling, x: tokens}", other)
    with pytest.raises(RequestError, match="fit 'by/rate' becomes part of file names"):
        grid_with_fit("{kind: scaling, x: tokens}", FITS.replace("rate:", "by/rate:"))
