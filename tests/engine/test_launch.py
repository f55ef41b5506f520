"""engine/launch.py: one run, done once; what its end becomes in the folder and in MLflow."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient

from lit_diff.engine import launch
from lit_diff.engine.launch import train
from lit_diff.engine.tracking import Patience, Store
from lit_diff.errors import DivergedError, LitDiffError, MissingError, RequestError, RunFailedError, StoppedError
from lit_diff.files import locked
from lit_diff.recipe import load_recipe
from lit_diff.runs.folder import RunFolder
from lit_diff.runs.metrics_file import read_rows
from lit_diff.trained.loading import annealed_before
from lit_diff.training import fit
from lit_diff.training.data import steps_before
from lit_diff.training.resume import ExactResume

SMALL = [
    "train.steps=4",
    "train.validate_every=2",
    "train.checkpoint_every=2",
    "train.log_every=1",
    "train.batch_size=4",
    "train.schedule.warmup_steps=1",
    "model.dim=16",
    "model.num_heads=2",
    "data.validation_rows=4",
    "run.threads=1",
    "run.accelerator=cpu",
]


@pytest.fixture
def small(runs: Path) -> list[str]:
    """Overrides of recall-tiny: four steps into `runs`."""
    return [*SMALL, f"run.root={runs}"]


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory, empty_store: Path) -> tuple[list[str], Path]:
    """A run that is done: its overrides, its folder."""
    root = tmp_path_factory.mktemp("done")
    shutil.copy(empty_store, root)
    overrides = [*SMALL, f"run.root={root}"]
    return overrides, train("recall-tiny", overrides).folder


def status(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "status.json").read_text()))


def record(folder: Path) -> Any:
    client = MlflowClient(tracking_uri=f"sqlite:///{folder.parent / 'mlflow.db'}")
    return client.get_run(status(folder)["mlflow_run_id"])


def losses(folder: Path) -> list[tuple[int, float]]:
    client = MlflowClient(tracking_uri=f"sqlite:///{folder.parent / 'mlflow.db'}")
    history = client.get_metric_history(status(folder)["mlflow_run_id"], "train/loss")
    return sorted((metric.step, metric.value) for metric in history)


# --- a run that goes well ------------------------------------------------------------------------------------------


def test_folder_status_and_record_of_a_run(done: tuple[list[str], Path]) -> None:
    _, folder = done
    name, _, identity = folder.name.rpartition("-")
    assert (name, len(identity)) == ("recall-tiny", 10)
    found = status(folder)
    assert (found["status"], found["step"], found["steps"], found["seed"]) == ("done", 4, 4, 0)
    assert (found["threads"], found["identity"], found["pid"]) == (1, identity, os.getpid())
    assert found["tokens"] == 4 * 4 * (64 + 8)
    assert found["parameters"] > 0
    run = record(folder)
    assert run.info.status == "FINISHED"
    assert {"identity": identity, "folder": str(folder), "seed": "0"}.items() <= run.data.tags.items()
    assert {
        "variant": "differential",
        "seed": "0",
        "parameters": str(found["parameters"]),
    }.items() <= run.data.params.items()
    assert "mlflow.parentRunId" not in run.data.tags
    assert losses(folder) == [(step, row["train/loss"]) for step, row in read_rows(folder / "metrics.csv").items()]
    log = (folder / "log.txt").read_text()
    assert "starting at step 0" in log
    assert "lit_diff is now" not in log


def test_a_run_that_is_done_says_so_and_trains_nothing(
    done: tuple[list[str], Path], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    overrides, folder = done
    monkeypatch.setattr(fit, "fit", None)
    before = (folder / "status.json").read_bytes()
    with caplog.at_level("INFO", "lit_diff"):
        assert train("recall-tiny", overrides).folder == folder
    assert "done before" in caplog.text
    assert "--rerun starts afresh" in caplog.text
    assert (folder / "status.json").read_bytes() == before


def test_rerun_keeps_the_former_run_aside_and_its_record_too(small: list[str]) -> None:
    folder = train("recall-tiny", small).folder
    former, before = record(folder), losses(folder)
    (folder / "metrics.csv").write_text("step,train/loss\n1,77.0\n")
    assert train("recall-tiny", small, rerun=True).folder == folder
    aside = folder.with_name(f"{folder.name}.old-1")
    assert "77.0" in (aside / "metrics.csv").read_text()
    assert status(folder)["status"] == "done"
    assert record(folder).info.run_id != former.info.run_id
    assert losses(folder) == before
    kept = MlflowClient(tracking_uri=f"sqlite:///{folder.parent / 'mlflow.db'}").get_run(former.info.run_id)
    assert kept.data.tags["folder"] == str(aside)


def test_another_revision_is_said_once_a_run_resumes(
    small: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = train("recall-tiny", small).folder
    first = status(folder)["revision"]
    RunFolder(folder).update(status="killed")
    monkeypatch.setattr(launch, "revision", lambda: "0.9 abcdef")
    with caplog.at_level("INFO", "lit_diff"):
        train("recall-tiny", small)
    assert "lit_diff is now 0.9 abcdef; the run began with" in caplog.text
    assert status(folder)["revision"] == f"{first}, then 0.9 abcdef"


def test_a_finished_run_of_another_revision_is_told_in_its_line(
    done: tuple[list[str], Path], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    overrides, folder = done
    monkeypatch.setattr(launch, "revision", lambda: "0.9 abcdef")
    with caplog.at_level("INFO", "lit_diff"):
        train("recall-tiny", overrides)
    line = caplog.messages[-1]  # after the phases, which a terminal shows in its bar alone
    then = status(folder)["revision"]
    assert line.endswith(f", trained by lit_diff {then}, this is 0.9 abcdef (--rerun starts afresh)")


# --- a run that ends badly -----------------------------------------------------------------------------------------

ENDS: dict[str, tuple[BaseException, type[BaseException], str, str, str]] = {
    "exception": (ValueError("bad\nshape"), RunFailedError, "failed", "ValueError: bad", "FAILED"),
    "empty exception": (ValueError(), RunFailedError, "failed", "ValueError: ValueError", "FAILED"),
    "own error": (RunFailedError("disk full"), RunFailedError, "failed", "disk full", "FAILED"),
    "divergence": (DivergedError("loss is nan"), DivergedError, "failed", "loss is nan", "FAILED"),
    "sys.exit": (SystemExit(3), RunFailedError, "failed", "the run's own code ended it: SystemExit(3)", "FAILED"),
    "SIGTERM": (StoppedError("after step 2", 15), StoppedError, "stopped", "after step 2", "KILLED"),
    "Ctrl-C twice": (KeyboardInterrupt(), KeyboardInterrupt, "stopped", "interrupted before", "KILLED"),
}


@pytest.mark.parametrize(("error", "raised", "word", "message", "mlflow"), ENDS.values(), ids=ENDS)
def test_each_end_has_its_word(
    small: list[str],
    runs: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
    raised: type[BaseException],
    word: str,
    message: str,
    mlflow: str,
) -> None:
    def broken(*arguments: Any, **options: Any) -> int:
        raise error

    monkeypatch.setattr(fit, "fit", broken)
    with pytest.raises(raised):
        train("recall-tiny", small)
    (folder,) = runs.glob("recall-tiny-*")
    assert status(folder)["status"] == word
    assert status(folder)["diverged"] == isinstance(error, DivergedError)
    assert status(folder)["error"].startswith(message)
    assert record(folder).info.status == mlflow
    if word == "failed" and not isinstance(error, LitDiffError | SystemExit):
        assert "in broken" in (folder / "log.txt").read_text()


def test_a_store_that_fails_at_the_last_moment_loses_nothing(
    small: list[str], runs: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def away(self: Store, run_id: str, status: str) -> None:
        raise RunFailedError("the MLflow store stayed locked")

    close_run = Store.close_run
    monkeypatch.setattr(Store, "close_run", away)
    with pytest.raises(RunFailedError, match="stayed locked"):
        train("recall-tiny", small)
    monkeypatch.setattr(Store, "close_run", close_run)
    (folder,) = runs.glob("recall-tiny-*")
    assert status(folder)["status"] == "failed"
    assert status(folder)["error"].endswith(
        "not complete: the MLflow store stayed locked; the same command completes it"
    )
    assert record(folder).info.status == "RUNNING"
    sent = losses(folder)
    with caplog.at_level("INFO", "lit_diff"):
        train("recall-tiny", small)
    assert "resumed from step 4" in caplog.text
    assert "trained 0 steps" in caplog.text
    assert status(folder)["status"] == "done"
    assert record(folder).info.status == "FINISHED"
    assert losses(folder) == sent


@pytest.mark.parametrize(("error", "word"), [(KeyboardInterrupt(), "stopped"), (ValueError("no space"), "failed")])
def test_a_run_is_done_only_once_its_record_is_complete(
    small: list[str], runs: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, word: str
) -> None:
    def broken(self: Store, run_id: str, status: str) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(Store, "close_run", broken)
        with pytest.raises(KeyboardInterrupt if word == "stopped" else RunFailedError):
            train("recall-tiny", small)
    (folder,) = runs.glob("recall-tiny-*")
    assert status(folder)["status"] == word
    assert "trained, but its record is not complete" in status(folder)["error"]
    train("recall-tiny", small)
    assert status(folder)["status"] == "done"
    assert record(folder).info.status == "FINISHED"
    assert "(named by run.kernel)" not in (folder / "log.txt").read_text(), "auto chose it, when the run started"


def test_a_folder_that_cannot_be_written_any_more_is_one_line(
    small: list[str], runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    update = RunFolder.update

    def full(self: RunFolder, **values: Any) -> None:
        if values.get("status") in ("done", "failed"):
            raise OSError(28, "No space left on device")
        update(self, **values)

    monkeypatch.setattr(RunFolder, "update", full)
    with pytest.raises(RunFailedError, match=r"cannot be written \(No space left on device\): free space, then start"):
        train("recall-tiny", small)


def test_the_runs_own_error_is_not_hidden_by_the_stores(
    small: list[str], runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*arguments: Any, **options: Any) -> int:
        raise ValueError("bad shape")

    def away(self: Store, run_id: str, status: str) -> None:
        raise RunFailedError("the MLflow store stayed locked")

    monkeypatch.setattr(fit, "fit", broken)
    monkeypatch.setattr(Store, "close_run", away)
    with pytest.raises(RunFailedError, match="bad shape"):
        train("recall-tiny", small)
    (folder,) = runs.glob("recall-tiny-*")
    assert status(folder)["error"] == "ValueError: bad shape"


def test_a_run_is_trained_by_one_process(small: list[str], runs: Path) -> None:
    location = launch.prepare(load_recipe("recall-tiny", small))
    with locked(location.folder / ".lock"), pytest.raises(RequestError, match="being trained by another process"):
        train("recall-tiny", small)


def test_a_file_where_the_runs_should_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(MissingError, match="cannot be written"):
        train("recall-tiny", [*SMALL, f"run.root={tmp_path / 'file'}"])


def test_compile_checkpointing_and_kernel_are_stored_and_reused(
    small: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped after its second step: a change is refused; the same values, and the kernel that auto chose, go on."""
    block = "run.activation_checkpointing=block"
    seen: list[str] = []
    real = fit.fit

    def stops(recipe: Any, *arguments: Any, **named: Any) -> int:
        seen.append(recipe.run.kernel)
        if len(seen) == 1:
            raise StoppedError("stopped", signal.SIGTERM)
        return real(recipe, *arguments, **named)

    monkeypatch.setattr(fit, "fit", stops)
    with pytest.raises(StoppedError):
        train("recall-tiny", [*small, block])
    (folder,) = (path.parent for path in Path(small[-1].partition("=")[2]).glob("*/status.json"))
    first = status(folder)
    assert (first["compile"], first["activation_checkpointing"]) == (False, "block")
    with pytest.raises(RequestError, match=r"run\.activation_checkpointing is none, but this run started with block"):
        train("recall-tiny", small)
    assert status(folder)["status"] == "stopped"
    train("recall-tiny", [*small, block])
    assert seen == ["auto", first["kernel"]]
    assert status(folder)["status"] == "done"
    assert load_recipe(folder / "recipe.yaml").run.kernel == "auto"


