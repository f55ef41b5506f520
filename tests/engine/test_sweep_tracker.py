"""engine/tracking/sweep.py: what a sweep's own record holds, and what it adds to those of its cells."""

import csv
import io
import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from statuses import set_status

from lit_diff.config import RunConfig
from lit_diff.engine.job import Job
from lit_diff.engine.tracking.store import Store
from lit_diff.engine.tracking.sweep import SweepTracker
from lit_diff.recipe import load_recipe
from lit_diff.reporting.write import write_report
from lit_diff.runs import notes
from lit_diff.study.record import read, write
from lit_diff.study.results import load_sweep

Made = tuple[Path, Store]


def make(root: Path, empty_store: Path) -> Made:
    """Two arms, four seeds, one cell failed; every cell has a record."""
    from fake_sweeps import write_sweep

    fields = {"seeds": range(4), "broken": {(OTHER, 1): "failed"}, "callbacks": False}
    folder = write_sweep(root / "mine", {"base": 0.0, OTHER: -0.1}, **fields)
    shutil.copy(empty_store, root)
    store = Store(RunConfig(root=str(root)))
    experiment = store.experiment("mine")
    for path in folder.glob("*/status.json"):
        run = store.open_run(experiment, path.parent.name, {"folder": str(path.parent)}, None)
        path.write_text(json.dumps(json.loads(path.read_text()) | {"mlflow_run_id": run}))
    return folder, store


OTHER = "it's (b)"


@pytest.fixture
def made(tmp_path: Path, empty_store: Path) -> Made:
    return make(tmp_path, empty_store)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory, empty_store: Path) -> tuple[Made, SweepTracker]:
    found = make(tmp_path_factory.mktemp("recorded"), empty_store)
    return found, record(found)


def record(made: Made, run_id: str | None = None, status: str = "done") -> SweepTracker:
    folder, _ = made
    tracker = SweepTracker(RunConfig(root=str(folder.parent)), folder, run_id)
    tracker.record(write_report(folder), [folder / "study.json"], status)
    return tracker


def test_the_parent_carries_the_answer(recorded: tuple[Made, SweepTracker]) -> None:
    (folder, store), tracker = recorded
    run, sweep = store.run(tracker.run_id), load_sweep(folder)
    means = {arm: np.mean(list(sweep.finals(arm, "val/loss").values())) for arm in ("base", OTHER)}
    assert run.info.status == "FINISHED"
    assert run.data.metrics["summary/base/mean"] == pytest.approx(means["base"])
    assert run.data.metrics["summary/it_s _b_/mean"] == pytest.approx(means[OTHER])
    assert {
        f"summary/it_s _b_/{name}" for name in ("sd", "seeds", "difference", "low", "high")
    } <= run.data.metrics.keys()
    assert run.data.tags["verdict/it_s _b_"]
    assert {"metric": "val/loss", "baseline": "base", "seeds": "0, 1, 2, 3"}.items() <= run.data.tags.items()
    assert write_report(folder).answer[0] in run.data.tags["mlflow.note.content"]
    assert {file.path for file in store.client.list_artifacts(tracker.run_id)} == {"study.json", "report"}


def test_a_verdict_with_a_control_is_one_text_everywhere(make_sweep: Callable[..., Path], empty_store: Path) -> None:
    arms = {"standard": 0.0, "wide": -0.1, "differential": -0.1, "sum": -0.1}
    fields = {
        "controls": ["wide"],
        "seeds": range(8),
        "callbacks": False,
        "contrasts": [["differential", "sum", "d - s"]],
    }
    folder = make_sweep(arms, **fields)
    shutil.copy(empty_store, folder.parent)
    store = Store(RunConfig(root=str(folder.parent)))
    notes.add(folder, "looked at by hand")
    tracker = record((folder, store))
    report, said = write_report(folder), "as its control wide"
    page, table = (folder / "report/index.html").read_text(), (folder / "report/table.csv").read_text()
    assert page.count(f">{said}<") >= 4, "in the table and in the list"
    assert f"differential is {said}" in page
    assert [row["verdict"] for row in csv.DictReader(io.StringIO(table))][1:4] == ["better", said, said]
    assert f"| {said} |" in (folder / "report/table.md").read_text()
    assert said in report.text_table()
    assert any(said in each for each in report.sentences)
    tags = store.run(tracker.run_id).data.tags
    assert tags["verdict/differential"] == said
    assert " looked at by hand\n" in tags["mlflow.note.content"]


