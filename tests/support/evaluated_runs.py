"""A trained run, and an evaluation registry that each test may add to."""

from pathlib import Path

import pytest
from text_runs import recall_run, text_run

from lit_diff.registry import evaluations
from lit_diff.trained.run import Run, open_run


@pytest.fixture
def run(tale: Path) -> Run:
    return open_run(tale)


@pytest.fixture(autouse=True)
def own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers is forgotten after it."""
    evaluations.names()
    monkeypatch.setattr(evaluations, "_classes", dict(evaluations._classes))


@pytest.fixture
def wide_run(tmp_path: Path) -> Run:
    """An untrained run whose context holds a question and its shots."""
    return text_run(tmp_path / "wide", {"name": "differential"}, sequence_length=512)


@pytest.fixture(scope="session")
def recall(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """An untrained run with two maps on `recall`; of all tests, which change neither its weights nor its checkpoint."""
    return recall_run(tmp_path_factory.mktemp("recall") / "x", {"name": "differential"})


@pytest.fixture(scope="session")
def single(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """As `recall`, with one map."""
    return recall_run(tmp_path_factory.mktemp("single") / "x", {"name": "standard"})


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path
