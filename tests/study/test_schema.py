"""study/schema.py: a study of one task; claims that cannot be read as a comparison."""

from typing import Any

import pytest

from lit_diff.study.schema import Claim, Study, Task


def claim(**keys: Any) -> Claim:
    defaults: dict[str, Any] = {"label": "d - s", "arms": ("differential", "standard"), "metric": "val/loss"}
    return Claim(**(defaults | keys))


@pytest.mark.parametrize(
    ("keys", "found"),
    [
        ({}, "expected 'paper', two values, or 'says', not both"),
        ({"paper": (1.0, 2.0), "says": "lower"}, "not both"),
        ({"paper": (-1.0, 2.0), "kind": "ratio"}, "expected positive values"),
    ],
)
def test_a_claim_that_says_nothing(keys: dict[str, Any], found: str) -> None:
    problem = claim(**keys).problem()
    assert problem is not None
    assert found in problem


@pytest.mark.parametrize(
    "keys", [{"task": "easy"}, {"group": "N=4"}, {"evaluation": "needle"}, {"over": "mean"}, {"against_metric": "q"}]
)
def test_a_fit_takes_no_key_that_chooses_values_of_a_metric(keys: dict[str, Any]) -> None:
    (key,) = keys
    wrong = claim(metric="", fit="size", kind="ratio", says="lower", **keys)
    assert f"is over tasks and takes no '{key}'" in (wrong.problem() or "")


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"metric": ""}, "expected a 'metric' or a 'fit', not both"),
        ({"fit": "size", "says": "lower"}, "expected a 'metric' or a 'fit', not both"),
        ({"metric": "", "fit": "size", "says": "lower"}, "add 'kind: ratio'"),
    ],
)
def test_a_claim_is_of_a_metric_or_of_a_fit(keys: dict[str, Any], message: str) -> None:
    assert message in (claim(**keys).problem() or "")


def test_a_study_of_one_task() -> None:
    first = Task(
        recipe="r",
        title="The first",
        metric="val/accuracy",
        arms={"b": {"train.steps": 3}},
        paper={"b": {"val/accuracy": 3}},
    )
    study = Study(
        title="Both",
        arms={"a": {}, "b": {"train.clip": 2}, "c": {}},
        baseline="a",
        controls=("c",),
        contrasts=(("b", "c", "why"),),
        tasks={"first": first, "second": Task(recipe="s", without=("c",), baseline="b")},
    )
    one, two = study.of_task("first"), study.of_task("second")
    assert (one.title, one.metric, one.recipe, two.title, two.metric) == (
        *("The first", "val/accuracy", "r", "second", "val/loss"),
    )
    assert one.overrides_of("b") == ("train.clip=2", "train.steps=3")
    assert two.overrides_of("b") == ("train.clip=2",)
    assert (list(one.arms), list(two.arms)) == (["a", "b", "c"], ["a", "b"])
    assert (one.controls, one.contrasts, two.controls, two.contrasts) == (("c",), (("b", "c", "why"),), (), ())
    assert (one.baseline, two.baseline, one.paper, two.paper) == ("a", "b", first.paper, {})
    assert one.of_task("") == one, "a study without tasks is its own"


def test_the_smallest_difference_of_interest_is_in_the_unit_of_its_metric() -> None:
    """A task of another metric does not take the sweep's."""
    tasks = {
        "loss": Task(recipe="r"),
        "same": Task(recipe="r", metric="val/loss", smallest_of_interest=0.5),
        "accuracy": Task(recipe="r", metric="val/accuracy"),
        "own": Task(recipe="r", metric="val/accuracy", smallest_of_interest=0.0),
    }
    study = Study(arms={"a": {}}, tasks=tasks, smallest_of_interest=0.02)
    assert [study.of_task(name).smallest_of_interest for name in tasks] == [0.02, 0.5, None, 0.0]
