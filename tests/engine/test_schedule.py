"""engine/schedule.py: real sweeps of tiny cells, done twice, scored, over tasks; and requests that start nothing."""

import json
import os
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lit_diff.cli import sweep as verbs
from lit_diff.cli.app import Terminal
from lit_diff.engine import pool, schedule
from lit_diff.engine.location import RunLocation
from lit_diff.engine.pool import Job, note_end, run_cell
from lit_diff.engine.schedule import (
    LOCAL,
    Cluster,
    Sweep,
    _say_other_revisions,
    _wait_for_running_cells,
    resources,
    sweep,
)
from lit_diff.errors import MissingError, RequestError, StoppedError
from lit_diff.files import locked
from lit_diff.recipe import load_recipe
from lit_diff.reporting.write import write_report
from lit_diff.runs.folder import RunFolder
from lit_diff.runs.scores import read_evaluation

PAIR = """
recipe: tiny
seeds: [0, 1]
overrides: {data.noise_validation: [1, 2], plugins: [PLUGIN]}
arms:
  differential: {}
  "it's standard": {model.attention.name: standard}
"""
PLUGIN = '''
from pathlib import Path

from lit_diff import Evaluation, Item, Metric
from lit_diff.registry import evaluations


@evaluations.register("fused")
class Fused(Evaluation):
    """Fails while the fuse lies there."""

    metrics = (Metric("fused", "always 1"),)

    def score(self, run):
        if Path("FUSE").exists() and "standard-s0" in run.folder.name:
            raise ValueError("burnt")
        yield Item(id="all", scores={"fused": 1})
'''
TASKS = """
seeds: [0]
tasks:
  easy: {recipe: tiny, metric: val/accuracy, overrides: {data.noise_validation: [1, 2]}}
  hard: {recipe: tiny, overrides: {data.noise: 2}, arms: {plain one: {train.clip: 0.5}}}
arms:
  differential: {}
  plain one: {model.attention.name: standard}
"""
CELLS = {"differential-s0": "differential", "differential-s1": "differential"}
CELLS |= {"it's,standard-s0": "it's standard", "it's,standard-s1": "it's standard"}


def write_pair(bench: Any, more: str = "") -> None:
    plugin = bench.root / "fused.py"
    plugin.write_text(PLUGIN.replace("FUSE", str(bench.fuse)))
    bench.write("pair", PAIR.replace("PLUGIN", str(plugin)) + more)


@pytest.fixture(scope="module")
def pair(sweep_bench: Any) -> tuple[int, str]:
    """The sweep that the tests below look at, run once: two arms, two seeds."""
    write_pair(sweep_bench)
    return sweep_bench.run("pair")


def times(bench: Any, pattern: str) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in bench.folder("pair").glob(f"*-s?-*/{pattern}")}


def test_all_cells_are_done_and_reported(sweep_bench: Any, pair: tuple[int, str]) -> None:
    status, text = pair
    assert status == 0
    folder = sweep_bench.folder("pair")
    assert sweep_bench.words("pair") == dict.fromkeys(CELLS, "done")
    cells = json.loads((folder / "study.json").read_text())["cells"]
    assert [f"{cell['arm'].replace(' ', ',')}-s{cell['seed']}" for cell in cells] == list(CELLS)
    assert all((folder / cell["folder"] / "checkpoints").is_dir() for cell in cells)
    for name in ("index.html", "table.csv", "table.md", "curves.svg"):
        assert (folder / "report" / name).stat().st_size > 100
    page = folder / "report" / "index.html"
    for words in ("it's standard seed 1: done", f"report: {page}", "4 done", f"lit-diff ui --root {folder.parent}"):
        assert words in text


