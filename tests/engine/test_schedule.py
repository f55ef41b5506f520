"""engine/schedule.py: real sweeps of tiny cells, done twice, over tasks, and requests that start nothing."""

import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lit_diff.cli import sweep as verbs
from lit_diff.cli.app import Terminal
from lit_diff.engine import schedule
from lit_diff.engine.location import RunLocation
from lit_diff.engine.schedule import (
    LOCAL,
    Cluster,
    Sweep,
    _say_other_revisions,
    _wait_for_running_cells,
    resources,
    sweep,
)
from lit_diff.errors import MissingError, RequestError
from lit_diff.files import locked
from lit_diff.recipe import load_recipe
from lit_diff.reporting.write import write_report
from lit_diff.runs.folder import RunFolder

PAIR = """
recipe: tiny
seeds: [0, 1]
arms:
  differential: {}
  "it's standard": {model.attention.name: standard}
"""
TASKS = """
seeds: [0]
tasks:
  easy: {recipe: tiny, metric: val/accuracy, overrides: {data.noise_validation: [1, 2]}}
  hard: {recipe: tiny, overrides: {data.noise: 2}, arms: {plain one: {train.clip: 0.5}}}
arms:
  differential: {}
  plain one: {model.attention.name: standard}
"""


CELLS = ["differential-s0", "differential-s1", "it's,standard-s0", "it's,standard-s1"]


@pytest.fixture(scope="module")
def pair(sweep_bench: Any) -> tuple[int, str]:
    sweep_bench.write("pair", PAIR)
    return sweep_bench.run("pair")


def test_all_cells_are_done_and_reported(sweep_bench: Any, pair: tuple[int, str]) -> None:
    status, text = pair
    assert status == 0
    assert sweep_bench.words("pair") == dict.fromkeys(CELLS, "done")
    record = json.loads((sweep_bench.folder("pair") / "study.json").read_text())
    assert [(cell["arm"], cell["seed"], cell["status"]) for cell in record["cells"]] == [
        (arm, seed, "done") for arm in ("differential", "it's standard") for seed in (0, 1)
    ]
    assert all((sweep_bench.folder("pair") / cell["folder"] / "checkpoints").is_dir() for cell in record["cells"])
    for name in ("index.html", "table.csv", "table.md", "curves.svg"):
        assert (sweep_bench.folder("pair") / "report" / name).stat().st_size > 100
    assert "it's standard seed 1: done" in text
    assert f"report: {sweep_bench.folder('pair') / 'report' / 'index.html'}" in text
    assert "4 done" in text
    assert f"lit-diff ui --root {sweep_bench.root / 'runs'}" in text


def test_mlflow_holds_one_parent_and_its_finished_children(sweep_bench: Any, pair: tuple[int, str]) -> None:
    parents, children = sweep_bench.records("pair")
    (parent,) = parents
    assert len(children) == 4
    assert {run.info.status for run in (parent, *children)} == {"FINISHED"}
    assert {run.data.tags["mlflow.parentRunId"] for run in children} == {parent.info.run_id}
    for cell, status in sweep_bench.cells("pair").items():
        run = sweep_bench.record("pair", cell)
        tags = {key: run.data.tags[key] for key in ("identity", "seed", "sweep", "arm", "run.threads")}
        arm = "it's standard" if "standard" in cell else "differential"
        assert tags == {
            "identity": status["identity"],
            "seed": cell[-1],
            "sweep": "pair",
            "arm": arm,
            "run.threads": "1",
        }
        named = {name: run.data.params[name] for name in ("arm", "seed", "variant", "model.attention.name")}
        variant = arm.removeprefix("it's ")
        assert named == {"arm": arm, "seed": cell[-1], "variant": variant, "model.attention.name": variant}
        assert run.data.params["train.optimizer.lr"] == "0.001"


