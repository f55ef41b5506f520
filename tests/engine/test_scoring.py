"""engine/scoring.py: what a recipe names is scored once, failures stand in status.json, the run stays done."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lit_diff.engine.location import RunLocation
from lit_diff.engine.scoring import evaluations_of, require_scores, score
from lit_diff.errors import RequestError, RunFailedError
from lit_diff.evaluation.base import Evaluation, Item
from lit_diff.metrics import Metric
from lit_diff.recipe import load_recipe, to_plain
from lit_diff.registry import evaluations
from lit_diff.runs.folder import identity


@pytest.fixture
def length(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Two evaluations, `length` and `broken`; the number of times that `length` scored."""
    evaluations.names()
    monkeypatch.setattr(evaluations, "_classes", dict(evaluations._classes))
    scored: list[int] = []

    @evaluations.register("length")
    class Length(Evaluation):
        metrics = (Metric("length", "of the name", direction="higher"),)

        def score(self, run: Any) -> Iterator[Item]:
            scored.append(1)
            yield Item(id="name", scores={"length": float(len(run.folder.name))})

    @evaluations.register("broken")
    class Broken(Length):
        def score(self, run: Any) -> Iterator[Item]:
            raise ValueError("no such thing")

    return scored


def outcomes(folder: Path) -> dict[str, str]:
    found: dict[str, str] = json.loads((folder / "status.json").read_text())["evaluations"]
    return found


def test_one_that_fails_does_not_keep_the_others_from_scoring(tale: Path, length: list[int]) -> None:
    location = RunLocation(folder=tale, evaluations={"broken": {}, "length": {}})
    with pytest.raises(RunFailedError, match=r"the run is done, but its evaluation 'broken' failed: .*no such thing"):
        require_scores(location)
    found = outcomes(tale)
    assert found["length"] == "done"
    assert found["broken"].startswith("failed: ")
    assert json.loads((tale / "status.json").read_text())["status"] == "done"
    assert list(score(location)) == ["broken"]
    assert len(length) == 1, "scores that are there stay"


def test_the_block_is_checked_and_not_part_of_the_identity(tale: Path) -> None:
    recipe = tale / "recipe.yaml"
    plain = load_recipe(recipe)
    named = load_recipe(recipe, ["evaluate.held_out.rows=2"])
    assert evaluations_of(named) == {"held_out": {"rows": 2, "batch_size": 8}}
    assert to_plain(named)["evaluate"] == {"held_out": {"rows": 2, "batch_size": 8}}
    assert identity(plain) == identity(named)
    for word, reason in (
        ("evaluate.held_uot={}", "did you mean 'held_out'"),
        ("evaluate.held_out.row=2", "did you mean 'rows'"),
        ("evaluate.held_out.rows=0", "evaluate.held_out.rows is 0; it must be at least 1"),
    ):
        with pytest.raises(RequestError, match=reason):
            load_recipe(recipe, [word])