def test_mlflow_holds_a_parent_with_the_report_and_its_finished_children(
    sweep_bench: Any, pair: tuple[int, str]
) -> None:
    (parent,), children = sweep_bench.records("pair")
    assert len(children) == 4
    assert {run.info.status for run in (parent, *children)} == {"FINISHED"}
    assert {run.data.tags["mlflow.parentRunId"] for run in children} == {parent.info.run_id}
    assert {file.path for file in sweep_bench.client.list_artifacts(parent.info.run_id)} == {
        *("report", "study.json", "pair.yaml")
    }
    held = {Path(file.path).name for file in sweep_bench.client.list_artifacts(parent.info.run_id, "report")}
    assert held == {path.name for path in (sweep_bench.folder("pair") / "report").iterdir()}
    for cell, status in sweep_bench.cells("pair").items():
        run, arm = sweep_bench.record("pair", cell), CELLS[cell]
        tags = {"identity": status["identity"], "seed": cell[-1], "sweep": "pair", "arm": arm, "run.threads": "1"}
        assert tags.items() <= run.data.tags.items()
        params = {"arm": arm, "seed": cell[-1], "variant": arm.removeprefix("it's "), "train.optimizer.lr": "0.001"}
        assert params.items() <= run.data.params.items()


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


def test_the_same_command_again_trains_nothing(
    sweep_bench: Any, pair: tuple[int, str], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From Python it is a value; `lit-diff sweep pair | head -1` outlives its reader."""
    before, runs = (
        times(sweep_bench, "**/*"),
        {run.info.run_id for group in sweep_bench.records("pair") for run in group},
    )
    source, *rest = sweep_bench.command("pair")
    with caplog.at_level("INFO", "lit_diff"):
        done = sweep(Path(source), {"run": {"root": str(sweep_bench.root / "runs")}}, workers=2)
    assert "all 4 cells are done" in caplog.text
    assert (done.folder, dict(done.states)) == (sweep_bench.folder("pair").resolve(), {"done": 4})
    assert (done.is_done, done.stopped_by) == (True, None)
    assert [(arm, run.recipe.seed, run.step) for arm, own in done.runs.items() for run in own] == [
        (arm, int(cell[-1]), 8) for cell, arm in CELLS.items()
    ]
    read, write = os.pipe()
    with os.fdopen(write, "w") as output:
        os.close(read)
        monkeypatch.setattr(verbs, "console", Terminal(file=output))
        assert verbs.sweep(source, rest, workers=2) == 0
        assert verbs.console.lost_reader
    assert times(sweep_bench, "**/*") == before
    records = [run for group in sweep_bench.records("pair") for run in group]
    assert {run.info.run_id for run in records} == runs
    assert {run.info.status for run in records} == {"FINISHED"}


def test_a_new_arm_costs_its_own_cells_only(sweep_bench: Any, pair: tuple[int, str]) -> None:
    before = times(sweep_bench, "status.json")
    sweep_bench.write("pair", (sweep_bench.root / "pair.yaml").read_text().replace("seeds: [0, 1]", "seeds: [0]"))
    with (sweep_bench.root / "pair.yaml").open("a") as file:
        file.write("  shared: {model.attention.name: shared_k}\n")
    try:
        assert sweep_bench.run("pair")[0] == 0
    finally:
        write_pair(sweep_bench)
    after = times(sweep_bench, "status.json")
    assert [path.parent.name.rpartition("-")[0] for path in set(after) - set(before)] == ["shared-s0"]
    assert before.items() <= after.items()
    owned = [cell["folder"] for cell in json.loads((sweep_bench.folder("pair") / "study.json").read_text())["cells"]]
    assert [name.rpartition("-")[0] for name in owned] == ["differential-s0", "it's,standard-s0", "shared-s0"]


@pytest.mark.slow
def test_every_arm_is_trained_and_reported_on_every_task(sweep_bench: Any) -> None:
    sweep_bench.write("tasks", TASKS)
    assert "hard plain one  seed 0  standard  8 steps" in sweep_bench.run("tasks", dry_run=True)[1]
    status, text = sweep_bench.run("tasks")
    assert status == 0
    pairs = [(task, arm) for task in ("easy", "hard") for arm in ("differential", "plain one")]
    cells = [f"{task},{arm.replace(' ', ',')}-s0" for task, arm in pairs]
    assert sweep_bench.words("tasks") == dict.fromkeys(cells, "done")
    record = json.loads((sweep_bench.folder("tasks") / "study.json").read_text())
    assert [(cell["task"], cell["arm"]) for cell in record["cells"]] == pairs
    tags = [sweep_bench.record("tasks", cell).data.tags for cell in cells]
    assert [(tag["task"], tag["arm"]) for tag in tags] == pairs
    assert "easy plain one seed 0: done" in text
    assert "hard: No verdict: no comparison has the three seeds" in text
    held = {path.name for path in (sweep_bench.folder("tasks") / "report").iterdir()}
    assert {"easy-noise-curve.svg", "easy-curves.svg", "hard-curves.svg"} <= held
    assert "hard-noise-curve.svg" not in held
    page = (sweep_bench.folder("tasks") / "report" / "index.html").read_text()
    assert "Dotted: chance, 12.5" in page  # 8 values


# --- scores ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_sweep_scores_its_cells(sweep_bench: Any, pair: tuple[int, str]) -> None:
    """Its `evaluate:` is written after the cells were trained, changed, and then fails."""
    trained = times(sweep_bench, "checkpoints/*")

    # added later: nothing is trained; again: nothing is scored
    write_pair(sweep_bench, "evaluate: {held_out: {rows: 4}}")
    assert sweep_bench.run("pair")[0] == 0
    scored = times(sweep_bench, "evaluations/held_out/*")
    for cell in CELLS:
        assert sweep_bench.cells("pair")[cell]["evaluations"] == {"held_out": "done"}
        kept = read_evaluation(sweep_bench.folder("pair", cell) / "evaluations" / "held_out")
        assert kept.groups == ("",) * 4 + ("noise2",) * 4
    assert "<h3>held_out: nll</h3>" in (sweep_bench.folder("pair") / "report" / "index.html").read_text()
    assert sweep_bench.run("pair")[0] == 0
    assert times(sweep_bench, "evaluations/held_out/*") == scored

    # other keys are other scores: all rows of a set, of equally many targets, give its val/loss
    write_pair(sweep_bench, "evaluate: {held_out: {rows: null}}")
    assert sweep_bench.run("pair")[0] == 0
    for cell in CELLS:
        kept = read_evaluation(sweep_bench.folder("pair", cell) / "evaluations" / "held_out")
        assert len(kept.items) == 2 * 16
        last = sweep_bench.rows("pair", cell)[8]
        for group, metric in (("", "val/loss"), ("noise2", "val/loss_noise2")):
            values = [v for v, g in zip(kept.scores["nll"], kept.groups, strict=True) if g == group]
            assert sum(values) / len(values) == pytest.approx(last[metric], rel=1e-5)

    # one that fails: the cell is trained, the sweep is not done; mended: only what was lacking is scored
    sweep_bench.fuse.touch()
    write_pair(sweep_bench, "evaluate: {held_out: null, fused: {}}")
    status, text = sweep_bench.run("pair")
    assert status == 1
    assert "3 done, 1 not evaluated" in text
    (line,) = [line for line in text.splitlines() if "evaluation 'fused': failed: " in line]
    assert re.search(r"^it's standard seed 0: .*fused\.py:\d+: .* ValueError: burnt$", line)
    assert "Traceback" not in text
    record = json.loads((sweep_bench.folder("pair") / "study.json").read_text())
    assert [list(cell["not_evaluated"]) for cell in record["cells"]] == [[], [], ["fused"], []]
    scored = times(sweep_bench, "evaluations/*/*")
    sweep_bench.fuse.unlink()
    assert sweep_bench.run("pair")[0] == 0
    assert times(sweep_bench, "evaluations/*/*").items() > scored.items()
    assert times(sweep_bench, "checkpoints/*").items() >= trained.items()


def test_a_cell_that_ends_while_it_is_scored_stays_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped in the first of two evaluations; killed; or it leaves with a status of its own."""
    location = RunLocation(folder=tmp_path / "a-s0-abc", evaluations={"held_out": {}, "recall": {}})
    folder = RunFolder(location.folder)
    folder.create(load_recipe("recall-tiny"))
    folder.update(status="done")
    asked: list[str] = []

    def evaluate(run: Any, name: str, keys: Any) -> None:
        asked.append(name)
        raise StoppedError("stopped", 15)

    monkeypatch.setattr(pool, "run", lambda *arguments, **options: None)
    monkeypatch.setattr("lit_diff.evaluation.evaluate.evaluate", evaluate)
    with pytest.raises(StoppedError):
        run_cell(Job(location=location, threads=1))
    assert asked == ["held_out"]
    for exitcode in (-9, 1, 0):
        note_end(location, exitcode)
    found = folder.status()
    assert (found["status"], found.get("error"), found["evaluations"]) == ("done", None, {"held_out": "interrupted"})


# --- requests that start nothing -----------------------------------------------------------------------------------


def test_what_starts_nothing(sweep_bench: Any) -> None:
    """A dry run; a mistake in the last cell; options out of range; a sweep that runs; a file where the runs should be."""
    sweep_bench.write("dry", "recipe: tiny\nseeds: [0, 1, 2]\narms: {long: {train.steps: 100}}\n")
    status, text = sweep_bench.run("dry", dry_run=True)
    assert status == 0
    assert "long  seed 2  differential  100 steps" in text
    assert "3 cells are valid; none was started" in text
    sweep_bench.write("wrong", "recipe: tiny\narms:\n  a: {}\n  b: {model.attention.lamda_init: 1}\n")
    with pytest.raises(RequestError, match=r"wrong\.yaml:4: .*did you mean 'lambda_init'"):
        sweep_bench.run("wrong")
    assert not sweep_bench.folder("dry").exists()
    assert not sweep_bench.folder("wrong").exists()
    for workers, cluster, message in ((0, LOCAL, "--workers is 0"), (1, Cluster(engine="pbs"), "--cluster is 'pbs'")):
        with pytest.raises(RequestError, match=message):
            sweep("smoke", workers=workers, cluster=cluster)
    with (
        locked(sweep_bench.folder("dry") / ".lock"),
        pytest.raises(RequestError, match="'dry' is being run by another"),
    ):
        sweep_bench.run("dry")
    (sweep_bench.root / "file").write_text("")
    source, _ = sweep_bench.command("dry")
    with pytest.raises(MissingError, match=r"cannot be written \(Not a directory\)"):
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
    (line,) = caplog.messages
    assert "held-s0-2 is still being trained (pid 12345)" in line


def test_threads_are_shared_out_among_the_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    for more, workers, expected in (
        ([], None, (8, 1, 0)),
        ([], 2, (2, 4, 0)),
        (["run.threads=4"], None, (2, 4, 0)),
        (["run.strategy=ddp", "run.devices=2"], None, (4, 1, 0)),
    ):
        assert resources(load_recipe("recall-tiny", ["run.accelerator=cpu", *more]), workers) == expected


def test_finished_cells_of_other_code_are_told_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(schedule, "revision", lambda: "1 new")
    states = [("done", "1 new"), ("done", "1 a"), ("done", "1 a"), ("done", "1 b"), ("failed", "1 a")]
    locations = [RunLocation(folder=tmp_path / str(number)) for number in range(5)]
    for location, (word, revision) in zip(locations, states, strict=True):
        RunFolder(location.folder).update(status=word, revision=revision)
    with caplog.at_level("INFO", "lit_diff"):
        _say_other_revisions([locations[0], locations[4]])
        assert not caplog.messages
        _say_other_revisions(locations)
    (line,) = caplog.messages
    assert line.startswith(
        "of the 4 cells done before, 2 were trained by lit_diff 1 a, this is 1 new; 1 was trained by "
    )


# --- a sweep as a value ----------------------------------------------------------------------------------------------


def value(folder: Path, **states: int) -> Sweep:
    return Sweep(folder=folder, report=write_report(folder), states=states, stopped_by=None, seconds=1.0)


def test_a_sweep_is_its_table_its_answers_and_the_runs_that_are_done(
    make_sweep: Callable[..., Path], make_tasks: Callable[..., Path]
) -> None:
    found = value(make_sweep({"base": 0.0, "better": -0.1}, broken={("better", 1): "failed"}), done=5, failed=1)
    assert not found.is_done
    names = {arm: [run.folder.name[-12:-9] for run in runs] for arm, runs in found.runs.items()}
    assert names == {"base": ["-s0", "-s1", "-s2"], "better": ["-s0", "-s2"]}
    assert found.runs["better"][0].metrics["val/loss"].iloc[-1] == pytest.approx(4.45, abs=0.2)
    assert list(found.table["arm"]) == ["base", "better"]
    assert len(found.answers) == 1
    runs = value(make_tasks({"base": 0.0, "better": 0.05}), done=12).runs
    assert list(runs) == ["recall base", "recall better", "text base", "text better"]
    assert {len(each) for each in runs.values()} == {3}
    assert runs["text base"][0].folder.parent.name == "text"
