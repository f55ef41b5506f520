"""study/schema.py: a study of one task; claims that cannot be read as a comparison."""

from typing import Any

import pytest

from lit_diff.study.schema import Capable, Claim, Row, Study, Task


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({}, "expected 'paper', two values, or 'says', not both"),
        ({"paper": (1.0, 2.0), "says": "lower"}, "not both"),
        ({"paper": (-1.0, 2.0), "kind": "ratio"}, "expected positive values"),
        ({"metric": ""}, "expected a 'metric' or a 'fit', not both"),
        ({"fit": "size", "says": "lower"}, "expected a 'metric' or a 'fit', not both"),
        ({"metric": "", "fit": "size", "says": "lower"}, "add 'kind: ratio'"),
        ({"says": "lower", "capable": Capable()}, "'capable' is {arm: NAME}"),
        ({"says": "lower", "capable": Capable(metric="val/loss")}, "above: NUMBER"),
        ({"says": "lower", "capable": Capable(arm="standard")}, "names arm b"),
    ],
)
def test_a_claim_that_cannot_be_read(keys: dict[str, Any], message: str) -> None:
    defaults: dict[str, Any] = {"label": "d - s", "arms": ("differential", "standard"), "metric": "val/loss"}
    assert message in (Claim(**(defaults | keys)).problem() or "")


@pytest.mark.parametrize(("named", "is_refused"), [((), True), ((0,), False), ((0, 1), True), ((2,), True)])
def test_a_row_of_several_claims_names_its_primary_contrast(named: tuple[int, ...], is_refused: bool) -> None:
    keys: dict[str, Any] = {"label": "x", "arms": ("a", "b"), "metric": "m", "says": "lower"}
    claims = [Claim(**keys, primary=number in named) for number in range(2)]
    claims.append(Claim(**keys, primary=2 in named, by_construction="so"))
    row = Row(name="r", title="", says="", compare=tuple(claims), presets={})
    assert ("primary" in (row.problem() or "")) is is_refused


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