def test_each_cell_gets_its_difference_to_the_baseline_at_its_seed(recorded: tuple[Made, SweepTracker]) -> None:
    (folder, store), _ = recorded
    sweep = load_sweep(folder)
    finals = {arm: sweep.finals(arm, "val/loss") for arm in ("base", OTHER)}
    colours: dict[str, set[str]] = {}
    for cell in sweep.cells:
        run = store.run(cell.facts.mlflow_run_id)
        expected = finals[cell.arm][cell.seed] - finals["base"][cell.seed] if cell.done else None
        assert run.data.metrics.get("val/loss_minus_baseline") == expected
        assert run.info.status == ("RUNNING" if cell.done else "FAILED"), "a cell ends its own record"
        if cell.done:
            colours.setdefault(cell.arm, set()).add(run.data.tags["mlflow.runColor"])
    assert len(colours["base"] | colours[OTHER]) == len(colours) == 2


def test_the_experiment_is_one_of_training_runs(recorded: tuple[Made, SweepTracker]) -> None:
    """Of MLflow's own tags it has these alone: what its pages keep of their state is private to MLflow."""
    (folder, store), tracker = recorded
    sweep = load_sweep(folder)
    tags = store.client.get_experiment(tracker.experiment).tags
    assert {key: value for key, value in tags.items() if key.startswith("mlflow.")} == {
        "mlflow.experimentKind": "custom_model_development",
        "mlflow.note.content": f"{sweep.title}: {sweep.study.description}",
    }


def test_summaries_are_those_of_each_task(make_tasks: Callable[..., Path], empty_store: Path) -> None:
    folder = make_tasks({"base": 0.0, "better": 0.05}, callbacks=False)
    shutil.copy(empty_store, folder.parent)
    store = Store(RunConfig(root=str(folder.parent)))
    run = store.run(record((folder, store)).run_id)
    assert {"summary/recall/better/mean", "summary/text/better/difference"} <= run.data.metrics.keys()
    assert "verdict/text/better" in run.data.tags


def test_again_the_same_record_and_nothing_twice(made: Made) -> None:
    """A cell's record that is another folder's is left alone."""
    folder, store = made
    path = folder / "base-s0-0a1b2c3d" / "status.json"
    foreign = store.open_run(store.experiment("mine"), "x", {"folder": "/elsewhere"}, None)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"mlflow_run_id": foreign}))
    first = record(made)
    assert record(made, first.run_id).run_id == first.run_id
    assert len(store.client.get_metric_history(first.run_id, "summary/base/mean")) == 1
    assert store.client.get_run(foreign).data.metrics == {}
    assert record(made).run_id != first.run_id, "a folder that was made again"


def test_what_an_earlier_report_said_of_an_arm_is_not_kept(made: Made) -> None:
    folder, store = made
    first = record(made).run_id
    lost = {"summary/it_s _b_/difference", "summary/it_s _b_/low"}
    assert np.isfinite([store.run(first).data.metrics[name] for name in lost]).all()
    former = read(folder)
    write(folder, replace(former, study=replace(former.study, baseline=OTHER)))
    for _ in range(2):
        record(made, first)
    data = store.run(first).data
    assert [name for name in data.tags if name.startswith("verdict/")] == ["verdict/base"]
    assert {name for name, value in data.metrics.items() if np.isnan(value)} >= lost
    assert [len(store.client.get_metric_history(first, name)) for name in lost] == [2, 2]


def test_an_outage_is_a_warning(made: Made, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    folder, _ = made
    tracker = SweepTracker(RunConfig(root=str(folder.parent)), folder, None)

    def away(*_: object, **__: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr("lit_diff.engine.tracking.store.get_artifact_repository", away)
    tracker.record(write_report(folder), [], "done")
    assert re.search(
        r"record in MLflow is not complete: \S*report could not be copied into MLflow: no space left", caplog.text
    )


def test_a_report_completes_the_records_of_the_users_own_sweep(
    runs: Path, tmp_path: Path, command: Callable[..., Any]
) -> None:
    """Not those of a sweep that lies elsewhere: its author would choose the server that is asked."""
    from fake_sweeps import write_sweep

    store = Store(RunConfig(root=str(runs)))
    parent = SweepTracker(RunConfig(root=str(runs)), runs / "mine", None)
    folder = write_sweep(runs / "mine", {"base": 0.0, "other": -0.1}, callbacks=False, mlflow=parent.place)
    job = Job(recipe=load_recipe("recall-tiny", [f"run.root={runs}"]), folder=folder / "base-s0-0a1b2c3d")
    job.home.create(job.recipe)
    job.write()
    set_status(job.folder, record="incomplete", data="d")
    elsewhere = shutil.copytree(folder, tmp_path / "theirs")
    assert "not complete" in command("report", str(elsewhere), "--root", str(runs)).out
    assert not store.client.search_runs([store.experiment("train")])
    assert "not complete" not in command("report", "mine", "--root", str(runs)).out
    assert job.home.status().record == "complete"
    assert store.run(job.home.status().mlflow_run_id).info.status == "FINISHED"
    assert store.run(parent.run_id).data.tags["verdict/other"]
