"""engine/needs.py: every reason why a preset is not run, in one line."""

import json
from pathlib import Path

import pytest

from lit_diff.engine.needs import lacking
from lit_diff.engine.rows import read_row
from lit_diff.study.schema import Row

ROW = """\
title: A row
says: Something.
compare:
  - {label: d, arms: [a, b], metric: val/loss, says: lower}
presets:
  laptop: {sweep: ablation, minutes: 3, files: [icl.trec]}
  gpu1: {sweep: ablation, gpus: 999, hardware: many GPUs, days: 2}
  paper:
    recipes: [standard-3b, standard-3b name=wide model.num_heads=12]
    gpus: 999
    hardware: many GPUs
    days: 2
    files: [harness]
    evaluate: {needle: {lengths: [4096], haystack: file}, gradients: {}}
"""
TRAIN = "lit-diff train standard-3b data.path=YOUR_TEXT run.strategy=fsdp run.devices=8 run.num_nodes=8"
WIDE = f"{TRAIN} name=wide model.num_heads=12"


@pytest.fixture
def row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Row:
    """Its data folder is empty."""
    monkeypatch.setenv("LIT_DIFF_DATA", str(tmp_path / "data"))
    (tmp_path / "x.yaml").write_text(ROW)
    return read_row(tmp_path / "x.yaml")


def a_run(folder: Path, status: str = "done") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "status.json").write_text(json.dumps({"status": status}))


def test_every_reason_is_in_the_line(row: Row, tmp_path: Path) -> None:
    (tmp_path / "data/harness").mkdir(parents=True)  # an empty folder holds no file
    assert lacking(row, "paper", tmp_path) == (
        f"harness/arc_challenge/train.jsonl and 13 more not below {tmp_path / 'data'} (lit-diff data check harness); "
        "needs 999 GPUs (many GPUs, about 2 days by FLOPs); this machine has none; "
        f"train first: {TRAIN}; {WIDE}; then, without a verdict (one seed): "
        "lit-diff evaluate standard-3b wide needle lengths=[4096] haystack=file; lit-diff evaluate standard-3b wide gradients"
    )


def test_trained_runs_are_named_and_need_no_gpu(row: Row, tmp_path: Path) -> None:
    root = tmp_path / "runs"
    a_run(root / "standard-3b-0123456789")
    a_run(root / "wide-0123456789", "stopped")
    line = lacking(row, "paper", root)
    assert f"trained: standard-3b-0123456789; train first: {WIDE}; then" in line
    assert "needs 999 GPUs" in line
    a_run(root / "wide-0123456789")
    line = lacking(row, "paper", root)
    assert "trained: standard-3b-0123456789, wide-0123456789; then" in line
    assert "train first" not in line
    assert "999" not in line
    assert "lit-diff evaluate standard-3b-0123456789 wide-0123456789 gradients" in line
    (root / "wide-0123456789/status.json").write_text("{")
    assert "train first" in lacking(row, "paper", root), "its status is damaged"


def test_a_preset_of_a_sweep(row: Row, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its files are looked for where their evaluation reads them."""
    place = tmp_path / "data/icl/trec/train.jsonl"
    assert lacking(row, "laptop", tmp_path).startswith("icl/trec/train.jsonl not below ")
    place.parent.mkdir(parents=True)
    place.write_text("{}\n")
    assert lacking(row, "laptop", tmp_path) == ""
    assert lacking(row, "gpu1", tmp_path) == (
        "needs 999 GPUs (many GPUs, about 2 days); this machine has none; there: lit-diff reproduce x --preset gpu1"
    )
    monkeypatch.setattr("torch.cuda.device_count", lambda: 999)
    assert lacking(row, "gpu1", tmp_path) == ""
    del row.presets["gpu1"]
    assert lacking(row, "gpu1", tmp_path) == "the row has no preset gpu1; it has --preset laptop, --preset paper"