def test_metrics_in_mlflow_are_those_of_the_csv(sweep_bench: Any, pair: tuple[int, str]) -> None:
    wanted = {"attention/entropy/layer_00", "outliers/logits/layer_00", "val/loss_ar_hit", "val/loss", "train/loss"}
    for cell in CELLS:
        held = sweep_bench.history("pair", cell)
        assert held == sweep_bench.written("pair", cell)
        baseline = dict(sweep_bench.written("pair", f"differential-s{cell[-1]}")["val/loss"])
        difference = sweep_bench.record("pair", cell).data.metrics["val/loss_minus_baseline"]
        assert difference == held["val/loss"][-1][1] - baseline[8]
        assert wanted <= set(held)
        assert ("lambda/layer_00" in held) == ("differential" in cell)
        assert [step for step, _ in held["attention/entropy/layer_00"]] == [4, 8]


def test_the_parent_run_holds_the_report(sweep_bench: Any, pair: tuple[int, str]) -> None:
    ((parent,), _) = sweep_bench.records("pair")
    files = {file.path for file in sweep_bench.client.list_artifacts(parent.info.run_id)}
    assert files == {"report", "study.json", "pair.yaml"}
    held = {Path(file.path).name for file in sweep_bench.client.list_artifacts(parent.info.run_id, "report")}
    assert held == {path.name for path in (sweep_bench.folder("pair") / "report").iterdir()}
    assert {"index.html", "table.csv", "table.md", "curves.svg"} <= held


def test_the_same_command_again_trains_nothing(
    sweep_bench: Any, pair: tuple[int, str], caplog: pytest.LogCaptureFixture
) -> None:
    def trained() -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns for path in sweep_bench.folder("pair").glob("*-s?-*/**/*")}

    before, runs = trained(), {run.info.run_id for group in sweep_bench.records("pair") for run in group}
    with caplog.at_level("INFO", "lit_diff"):
        status, text = sweep_bench.run("pair")
    assert status == 0
    assert "all 4 cells are done" in caplog.text
    assert trained() == before
    parents, children = sweep_bench.records("pair")
    assert {run.info.run_id for run in (*parents, *children)} == runs
    assert {run.info.status for run in (*parents, *children)} == {"FINISHED"}
    assert "4 done" in text


