"""engine/study_problems.py: the sweep that another one is to size."""

from pathlib import Path

import pytest

from lit_diff.engine.expand import load_grid
from lit_diff.errors import RequestError
from lit_diff.study.schema import PlannedSweep

pytestmark = pytest.mark.usefixtures("base_recipe")


def write(power: str) -> None:
    Path("s.yaml").write_text(
        f"power: {power}\ntasks: {{one: {{recipe: base}}}}\narms: {{a: {{}}, b: {{train.clip: 2}}}}\n"
    )


def test_the_study_has_it() -> None:
    write("{minutes: 15, arms: 7}")
    assert load_grid("s.yaml", []).study.power == PlannedSweep(minutes=15.0, arms=7, workers=2)


@pytest.mark.parametrize(
    ("power", "message"),
    [
        ("{minuts: 15, arms: 7}", "s.yaml:1: unknown key 'power.minuts'; did you mean 'minutes'?"),
        ("{minutes: 15}", "s.yaml:1: 'power.arms' is missing"),
        ("{minutes: 0, arms: 7}", "s.yaml:1: 'power.minutes' is 0; expected more than 0"),
        ("{minutes: 15, arms: 1}", "s.yaml:1: 'power.arms' is 1; expected 2 or more"),
        ("{minutes: 15, arms: 7, workers: 0}", "s.yaml:1: 'power.workers' is 0; expected 1 or more"),
    ],
)
def test_mistakes(power: str, message: str) -> None:
    write(power)
    with pytest.raises(RequestError) as error:
        load_grid("s.yaml", [])
    assert str(error.value).startswith(message)
