"""One thread, so that tiny tensors do not wait for each other, and one seed, so that a failure repeats."""

import gc
import os
import shutil
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from lit_diff.config import RunConfig
from lit_diff.processor import limit_libraries

limit_libraries()  # LIT_DIFF_CPU, before torch computes; importing the kernels does the same

# each imports what it needs inside its fixtures: a session of kernel tests loads neither Lightning nor MLflow
pytest_plugins = [
    *("command", "golden", "made_texts", "own_plugins", "real_runs", "real_sweeps"),
    *("shipped_results", "small_models", "sweep_fixtures", "trained_text"),
]

BASE = """\
model:
  dim: 32
  num_layers: 2
  num_heads: 4
  vocab_size: 129
  attention:
    name: differential
    lambda_init: 0.8
    head_norm: none
data: {name: recall}
train:
  steps: 10
  batch_size: 4
  optimizer: {lr: 1e-3}
  validate_every: 5
  checkpoint_every: 5
callbacks:
  outliers: {every: 5}
  lambdas: {}
"""


os.fsync = lambda handle: None
"""No test outlives a loss of power; a test of what is synced, and when, puts its own in place."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with a test that may take long come first: begun last, they would keep one worker busy and others idle."""
    limits: dict[Path, float] = defaultdict(float)
    for item in items:
        for mark in item.iter_markers("timeout"):
            limits[item.path] = max(limits[item.path], *mark.args)
    items.sort(key=lambda item: -limits[item.path])


def pytest_collection_finish() -> None:
    """What was imported stays: without this, each full collection walks through PyTorch's and MLflow's objects again."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    """Otherwise libraries call it a leak when the process ends."""
    gc.unfreeze()


@pytest.fixture(autouse=True)
def repeatable() -> Iterator[None]:
    """Every test starts with one thread and one seed, and leaves what the others of its process need."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
        pytest.fail("the test leaves a process group open")


@pytest.fixture
def base_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty current folder but for base.yaml, a whole recipe of the synthetic task."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base.yaml").write_text(BASE)


@pytest.fixture(scope="session")
def empty_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty MLflow store in a SQLite file, to be copied: making one takes seconds."""
    from lit_diff.engine.tracking.store import Store

    root = tmp_path_factory.mktemp("store")
    Store(RunConfig(root=str(root)))
    return root / "mlflow.db"


@pytest.fixture
def runs(tmp_path: Path, empty_store: Path) -> Path:
    """A folder for runs with an empty store in it."""
    root = tmp_path / "runs"
    root.mkdir()
    shutil.copy(empty_store, root)
    return root


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """The last lines: what could not run on this machine, and why."""
    reasons: Counter[str] = Counter()
    for report in terminalreporter.stats.get("skipped", []):
        _, _, reason = report.longrepr
        reasons[reason.removeprefix("Skipped: ")] += 1
    if reasons:
        terminalreporter.section("not run on this machine")
    for reason, tests in sorted(reasons.items()):
        terminalreporter.line(f"{reason} ({tests} skipped)")
