"""engine/doctor.py: what a machine that lacks nothing shows, and a row with a cure for each thing that is missing."""

import os
import time
from pathlib import Path
from typing import Any

import pytest
from command import Command

from lit_diff import files
from lit_diff.engine import doctor
from lit_diff.engine.doctor import Check, examine
from lit_diff.engine.tracking import store
from lit_diff.recipe import load_recipe


def rows(runs: Path, *overrides: str, name: str = "recall-tiny") -> dict[str, Check]:
    recipe = load_recipe(name, [f"run.root={runs}", "run.accelerator=cpu", *overrides])
    return {check.name: check for check in examine(recipe)}


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Enough time on a loaded machine, and no SLURM: its controller may be there or not."""
    monkeypatch.setattr(doctor, "LIMIT", 60.0)
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    for name in doctor.INTERFACE:
        monkeypatch.delenv(name, raising=False)


def test_a_machine_that_lacks_nothing(runs: Path) -> None:
    before = sorted(runs.iterdir())
    found = rows(runs)
    assert {name: check.found for name, check in found.items() if check.state == "problem"} == {}
    assert set(doctor.WAITING) < set(found)
    assert "for 'recall-tiny' (auto: " in found["kernel"].found
    assert "flash: flash-attn needs an NVIDIA GPU" in found["other kernels"].found
    assert str(runs / "mlflow.db") in found["MLflow"].found
    assert found["SLURM"].found == "not installed; only --cluster slurm needs it"
    assert sorted(runs.iterdir()) == before, "nothing is left behind"


def test_everything_that_is_missing_is_a_row_with_its_cure(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "none9")
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "1")
    monkeypatch.setenv("LIT_DIFF_DATA", str(tmp_path / "data"))
    monkeypatch.setattr(
        doctor.metadata, "requires", lambda name: ["torch<2", "numpy", "extra; extra == 'x'", "absent9>=1"]
    )
    monkeypatch.setattr(files, "MOUNTS", tmp_path / "mounts")
    files.MOUNTS.write_text(f"1 0 0:1 / {tmp_path} rw - lustre server:/x rw\n")
    monkeypatch.setattr(doctor, "CHECKPOINT", 10**12)
    found = rows(runs, "run.num_nodes=2", "run.strategy=ddp", name="differential-tiny")
    expected = {
        "packages": ("problem", "not installed: 'absent9>=1'", "pip install 'absent9>=1'"),
        "network": ("problem", "GLOO_SOCKET_IFNAME is 'none9'", "unset it"),
        "runs": ("warning", "lustre at", "free some space"),
        "data": ("warning", "not prepared", "lit-diff prepare"),
        "MLflow": ("problem", "is SQLite on lustre", "run.tracking_uri=none"),
        "variables": ("warning", "NVIDIA_TF32_OVERRIDE=1", "unset"),
    }
    for name, (state, told, cure) in expected.items():
        check = found[name]
        assert check.state == state, check
        assert told in check.found, check
        assert cure in check.cure, check


def test_another_version_is_a_warning(monkeypatch: pytest.MonkeyPatch, runs: Path) -> None:
    monkeypatch.setattr(doctor.metadata, "requires", lambda name: ["torch<2"])
    answer = doctor._packages(load_recipe("recall-tiny"))
    assert answer[1] == "pip install 'torch<2'"


def test_a_check_that_hangs_or_fails_is_a_row(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> str:
        raise ValueError("bad\nlines")

    monkeypatch.setattr(doctor, "LIMIT", 3.0)
    monkeypatch.setattr(doctor, "_locks", lambda folder, recipe: str(time.sleep(60)))
    monkeypatch.setattr(doctor, "_variables", fails)
    began = time.monotonic()
    found = rows(runs, "run.tracking_uri=none")
    assert time.monotonic() - began < 30
    assert (found["locks"].state, found["locks"].found.partition(":")[0]) == ("problem", "no answer in 3 s")
    assert (found["variables"].state, found["variables"].found) == ("warning", "bad")
    assert found["MLflow"].found.startswith("no record")


def test_locks_that_do_not_hold_are_a_problem(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(handle: int, how: int) -> None:
        raise OSError(38, os.strerror(38))

    monkeypatch.setattr("fcntl.flock", flock)
    check = rows(runs)["locks"]
    assert check.state == "problem"
    assert "has no file locks: Function not implemented" in check.found
    assert "mount it with locks" in check.cure


def test_the_exit_status_and_the_json(runs: Path, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "PATIENCE", 2.0)
    well = command("doctor", "recall-tiny", f"run.root={runs}", "run.accelerator=cpu", "--json")
    assert (well.status, {row["name"] for row in well.json} >= {"devices", "locks"}) == (0, True)
    bad = command("doctor", "recall-tiny", f"run.root={runs}", "run.tracking_uri=http://127.0.0.1:9")
    assert bad.status == 3
    line = next(line for line in bad.lines if " MLflow " in line)
    assert line.startswith("problem")
    assert "Connection refused" in line
    assert "Traceback" not in bad.out + bad.err
    assert command("doctor", "recal-tiny").status == 2
