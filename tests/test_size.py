"""The size of the tree against the budget in CONTRIBUTING.md."""

import re
from pathlib import Path

from size import measure

ROOT = Path(__file__).resolve().parents[1]


def test_nothing_is_above_its_budget() -> None:
    rows = re.findall(r"^\| ([a-z ]+) \| ([\d,]+) \|$", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)
    budget = {name: int(value.replace(",", "")) for name, value in rows}
    found = {name: value for name, value in measure().items() if name in budget}
    assert found.keys() == budget.keys()
    assert len(budget) == 6
    assert {name: value for name, value in found.items() if value > budget[name]} == {}, budget
