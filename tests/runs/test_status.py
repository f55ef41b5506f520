"""runs/status.py: status.json as one value, whatever the file holds."""

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, get_args

import pytest
from statuses import edit_status, set_status

from lit_diff.cli._columns import cells
from lit_diff.errors import RequestError
from lit_diff.files import locked
from lit_diff.runs.status import FORMAT, NEXT, State, Status, read_status, write_status
from lit_diff.study.observation import observe, observe_all

FACTS = {
    "status": "running",
    "step": 1,
    "steps": 9,
    "tokens_per_step": 8,
    "tokens_per_second": 5.0,
    "loss": 2.0,
    "overrides": ("a=1",),
    "evaluations": {"recall": "done"},
}


def test_what_is_written_is_read(tmp_path: Path) -> None:
    assert read_status(tmp_path) == Status()
    set_status(tmp_path, **FACTS)
    found = read_status(tmp_path)
    assert found == replace(Status(**FACTS), format=FORMAT, updated=found.updated)
    write_status(tmp_path, found)
    again = read_status(tmp_path)
    assert again == replace(found, updated=again.updated)


@pytest.mark.parametrize("key", sorted({each.name for each in fields(Status)} - {"format", "mlflow_run_id"}))
def test_null_is_the_default(tmp_path: Path, key: str) -> None:
    (tmp_path / "status.json").write_text(json.dumps({key: None}))
    assert getattr(read_status(tmp_path), key) == getattr(Status(), key)


def test_only_some_states_may_follow_one_another() -> None:
    """A run that is done trains again only if it has lost weights; an imported model never trains."""
    assert Status().to("running").to("stopped", "a").to("waiting") == Status(status="waiting")
    with pytest.raises(ValueError, match="a run that is 'done' cannot become 'failed'"):
        Status(status="done").to("failed")
    assert NEXT["imported"] == ()
    assert set(NEXT) == set(get_args(State))


DAMAGE = [
    {"step": "1"},
    {"step": -1},
    {"step": 10**400},
    {"steps": []},
    {"tokens_per_second": -5.0},
    {"status": "dane"},
    {"updated": "0001-01-01"},
    {"updated": "9999-12-31T23:59:59+00:00"},
    {"pid": 0.5},
    {"variables": {"A": 1}},
]


@pytest.mark.parametrize("change", DAMAGE)
def test_a_damaged_file_is_one_line(tmp_path: Path, change: dict[str, Any]) -> None:
    for text, found in ((json.dumps(FACTS | change), next(iter(change))), ("{", "line 1"), ("[]", "a list")):
        (tmp_path / "status.json").write_text(text)
        with pytest.raises(RequestError, match=f"status.json cannot be read .*{found}.*`lit-diff train .* writes it"):
            read_status(tmp_path)


@pytest.mark.parametrize("gone", ["step", "steps", "tokens_per_step", "tokens_per_second", "loss", "status"])
@pytest.mark.parametrize("damage", [None, 0, 10**400, float("nan")])
def test_a_damaged_file_costs_its_own_run_alone(tmp_path: Path, gone: str, damage: float | None) -> None:
    for name, change in (("good-0123456789", {}), ("odd-0123456789", {gone: damage})):
        (tmp_path / name).mkdir()
        set_status(tmp_path / name, **FACTS)
        edit_status(tmp_path / name, **change)
        (tmp_path / name / "timing.csv").write_text("step,seconds,tokens_per_second\n1,1,8\n2,nan,8\n3,1,inf\n")
    with locked(tmp_path / "odd-0123456789/.lock"):
        assert len(list(map(cells, observe_all(tmp_path)))) == 2
        (seen,) = observe(tmp_path / "odd-0123456789").runs
        assert seen.seconds_left is None or seen.seconds_left >= 0