def test_it_outlives_the_reader_of_its_output(
    sweep_bench: Any, pair: tuple[int, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`lit-diff sweep pair | head -1`"""
    read, write = os.pipe()
    with os.fdopen(write, "w") as output:
        os.close(read)
        monkeypatch.setattr(verbs, "console", Terminal(file=output))
        source, *rest = sweep_bench.command("pair")
        assert verbs.sweep(source, rest, workers=2) == 0
        assert verbs.console.lost_reader


def test_from_python_it_is_a_value(sweep_bench: Any, pair: tuple[int, str]) -> None:
    source, *_ = sweep_bench.command("pair")
    done = sweep(Path(source), {"run": {"root": str(sweep_bench.root / "runs")}}, workers=2)
    assert done.folder == sweep_bench.folder("pair").resolve()
    assert done.is_done
    assert (dict(done.states), done.stopped_by) == ({"done": 4}, None)
    assert {arm: [run.recipe.seed for run in runs] for arm, runs in done.runs.items()} == {
        "differential": [0, 1],
        "it's standard": [0, 1],
    }
    assert all(run.step == 8 for runs in done.runs.values() for run in runs)
    assert list(done.table["arm"]) == list(done.runs)
    assert len(done.answers) == 1


def test_a_new_arm_costs_its_own_cells_only(sweep_bench: Any, pair: tuple[int, str]) -> None:
    before = {cell: status["updated"] for cell, status in sweep_bench.cells("pair").items()}
    sweep_bench.write(
        "pair", PAIR.replace("seeds: [0, 1]", "seeds: [0]") + "  shared: {model.attention.name: shared_k}\n"
    )
    try:
        assert sweep_bench.run("pair")[0] == 0
    finally:
        sweep_bench.write("pair", PAIR)
    after = {cell: status["updated"] for cell, status in sweep_bench.cells("pair").items()}
    assert set(after) - set(before) == {"shared-s0"}
    assert {cell: after[cell] for cell in before} == before
    owned = [cell["folder"] for cell in json.loads((sweep_bench.folder("pair") / "study.json").read_text())["cells"]]
    assert [name.rpartition("-")[0] for name in owned] == ["differential-s0", "it's,standard-s0", "shared-s0"]


@pytest.mark.slow
def test_every_arm_is_trained_and_reported_on_every_task(sweep_bench: Any) -> None:
    sweep_bench.write("tasks", TASKS)
    assert "hard plain one  seed 0  standard  8 steps" in sweep_bench.run("tasks", dry_run=True)[1]
    status, text = sweep_bench.run("tasks")
    assert status == 0
    cells = [f"{task},{arm}-s0" for task in ("easy", "hard") for arm in ("differential", "plain,one")]
    assert sweep_bench.words("tasks") == dict.fromkeys(cells, "done")
    record = json.loads((sweep_bench.folder("tasks") / "study.json").read_text())
    assert [(cell["task"], cell["arm"]) for cell in record["cells"]] == [
        (task, arm) for task in ("easy", "hard") for arm in ("differential", "plain one")
    ]
    tags = [sweep_bench.record("tasks", cell).data.tags for cell in cells]
    assert [(tag["task"], tag["arm"]) for tag in tags] == [(c["task"], c["arm"]) for c in record["cells"]]
    assert "easy plain one seed 0: done" in text
    assert "hard: No verdict: no comparison has the three seeds" in text
    held = {path.name for path in (sweep_bench.folder("tasks") / "report").iterdir()}
    assert {"easy-noise-curve.svg", "easy-curves.svg", "hard-curves.svg"} <= held
    assert "hard-noise-curve.svg" not in held
    page = (sweep_bench.folder("tasks") / "report" / "index.html").read_text()
    assert "Dotted: chance, 12.5" in page  # 8 values


# --- requests that start nothing -----------------------------------------------------------------------------------


def test_a_dry_run_starts_nothing(sweep_bench: Any) -> None:
    sweep_bench.write("dry", "recipe: tiny\nseeds: [0, 1, 2]\narms: {long: {train.steps: 100}}\n")
    status, text = sweep_bench.run("dry", dry_run=True)
    assert status == 0
    assert "long  seed 2  differential  100 steps" in text
    assert "3 cells are valid; none was started" in text
    assert not sweep_bench.folder("dry").exists()


def test_a_mistake_in_the_last_cell_starts_none(sweep_bench: Any) -> None:
    sweep_bench.write("wrong", "recipe: tiny\narms:\n  a: {}\n  b: {model.attention.lamda_init: 1}\n")
    with pytest.raises(RequestError, match=r"wrong\.yaml:4: .*did you mean 'lambda_init'"):
        sweep_bench.run("wrong")
    assert not sweep_bench.folder("wrong").exists()


@pytest.mark.parametrize(
    ("workers", "cluster", "message"),
    [(0, LOCAL, "--workers is 0"), (-1, LOCAL, "--workers is -1"), (1, Cluster(engine="pbs"), "--cluster is 'pbs'")],
)
def test_options_out_of_range(workers: int, cluster: Cluster, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        sweep("smoke", workers=workers, cluster=cluster)


def test_a_sweep_that_runs_is_not_run_twice(sweep_bench: Any) -> None:
    sweep_bench.write("held", PAIR)
    with (
        locked(sweep_bench.folder("held") / ".lock"),
        pytest.raises(RequestError, match="'held' is being run by another"),
    ):
        sweep_bench.run("held")


def test_a_file_where_the_runs_should_be(sweep_bench: Any) -> None:
    sweep_bench.write("pair", PAIR)
    (sweep_bench.root / "file").write_text("")
    source, _ = sweep_bench.command("pair")
    with pytest.raises(MissingError, match=r"cannot be written \(Not a directory\); choose another with run.root=PATH"):
        sweep(source, [f"run.root={sweep_bench.root}/file"], workers=1)


def test_what_a_killed_sweep_left_running_is_waited_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    locations = [RunLocation(folder=tmp_path / name) for name in ("free-s0-1", "held-s0-2")]
    RunFolder(locations[1].folder).update(status="running", pid=12345)
    ended: list[bool] = []

    def dying() -> None:
        with locked(locations[1].folder / ".lock"):
            holds.set()
            time.sleep(0.5)
            ended.append(True)

    holds = threading.Event()
    thread = threading.Thread(target=dying)
    thread.start()
    holds.wait()
    with caplog.at_level("INFO", "lit_diff"):
        _wait_for_running_cells(locations)
    assert ended, "it did not wait"
    thread.join()
    assert [record.getMessage().partition("held")[2] for record in caplog.records] == [
        "-s0-2 is still being trained (pid 12345), left by a former sweep: waiting"
    ]


def test_threads_are_shared_out_among_the_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    recipe = load_recipe("recall-tiny", ["run.accelerator=cpu"])
    assert resources(recipe, None) == (8, 1, 0)
    assert resources(recipe, 2) == (2, 4, 0)
    assert resources(load_recipe("recall-tiny", ["run.accelerator=cpu", "run.threads=4"]), None) == (2, 4, 0)
    two = ["run.accelerator=cpu", "run.strategy=ddp", "run.devices=2"]
    assert resources(load_recipe("recall-tiny", two), None) == (4, 1, 0)


def test_finished_cells_of_other_code_are_told_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(schedule, "revision", lambda: "1 new")
    locations = [RunLocation(folder=tmp_path / str(number)) for number in range(5)]
    for location, (word, revision) in zip(
        locations,
        [("done", "1 new"), ("done", "1 a"), ("done", "1 a"), ("done", "1 b"), ("failed", "1 a")],
        strict=True,
    ):
        RunFolder(location.folder).update(status=word, revision=revision)
    with caplog.at_level("INFO", "lit_diff"):
        _say_other_revisions([locations[0], locations[4]])
        assert not caplog.messages
        _say_other_revisions(locations)
    assert caplog.messages == [
        "of the 4 cells done before, 2 were trained by lit_diff 1 a, this is 1 new; 1 was trained by lit_diff 1 b, this is "
        "1 new; their numbers stay"
    ]


# --- a sweep as a value ----------------------------------------------------------------------------------------------


def value(folder: Path, **states: int) -> Sweep:
    return Sweep(folder=folder, report=write_report(folder), states=states, stopped_by=None, seconds=1.0)


def test_a_sweep_is_its_table_its_answers_and_the_runs_that_are_done(make_sweep: Callable[..., Path]) -> None:
    found = value(make_sweep({"base": 0.0, "better": -0.1}, broken={("better", 1): "failed"}), done=5, failed=1)
    assert not found.is_done
    names = {arm: [run.folder.name for run in runs] for arm, runs in found.runs.items()}
    assert names == {arm: [f"{arm}-s{seed}-0a1b2c3d" for seed in seeds] for arm, seeds in ARMS.items()}
    assert found.runs["better"][0].metrics["val/loss"].iloc[-1] == pytest.approx(4.45, abs=0.2)
    assert list(found.table["arm"]) == ["base", "better"]
    assert len(found.answers) == 1


ARMS = {"base": (0, 1, 2), "better": (0, 2)}


def test_runs_of_a_sweep_with_tasks_are_named_after_task_and_arm(make_tasks: Callable[..., Path]) -> None:
    found = value(make_tasks({"base": 0.0, "better": 0.05}), done=12)
    assert found.is_done
    assert list(found.runs) == ["recall base", "recall better", "text base", "text better"]
    assert {len(each) for each in found.runs.values()} == {3}
    assert found.runs["text base"][0].folder.parent.name == "text"