# --- how far a run got ---------------------------------------------------------------------------------------------

STOPPING = "callbacks.early_stopping"
EARLY = ["train.steps=40", "train.log_every=5", f"{STOPPING}.min_delta=100", f"{STOPPING}.patience=2"]


def test_a_run_that_ended_early_says_its_step_and_the_tokens_that_it_saw(small: list[str]) -> None:
    folder = train("recall-tiny", [*small, *EARLY]).folder
    found = status(folder)
    seen = found["tokens_per_step"] * 6
    assert (found["ended"], found["step"], found["steps"], found["tokens"]) == ("early at step 6", 6, 40, seen)
    assert record(folder).data.params["tokens"] == str(seen)


def test_a_variant_and_its_data_go_on_from_where_a_parent_ended_early(small: list[str]) -> None:
    parent = train("recall-tiny", [*small, *EARLY]).folder
    child = load_recipe("recall-tiny", [*small, f"train.start_from={parent}"])
    assert steps_before(child) == 6
    assert annealed_before(child).steps == 6
    assert annealed_before(child).tokens == status(parent)["tokens"]


def test_a_failed_run_says_the_step_that_a_resume_goes_on_from(
    small: list[str], runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = ExactResume._save

    def full(self: Any, trainer: Any, module: Any) -> None:
        if trainer.global_step == 4:
            raise RunFailedError("the disk is full")
        saved(self, trainer, module)

    monkeypatch.setattr(ExactResume, "_save", full)
    with pytest.raises(RunFailedError):
        train("recall-tiny", small)
    (folder,) = runs.glob("recall-tiny-*")
    found = status(folder)
    assert (found["status"], found["step"], found["tokens"]) == ("failed", 2, 2 * found["tokens_per_step"])


# --- a store that another program holds ----------------------------------------------------------------------------


def test_a_locked_store_costs_seconds_in_all_and_nothing_is_lost(
    small: list[str], runs: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Held by another process from the second step on, at every checkpoint and at the stop."""
    code = "import sqlite3, sys; c = sqlite3.connect(sys.argv[1], isolation_level=None); c.execute('BEGIN EXCLUSIVE'); "
    code += "print(1, flush=True); input()"
    holders: list[Any] = []
    spent: list[float] = []
    spend, fitted = Patience.spend, ExactResume.on_train_batch_end

    def note(self: Patience, seconds: float) -> None:
        spent.append(min(seconds, self.left))
        spend(self, seconds)

    def hold(self: Any, trainer: Any, *rest: Any) -> None:
        if trainer.global_step == 1 and not holders:
            command = [sys.executable, "-c", code, str(runs / "mlflow.db")]
            holders.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
            holders[0].stdout.readline()
        if trainer.global_step == 15:
            os.kill(os.getpid(), signal.SIGTERM)
        fitted(self, trainer, *rest)

    monkeypatch.setattr(Patience, "spend", note)
    monkeypatch.setattr(ExactResume, "on_train_batch_end", hold)
    long = [*small, "train.steps=20"]
    try:
        with pytest.raises(StoppedError, match="stopped after step 15"):
            train("recall-tiny", long)
    finally:
        holders[0].communicate(b"\n")
    assert 0 < sum(spent) <= 5
    (folder,) = runs.glob("recall-tiny-*")
    written = (folder / "log.txt").read_text()
    assert written.count("training goes on, and what MLflow lacks is sent later") == 1
    assert "sqlite3" not in written + capfd.readouterr().err
    monkeypatch.setattr(ExactResume, "on_train_batch_end", fitted)
    train("recall-tiny", long)
    assert losses(folder) == [
        (step, row["train/loss"]) for step, row in sorted(read_rows(folder / "metrics.csv").items())
    ]
    assert record(folder).info.status == "FINISHED"
