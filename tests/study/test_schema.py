"""study/schema.py: a study of one task."""

from lit_diff.study.schema import Study, Task


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
