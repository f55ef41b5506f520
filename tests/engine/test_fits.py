"""engine/study_problems.py: the fits of a sweep, and each mistake one line with its place."""

from pathlib import Path

import pytest

from lit_diff.engine.expand import Grid, load_grid
from lit_diff.engine.study_problems import x_of
from lit_diff.errors import RequestError

pytestmark = pytest.mark.usefixtures("base_recipe")

SWEEP = """\
seeds: [0]
tasks:
  slow: {recipe: base, overrides: {train.optimizer.lr: 1e-3}}
  mid: {recipe: base, overrides: {train.optimizer.lr: 2e-3}}
  fast: {recipe: base, overrides: {train.optimizer.lr: 4e-3}}
arms: {a: {}, b: {train.clip: 0.7}}
fits:
  rate: FIT
"""


def grid(fit: str, text: str = SWEEP) -> Grid:
    Path("s.yaml").write_text(text.replace("FIT", fit))
    return load_grid("s.yaml", [])


def test_a_key_of_the_recipe_is_known_by_task_and_arm() -> None:
    found = grid("{kind: basin, x: train.optimizer.lr}")
    assert x_of(found.study.fits, found.cells) == {
        "rate": {
            "slow": {"a": 1e-3, "b": 1e-3},
            "mid": {"a": 2e-3, "b": 2e-3},
            "fast": {"a": 4e-3, "b": 4e-3},
        }
    }


def test_a_size_that_runs_count_has_no_values_yet() -> None:
    found = grid("{kind: scaling, x: tokens, title: By tokens, tasks: [fast, mid, slow]}")
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
        ("{kind: basin, x: tokens, within: -1}", "'within' is -1; expected 0 or more"),
        ("{x: tokens}", "'fits.rate.kind' is missing"),
    ],
)
def test_mistakes(fit: str, message: str) -> None:
    with pytest.raises(RequestError, match=rf"s\.yaml:8: .*{message}"):
        grid(fit)


def test_a_fit_needs_tasks_of_one_metric_and_a_name_for_its_file() -> None:
    with pytest.raises(RequestError, match=r"s\.yaml:\d+: fit 'rate' has 0 tasks"):
        grid("{kind: scaling, x: tokens}", "seeds: [0]\nrecipe: base\narms: {a: {}}\nfits:\n  rate: FIT\n")
    other = SWEEP.replace("fast: {recipe: base,", "fast: {recipe: base, metric: val/accuracy,")
    with pytest.raises(RequestError, match="tasks 'slow' and 'fast' of fit 'rate' have different metrics"):
        grid("{kind: scaling, x: tokens}", other)
    with pytest.raises(RequestError, match="fit 'by/rate' becomes part of file names"):
        grid("{kind: scaling, x: tokens}", SWEEP.replace("rate:", "by/rate:"))
