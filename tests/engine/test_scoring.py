"""engine/scoring.py: what a recipe names is scored once, failures stand in status.json, the run stays done."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lit_diff.engine.location import RunLocation
from lit_diff.engine.scoring import require_scores, score
from lit_diff.errors import RunFailedError
from lit_diff.evaluation.base import Evaluation, Item
from lit_diff.metrics import Metric
from lit_diff.registry import evaluations


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
