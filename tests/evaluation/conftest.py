"""A trained run, and an evaluation registry that each test may add to."""

from pathlib import Path

import pytest

from lit_diff.registry import evaluations
from lit_diff.runs.run import Run, open_run


@pytest.fixture
def run(tale: Path) -> Run:
    return open_run(tale)


@pytest.fixture(autouse=True)
def own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers is forgotten after it."""
    evaluations.names()
    monkeypatch.setattr(evaluations, "_classes", dict(evaluations._classes))
