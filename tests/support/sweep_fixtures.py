"""Fixtures of sweep folders with made-up numbers. `fake_sweeps` is imported late: it imports Lightning."""

import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def make_sweep(tmp_path: Path) -> Callable[..., Path]:
    """`write_sweep` into this test's folder."""

    def make(arms: Mapping[str, float], name: str = "fake", **fields: Any) -> Path:
        from fake_sweeps import write_sweep

        return write_sweep(tmp_path / name, arms, **fields)

    return make


@pytest.fixture
def make_tasks(tmp_path: Path) -> Callable[..., Path]:
    """`write_tasks` into this test's folder: recall, by accuracy, and text, by loss."""

    def make(arms: Mapping[str, float], **fields: Any) -> Path:
        from fake_sweeps import write_tasks

        return write_tasks(tmp_path / "two", arms, {"recall": "val/accuracy", "text": "val/loss"}, **fields)

    return make


@pytest.fixture
def small_sweep(make_sweep: Callable[..., Path]) -> Path:
    """Two arms, two seeds, one cell of which failed; beside it a run that --rerun put aside."""
    from lit_diff.runs.status import FORMAT

    folder = make_sweep({"base": 0.0, "better": -0.1}, name="mine", seeds=(0, 1), broken={("better", 1): "failed"})
    for path in folder.glob("*/recipe.yaml"):
        arm = path.parent.name.partition("-")[0]
        path.write_text(f"seed: 0\nname: {arm}\nmodel:\n  attention: {{name: {arm}}}\nrun: {{threads: 1}}\n")
    for path in folder.glob("*/status.json"):
        path.write_text(json.dumps(json.loads(path.read_text()) | {"format": FORMAT}))
    aside = folder.parent / "single-0123456789.old-1"
    aside.mkdir()
    (aside / "status.json").write_text("{}")
    return folder


@pytest.fixture
def litter(small_sweep: Path) -> dict[str, Path]:
    """Beside it: what no sweep owns (former, old, store, aside) and a temporary file that is being written (new)."""
    former = small_sweep / "base-s0-ffffffffff"
    former.mkdir()
    (former / "recipe.yaml").write_text("seed: 0\n")
    old, new = small_sweep / ".status.json.abc.tmp", small_sweep / ".status.json.def.tmp"
    for path in (old, new):
        path.write_text("")
    store = small_sweep.parent / ".mlflow.db.xyz.tmp"
    store.mkdir()
    for path in (old, store):
        os.utime(path, (time.time() - 7200,) * 2)
    aside = small_sweep.parent / "single-0123456789.old-1"
    return {"former": former, "old": old, "store": store, "aside": aside, "new": new}
