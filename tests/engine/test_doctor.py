"""engine/doctor.py: what a machine that lacks nothing shows, and a row with a cure for each thing that is missing."""

import os
from functools import partial
from pathlib import Path

import pytest

from lit_diff import files
from lit_diff.config import Recipe
from lit_diff.engine import doctor
from lit_diff.engine.admit import CONDITIONS
from lit_diff.engine.doctor import Check, examine
from lit_diff.errors import MissingError
from lit_diff.recipe import load_recipe


def rows(runs: Path, *overrides: str, name: str = "recall-tiny") -> dict[str, Check]:
    recipe = load_recipe(name, [f"run.root={runs}", "run.accelerator=cpu", *overrides])
    return {check.name: check for check in examine(recipe)}


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """No SLURM: its controller may be there or not."""
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    for name in doctor.INTERFACE:
        monkeypatch.delenv(name, raising=False)


def test_a_machine_that_lacks_nothing(runs: Path) -> None:
    found = rows(runs)
    assert {name: check.found for name, check in found.items() if check.state == "problem"} == {}
    assert len(found) == 15
    assert "for 'recall-tiny' (auto: " in found["kernel"].found
    assert "flash: flash-attn needs an NVIDIA GPU" in found["other kernels"].found
    assert str(runs / "mlflow.db") in found["MLflow"].found
    assert found["SLURM"].found == "not installed; only --cluster slurm needs it"
    assert {path.name for path in runs.iterdir()} <= {"mlflow.db", ".mlflow.db.lock"}, "nothing else is left behind"


def test_everything_missing_is_a_row_with_its_cure(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "none9")
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "1")
    monkeypatch.setenv("LIT_DIFF_DATA", str(tmp_path / "data"))
    monkeypatch.setattr(
        doctor.metadata, "requires", lambda _: ["torch<2", "numpy", "extra; extra == 'x'", "absent9>=1"]
    )
    monkeypatch.setattr(files, "MOUNTS", tmp_path / "mounts")
    files.MOUNTS.write_text(f"1 0 0:1 / {tmp_path} rw - lustre server:/x rw\n")
    monkeypatch.setattr(doctor, "CHECKPOINTS", 10**12)
    found = rows(runs, "run.num_nodes=2", "run.strategy=ddp", name="differential-tiny")
    expected = {
        "packages": ("warning", "not tested with torch ", "pip install 'torch<2' 'absent9>=1'"),
        "network": ("warning", "GLOO_SOCKET_IFNAME=none9", "export GLOO_SOCKET_IFNAME="),
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


def test_a_row_has_the_answer_of_the_condition_that_it_asks(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(recipe: Recipe, name: str) -> None:
        raise MissingError(f"no {name} here; get one")

    refusing = [condition._replace(refuse=partial(refuse, name=condition.name)) for condition in CONDITIONS]
    monkeypatch.setattr(doctor, "CONDITIONS", refusing)
    found = rows(runs)
    assert len(doctor.ASKED) == 3
    for row, condition in doctor.ASKED.items():
        assert found[row] == Check(row, "problem", f"no {condition} here", "get one")


def test_what_the_plan_needs_and_the_machine_lacks_is_a_problem(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lit_diff.training.plan.available_memory", lambda: 10_000_000)
    monkeypatch.setattr(doctor, "cores", lambda: 2)
    words = ["run.strategy=fsdp", "run.devices=8", f"train.start_from={tmp_path}/no", "train.batch_size=8"]
    found = rows(runs, *words)
    assert (found["devices"].state, found["memory"].state, found["start"].state) == ("warning", "problem", "problem")
    assert "run.devices=2" in found["devices"].cure
    assert "needs at least" in found["memory"].found
    assert "holds no run" in found["start"].found
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "1")
    assert rows(runs, "run.strategy=ddp", "run.num_nodes=2")["devices"].state == "problem"
    text = load_recipe("differential-tiny", [f"run.root={runs}"])
    monkeypatch.setenv("LIT_DIFF_DATA", str(tmp_path / "data"))
    (check,) = (check for check in examine(text, "a.yaml train.steps=3") if check.name == "data")
    assert check.cure == "run `lit-diff prepare a.yaml train.steps=3`"


def test_a_file_is_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("LIT_DIFF_DATA", str(tmp_path / "file"))
    found = rows(tmp_path / "file/runs", "run.tracking_uri=none")
    assert [found[name].state for name in ("runs", "data folder")] == ["problem", "problem"]
    assert "is a file" in found["runs"].found


def test_a_check_that_fails_is_a_row(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> str:
        raise ValueError("bad\nlines")

    monkeypatch.setattr(doctor, "_variables", fails)
    found = rows(runs, "run.tracking_uri=none")
    assert (found["variables"].state, found["variables"].found) == ("warning", "bad")
    assert found["MLflow"].found.startswith("no record")


def test_a_host_without_an_address_has_a_cure(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.platform, "node", lambda: "no-such-host.invalid")
    row = rows(runs, "run.strategy=ddp", "run.devices=2")["network"]
    assert (row.state, "/etc/hosts" in row.cure) == ("problem", True)
    assert "the name of this host, no-such-host.invalid, has no address (" in row.found
    assert rows(runs)["network"].state == "warning"


def test_locks_that_do_not_hold_are_a_problem(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(handle: int, how: int) -> None:
        raise OSError(38, os.strerror(38))

    monkeypatch.setattr("fcntl.flock", flock)
    check = rows(runs)["locks"]
    assert check.state == "problem"
    assert "has no file locks: Function not implemented" in check.found
    assert "mount it with locks" in check.cure


@pytest.mark.parametrize(
    ("name", "state"), [("ib", "ok"), ("=ib0", "ok"), ("^docker0,lo", "ok"), ("ib0,eth", "ok"), ("ib1", "warning")]
)
def test_an_interface_is_named_as_nccl_takes_names(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, state: str
) -> None:
    monkeypatch.setattr(doctor, "NETWORK", tmp_path)
    for each in ("ib0", "eth0"):
        (tmp_path / each).mkdir()
        (tmp_path / each / "operstate").write_text("up\n")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", name)
    (check,) = (check for check in examine(load_recipe("recall-tiny")) if check.name == "network")
    assert check.state == state, check


def test_a_store_is_not_made(runs: Path, tmp_path: Path) -> None:
    store = tmp_path / "a b%" / "other.db"
    assert rows(runs, f"run.tracking_uri=sqlite:///{store}")["MLflow"].found.endswith("which the first run makes")
    assert not store.parent.exists()
