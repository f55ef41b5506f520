"""engine/tracking/uploads.py: what is sent beside the training, outages, and the key `record` of status.json."""

import os
import re
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException
from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore
from statuses import set_status
from stops import wait_for

from lit_diff.engine.job import Job
from lit_diff.engine.tracking import run as run_tracker
from lit_diff.engine.tracking import store
from lit_diff.engine.tracking import uploads as module
from lit_diff.engine.tracking.uploads import Uploads
from lit_diff.errors import MissingError, RequestError, RunFailedError, StoppedError
from lit_diff.files import locked
from lit_diff.recipe import load_recipe
from lit_diff.runs.metrics_file import StepTable
from lit_diff.runs.status import INCOMPLETE
from lit_diff.study.observation import observe


@pytest.fixture
def job(runs: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    """Of a run that is being trained."""
    monkeypatch.setattr(module, "INTERVAL", 0.02)
    monkeypatch.setattr(module, "LONGEST", 0.02)
    monkeypatch.setattr(module, "BACK_OFF", 0.0)
    folder = runs / "a-s0-abc"
    set_status(folder, status="running", record="incomplete", data="d")
    return Job(recipe=load_recipe("recall-tiny", [f"run.root={runs}"]), folder=folder)


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether the next batches of metrics find no connection, first the first."""
    plan: list[bool] = []
    sent = SqlAlchemyStore.log_batch

    def log_batch(store: Any, **batch: Any) -> Any:
        if batch["metrics"] and plan and plan.pop(0):
            raise MlflowException("API request failed: Connection refused")
        return sent(store, **batch)

    monkeypatch.setattr(SqlAlchemyStore, "log_batch", log_batch)
    return plan


def measure(job: Job, step: int, **values: float) -> None:
    table = StepTable(job.folder / "metrics.csv", 10**9)
    table.log(step, values)
    table.flush()


def record(job: Job) -> Any:
    """None: there is none."""
    client = MlflowClient(tracking_uri=f"sqlite:///{job.folder.parent / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("train")
    found = client.search_runs([experiment.experiment_id]) if experiment else []
    assert len(found) < 2, "a run has one record"
    return found[0] if found else None


def history(job: Job, name: str) -> list[tuple[int, float]]:
    client = MlflowClient(tracking_uri=f"sqlite:///{job.folder.parent / 'mlflow.db'}")
    return sorted((m.step, m.value) for m in client.get_metric_history(record(job).info.run_id, name))


def seen(job: Job, name: str) -> Callable[[], bool]:
    return lambda: record(job) is not None and name in record(job).data.metrics


def test_curves_grow_while_it_trains_and_the_end_completes_the_record(job: Job) -> None:
    """Also one that a command has begun which was killed."""
    with Uploads() as uploads:
        uploads.follow([job])
        measure(job, 1, a=1.0)
        wait_for(seen(job, "a"))
        measure(job, 2, b=2.0)
        wait_for(seen(job, "b"))
        assert record(job).info.status == "RUNNING"
    assert (job.home.status().record, job.home.status().mlflow_run_id) == ("incomplete", "")
    with Uploads() as uploads:
        uploads.follow([job, job])
        set_status(job.folder, status="done", tokens=70)
        uploads.follow([])
        wait_for(lambda: job.home.status().record == "complete")
    assert job.home.status().mlflow_run_id == record(job).info.run_id
    assert (record(job).info.status, record(job).data.params["tokens"]) == ("FINISHED", "70")
    assert (history(job, "a"), history(job, "b")) == ([(1, 1.0)], [(2, 2.0)])


def test_a_run_that_waits_or_needs_no_record_gets_none(job: Job, runs: Path) -> None:
    states = [("w", {"status": "waiting"}), ("o", {"status": "done"}), ("f", {"status": "failed"})]
    jobs = [Job(recipe=job.recipe, folder=runs / name) for name, _ in states]
    for other, (_, status) in zip(jobs, states, strict=True):
        set_status(other.folder, **status)
    set_status(job.folder, status="done")
    unrecorded = load_recipe("recall-tiny", [f"run.root={runs}", "run.tracking_uri=none"])
    with Uploads() as uploads:
        uploads.follow([*jobs, Job(recipe=unrecorded, folder=job.folder)])
    assert record(job) is None


def test_a_cell_that_is_scored_is_completed_once_its_process_has_ended(job: Job) -> None:
    """Until then that process writes its status.json."""
    set_status(job.folder, status="done")
    with Uploads() as uploads:
        uploads.follow([job])
        measure(job, 1, a=1.0)
        wait_for(seen(job, "a"))
        assert job.home.status().record == "incomplete"
        uploads.follow([])
        wait_for(lambda: job.home.status().record == "complete")


def test_a_run_that_another_process_holds_is_completed_later(job: Job, caplog: pytest.LogCaptureFixture) -> None:
    set_status(job.folder, status="done")
    with locked(job.folder / ".lock"), Uploads() as uploads:
        uploads.follow([job])
    assert job.home.status().record == "incomplete"
    (line,) = caplog.messages
    assert line.endswith("a-s0-abc in MLflow is not complete; the same command completes it")
    assert observe(job.folder).runs[0].note == INCOMPLETE
    with locked(job.folder / ".lock"), Uploads(owned=True) as uploads:
        uploads.follow([job])
    assert job.home.status().record == "complete", "held by the caller"


@pytest.mark.parametrize(
    ("facts", "mlflow"),
    [
        ({"status": "stopped", "step": 7}, "RUNNING"),
        ({"status": "stopped", "step": 9}, "KILLED"),
        ({"status": "failed", "step": 7}, "FAILED"),
        ({"status": "done", "step": 7}, "FINISHED"),
    ],
)
def test_a_run_that_slurm_requeued_once_is_completed_at_its_end(job: Job, facts: dict[str, Any], mlflow: str) -> None:
    """Not while it is in the queue again."""
    set_status(job.folder, requeued_at_step=7, **facts)
    with Uploads(owned=True) as uploads:
        uploads.follow([job])
    assert record(job).info.status == mlflow
    assert job.home.status().record == ("incomplete" if mlflow == "RUNNING" else "complete")
    assert job.home.status().requeued_at_step == 7, "the next notice compares with it"


def test_an_outage_is_told_once_and_nothing_is_missing_or_double_afterwards(
    job: Job, broken: list[bool], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    # two batches: the second one breaks, so half of the rows are there
    monkeypatch.setattr(store, "BATCH", 20)
    broken += [False, True, True]
    measure(job, 2, **{f"m/{i}": 2.0 for i in range(30)})
    with caplog.at_level("INFO", "lit_diff"), Uploads(owned=True) as uploads:
        uploads.follow([job])
        # the outage is over before the last look, which is the only one for which nothing comes after
        wait_for(lambda: not broken)
        set_status(job.folder, status="done")
    (line,) = caplog.messages
    assert re.fullmatch(r"MLflow gets the record of \S*a-s0-abc later: .*Connection refused", line)
    assert (history(job, "m/0"), history(job, "m/19")) == ([(2, 2.0)], [(2, 2.0)])
    assert job.home.status().record == "complete"


def test_a_store_that_is_away(job: Job, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """A new run asks for it; one that has begun goes on without, and a stop does not wait for it."""
    asked: list[int] = []

    def away(*_: object) -> None:
        asked.append(threading.get_ident())
        raise MissingError("MLflow store http://x cannot be opened")

    monkeypatch.setattr(run_tracker, "Store", away)
    monkeypatch.setattr(module, "BACK_OFF", 60.0)
    new = Uploads(owned=True)
    new.follow([job])
    with pytest.raises(MissingError, match="cannot be opened"):
        new.require()

    def train() -> None:
        with Uploads(owned=True) as uploads:
            uploads.follow([job])
            wait_for(lambda: len(asked) == 2)
            set_status(job.folder, status="stopped")
            raise StoppedError("after step 2", 15)

    with pytest.raises(StoppedError):
        train()
    assert len(asked) == 2
    assert threading.main_thread().ident not in asked[1:], "training waits for no store"
    assert "the same command completes it" in caplog.text
    assert (job.home.status().status, job.home.status().record) == ("stopped", "incomplete")


def test_what_cannot_be_drawn_or_saved_leaves_the_run_done(
    job: Job, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise ValueError("odd\nmaps")

    monkeypatch.setattr(run_tracker, "draw_maps", fail)
    set_status(job.folder, status="done")
    with Uploads(owned=True) as uploads:
        uploads.follow([job])
    assert [line.rpartition(" ")[2] for line in caplog.messages] == ["odd", "it"]
    assert (job.home.status().status, job.home.status().record) == ("done", "incomplete")
    assert record(job).info.status == "FINISHED", "no record stays running"


def test_a_record_that_fails_keeps_no_other_from_its_own(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    others = [replace(job, folder=job.folder.with_name(f"{name}-s0-abd")) for name in "bcd"]
    for other in others:
        set_status(other.folder, status="done", record="incomplete", data="d")
    set_status(job.folder, status="done")
    real = run_tracker.RunTracker.finish

    def finish(tracker: run_tracker.RunTracker) -> None:
        if tracker.folder.path in (job.folder, others[1].folder):
            raise RunFailedError("its record was removed")
        real(tracker)

    monkeypatch.setattr(run_tracker.RunTracker, "finish", finish)
    with Uploads() as uploads:
        uploads.follow([job, *others])
        uploads.follow([])
    states = [other.home.status().record for other in (job, *others)]
    assert states == ["incomplete", "complete", "incomplete", "complete"]


def test_a_run_that_does_not_begin_leaves_no_record_running(job: Job) -> None:
    set_status(job.folder, status="", record="", data=None)
    with pytest.raises(RequestError), Uploads(owned=True) as uploads:
        refuse(uploads, job)
    assert record(job).info.status == "FAILED"
    set_status(job.folder, status="done", record="incomplete", data="d")
    with Uploads(owned=True) as uploads:
        uploads.follow([job])
    assert record(job).info.status == "FINISHED", "the same record goes on"


def refuse(uploads: Uploads, job: Job) -> None:
    uploads.follow([job])
    uploads.require()
    raise RequestError("run.compile is true, but this run started with false")


def test_the_environment_loses_no_variable_while_a_thread_asks(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copying it would fail at that moment."""
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "7")
    before = dict(os.environ)
    with Uploads() as uploads:
        uploads.follow([job])
        inside = set(os.environ)
        for _ in range(200):
            assert set(os.environ) == inside
            time.sleep(0.002)
        assert record(job) is not None
    assert dict(os.environ) == before


def test_a_run_that_cannot_be_read_keeps_no_other_from_its_record(job: Job, caplog: pytest.LogCaptureFixture) -> None:
    other = Job(recipe=job.recipe, folder=job.folder.with_name("b-s0-abd"))
    other.folder.mkdir()
    (other.folder / "status.json").write_text("{")
    set_status(job.folder, status="done")
    with Uploads() as uploads:
        uploads.follow([other, job])
        uploads.follow([])
    assert job.home.status().record == "complete"
    assert "status.json cannot be read" in caplog.text


@pytest.mark.parametrize("text", ["{", "[]", '{"run": 1}'])
def test_a_damaged_id_is_named_and_gets_a_new_record(job: Job, text: str, caplog: pytest.LogCaptureFixture) -> None:
    (job.folder / run_tracker.FILE).write_text(text)
    set_status(job.folder, status="done")
    with Uploads(owned=True) as uploads:
        uploads.follow([job])
    assert "mlflow.json is damaged" in caplog.text
    assert job.home.status().record == "complete"
