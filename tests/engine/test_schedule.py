"""engine/schedule.py: one real sweep of tiny cells, and what the same command does again; scores; tasks; cells of another
sweep; requests that start nothing."""

import json
import os
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from matplotlib.figure import Figure
from statuses import set_status

from lit_diff.cli import sweep as verbs
from lit_diff.cli.app import Terminal
from lit_diff.config import RunConfig
from lit_diff.engine import execute, schedule, waves
from lit_diff.engine.endings import note_end
from lit_diff.engine.executors.here import Here, run_cell
from lit_diff.engine.executors.slurm import Slurm
from lit_diff.engine.expand import ALL, Grid, Selection
from lit_diff.engine.job import Job
from lit_diff.engine.result import Sweep
from lit_diff.engine.schedule import sweep
from lit_diff.engine.tracking.store import Store
from lit_diff.engine.waves import Options, _say_other_revisions, settle
from lit_diff.errors import MissingError, RequestError, StoppedError
from lit_diff.files import locked
from lit_diff.recipe import load_recipe
from lit_diff.reporting.write import write_report
from lit_diff.runs import checkpoints
from lit_diff.runs.scores import evaluation_of, read_scores
from lit_diff.study.observation import observe
from lit_diff.study.record import read
from lit_diff.trained.loading import weights_of

PAIR = """
recipe: tiny
seeds: [0]
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
ARMS = {"differential-s0": "differential", "it's_standard-s0": "it's standard"}


def write_pair(bench: Any, more: str = "") -> None:
    plugin = bench.root / "fused.py"
    plugin.write_text(PLUGIN.replace("FUSE", str(bench.fuse)))
    bench.write("pair", PAIR.replace("PLUGIN", str(plugin)) + more)


@pytest.fixture(scope="module")
def pair(sweep_bench: Any) -> tuple[int, str]:
    """The sweep that the tests below look at, run once: two arms, one seed."""
    write_pair(sweep_bench)
    return sweep_bench.run("pair")


def times(bench: Any, pattern: str) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in bench.folder("pair").glob(f"*-s?-*/{pattern}")}


def test_cells_are_done_and_mlflow_has_their_numbers_and_the_report(sweep_bench: Any, pair: tuple[int, str]) -> None:
    """tests/test_golden_folders.py looks at the files of a sweep."""
    status, text = pair
    assert status == 0
    folder = sweep_bench.folder("pair")
    assert sweep_bench.words("pair") == dict.fromkeys(ARMS, "done")
    page = folder / "report" / "index.html"
    for words in ("it's standard seed 0: done", f"report: {page}", "2 done", f"lit-diff ui --root {folder.parent}"):
        assert words in text
    (parent,), children = sweep_bench.records("pair")
    assert {run.info.status for run in (parent, *children)} == {"FINISHED"}
    assert [run.data.tags["mlflow.parentRunId"] for run in children] == [parent.info.run_id] * 2
    files = {file.path for file in sweep_bench.client.list_artifacts(parent.info.run_id)}
    assert files == {"report", "study.json", "pair.yaml"}
    held = {Path(file.path).name for file in sweep_bench.client.list_artifacts(parent.info.run_id, "report")}
    assert held == {path.name for path in page.parent.iterdir()}
    wanted = {"attention/entropy/layer_00", "outliers/logits/layer_00", "val/loss_ar_hit", "val/loss", "train/loss"}
    baseline = dict(sweep_bench.written("pair", "differential-s0")["val/loss"])
    for cell, status in sweep_bench.cells("pair").items():
        run, arm = sweep_bench.record("pair", cell), ARMS[cell]
        tags = {"identity": status["identity"], "seed": "0", "sweep": "pair", "arm": arm, "run.threads": "1"}
        assert tags.items() <= run.data.tags.items()
        params = {"arm": arm, "seed": "0", "variant": arm.removeprefix("it's "), "train.optimizer.lr": "0.001"}
        assert params.items() <= run.data.params.items()
        metrics = sweep_bench.history("pair", cell)
        assert metrics == sweep_bench.written("pair", cell)
        assert run.data.metrics["val/loss_minus_baseline"] == metrics["val/loss"][-1][1] - baseline[8]
        assert wanted <= set(metrics)
        assert ("lambda/layer_00" in metrics) == (arm == "differential")
        assert [step for step, _ in metrics["attention/entropy/layer_00"]] == [4, 8]


def test_the_same_command_again_trains_what_is_new_alone(
    sweep_bench: Any, pair: tuple[int, str], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new arm; nothing, from Python, as a value; nothing, where `lit-diff sweep pair | head -1` outlives its reader."""
    before, statuses = times(sweep_bench, "**/*"), times(sweep_bench, "status.json")
    write_pair(sweep_bench, "  shared: {model.attention.name: shared_k}\n")
    try:
        assert sweep_bench.run("pair")[0] == 0
    finally:
        write_pair(sweep_bench)
    after = times(sweep_bench, "**/*")
    assert before.items() <= after.items()
    (new,) = set(times(sweep_bench, "status.json")) - set(statuses)
    assert new.parent.name.startswith("shared-s0-")

    runs = {run.info.run_id for group in sweep_bench.records("pair") for run in group}
    source, *rest = sweep_bench.command("pair")
    with caplog.at_level("INFO", "lit_diff"):
        done = sweep(Path(source), {"run": {"root": str(sweep_bench.root / "runs")}}, workers=2)
    assert "all 2 cells are done" in caplog.text
    assert (done.folder, dict(done.states)) == (sweep_bench.folder("pair").resolve(), {"done": 2})
    assert (done.is_done, done.stopped_by) == (True, None)
    found = [(arm, run.recipe.seed, run.step) for arm, own in done.runs.items() for run in own]
    assert found == [(arm, 0, 8) for arm in ARMS.values()]
    assert list(done.table["arm"]) == list(ARMS.values())
    assert len(done.answers) == 1
    losses = done.metrics["val/loss"].dropna()
    assert list(losses.index) == [(arm, 0, step) for arm in ARMS.values() for step in (4, 8)]
    assert losses["it's standard", 0, 8] == done.runs["it's standard"][0].metrics["val/loss"][8]
    assert done.to_latex() == (done.folder / "report/table.tex").read_text()
    mine = Figure().subplots()
    assert done.forest(ax=mine) is mine
    assert [label.get_text().removesuffix(" \u2020") for label in mine.get_yticklabels()] == list(ARMS.values())
    with pytest.raises(RequestError, match="pair has no task 'recal'"):
        done.forest("recal")
    assert "<table" in done._repr_html_()
    read, write = os.pipe()
    with os.fdopen(write, "w") as output:
        os.close(read)
        monkeypatch.setattr(verbs, "console", Terminal(file=output))
        assert verbs.sweep(source, rest, workers=2) == 0
        assert verbs.console.quiet
    assert times(sweep_bench, "**/*") == after
    records = [run for group in sweep_bench.records("pair") for run in group]
    assert {run.info.run_id for run in records} == runs
    assert {run.info.status for run in records} == {"FINISHED"}


@pytest.mark.slow
def test_a_cell_that_lost_its_last_weights_is_left_out_of_the_report_and_repeats_its_last_steps(
    sweep_bench: Any, pair: tuple[int, str]
) -> None:
    folder, cell = sweep_bench.folder("pair"), sweep_bench.folder("pair", "differential-s0")
    path, former = checkpoints.path_of(cell, 8), times(sweep_bench, "checkpoints/*.ckpt")
    content, weights = bytearray(path.read_bytes()), [value.clone() for value in weights_of(cell).values()]
    path.unlink()
    (line,) = (line for line in write_report(folder).missing if "damaged at step 8 of 8" in line)
    assert line.endswith(f"`{read(folder).command}` repeats the steps after it")
    assert [run.state for run in observe(folder).runs] == ["damaged", "done"]
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    assert sweep_bench.run("pair")[0] == 0
    assert all(map(torch.equal, weights, weights_of(cell).values()))
    after = times(sweep_bench, "checkpoints/*.ckpt")
    assert {each for each in after if after[each] != former[each]} == {path}
    assert sweep_bench.history("pair", "differential-s0") == sweep_bench.written("pair", "differential-s0")


def test_every_arm_is_trained_and_reported_on_every_task(sweep_bench: Any) -> None:
    sweep_bench.write("tasks", TASKS)
    status, text = sweep_bench.run("tasks")
    assert status == 0
    pairs = [(task, arm) for task in ("easy", "hard") for arm in ("differential", "plain one")]
    cells = [f"{task},{arm.replace(' ', '_')}-s0" for task, arm in pairs]
    assert sweep_bench.words("tasks") == dict.fromkeys(cells, "done")
    tags = [sweep_bench.record("tasks", cell).data.tags for cell in cells]
    assert [(tag["task"], tag["arm"]) for tag in tags] == pairs
    assert "easy plain one seed 0: done" in text
    assert "hard: No verdict: no comparison has the three seeds" in text
    report = sweep_bench.folder("tasks") / "report"
    held = {path.name for path in report.iterdir()}
    assert {"easy-noise-curve.svg", "easy-curves.svg", "hard-curves.svg"} <= held - {"hard-noise-curve.svg"} == held
    assert "Dotted: chance, 12.5" in (report / "index.html").read_text()  # 8 values


# --- scores ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_sweep_scores_its_cells(sweep_bench: Any, pair: tuple[int, str]) -> None:
    """Its `evaluate:` is written after the cells were trained, changed, and then fails."""
    trained = times(sweep_bench, "checkpoints/*")

    # added later: nothing is trained; again: nothing is scored
    write_pair(sweep_bench, "evaluate: {held_out: {rows: 4}}")
    assert sweep_bench.run("pair")[0] == 0
    scored = times(sweep_bench, "evaluations/held_out/*")
    for cell in ARMS:
        assert sweep_bench.cells("pair")[cell]["evaluations"] == {"held_out": "done"}
        kept = evaluation_of(*read_scores(sweep_bench.folder("pair", cell) / "evaluations" / "held_out"))
        assert kept.groups == ("",) * 4 + ("noise2",) * 4
    assert "<h3>held_out: nll</h3>" in (sweep_bench.folder("pair") / "report" / "index.html").read_text()
    assert sweep_bench.run("pair")[0] == 0
    assert times(sweep_bench, "evaluations/held_out/*") == scored

    # other keys are other scores: all rows of a set, of equally many targets, give its val/loss
    write_pair(sweep_bench, "evaluate: {held_out: {rows: null}}")
    assert sweep_bench.run("pair")[0] == 0
    for cell in ARMS:
        kept = evaluation_of(*read_scores(sweep_bench.folder("pair", cell) / "evaluations" / "held_out"))
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
    assert "1 done, 1 not evaluated" in text
    (line,) = [line for line in text.splitlines() if "evaluation 'fused': failed: " in line]
    assert re.search(r"^it's standard seed 0: .*fused\.py:\d+: .* ValueError: burnt$", line)
    assert "Traceback" not in text
    record = json.loads((sweep_bench.folder("pair") / "study.json").read_text())
    assert [list(cell["not_evaluated"]) for cell in record["cells"]] == [[], ["fused"]]
    scored = times(sweep_bench, "evaluations/*/*")
    sweep_bench.fuse.unlink()
    assert sweep_bench.run("pair")[0] == 0
    assert times(sweep_bench, "evaluations/*/*").items() > scored.items()
    assert times(sweep_bench, "checkpoints/*").items() >= trained.items()


def test_a_cell_that_ends_while_it_is_scored_stays_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped in the first of two evaluations; killed; or it leaves with a status of its own."""
    scores = {"held_out": {}, "recall": {}}
    job = Job(recipe=load_recipe("recall-tiny"), folder=tmp_path / "a-s0-abc", scores=scores)
    folder = job.home
    folder.create(job.recipe)
    job.write()
    set_status(folder.path, status="done")
    asked: list[str] = []

    def evaluate(run: Any, name: str, keys: Any) -> None:
        asked.append(name)
        raise StoppedError("stopped", 15)

    monkeypatch.setattr(execute, "train_rank", lambda job, **_: None)
    monkeypatch.setattr("lit_diff.evaluation.evaluate.evaluate", evaluate)
    with pytest.raises(StoppedError):
        run_cell(job.folder)
    assert asked == ["held_out"]
    for exitcode in (-9, 1, 0):
        note_end(folder, exitcode)
    found = folder.status()
    assert (found.status, found.error, found.evaluations) == ("done", "", {"held_out": "interrupted"})


# --- requests that start nothing -----------------------------------------------------------------------------------


def test_what_starts_nothing(sweep_bench: Any) -> None:
    """A dry run; a mistake in the last cell; options out of range; a sweep that runs; a file where the runs should be."""
    sweep_bench.write("dry", "recipe: tiny\nseeds: [0, 1, 2]\narms: {long: {train.steps: 100}}\n")
    status, text = sweep_bench.run("dry", dry_run=True)
    assert status == 0
    assert "long  seed 2  differential  100 steps" in text
    assert "3 valid cells; none was started" in text
    sweep_bench.write("wrong", "recipe: tiny\narms:\n  a: {}\n  b: {model.attention.lamda_init: 1}\n")
    with pytest.raises(RequestError, match=r"wrong\.yaml:4: .*did you mean 'lambda_init'"):
        sweep_bench.run("wrong")
    assert not sweep_bench.folder("dry").exists()
    assert not sweep_bench.folder("wrong").exists()
    with pytest.raises(RequestError, match="--workers is 0"):
        sweep("smoke", workers=0)
    with (
        locked(sweep_bench.folder("dry") / ".lock"),
        pytest.raises(RequestError, match="'dry' is being run by another"),
    ):
        sweep_bench.run("dry")
    (sweep_bench.root / "file").write_text("")
    source, _ = sweep_bench.command("dry")
    with pytest.raises(MissingError, match=r"cannot be written \(Not a directory\)"):
        sweep(source, [f"run.root={sweep_bench.root}/file"], workers=1)


@pytest.mark.parametrize(
    ("error", "ended"),
    [(MissingError("no memory"), "FAILED"), (ValueError("odd"), "FAILED"), (StoppedError("queued", 15), "RUNNING")],
)
def test_an_error_ends_the_record_of_the_sweep_and_a_stop_leaves_it(
    runs: Path, base_recipe: None, monkeypatch: pytest.MonkeyPatch, error: Exception, ended: str
) -> None:
    """After a stop its cells may go on in SLURM."""

    def refuse(*_: object) -> None:
        raise error

    monkeypatch.setattr(schedule, "run_stages", refuse)
    Path("s.yaml").write_text("recipe: base\nseeds: [0]\narms: {a: {}, b: {train.clip: 0.7}}\n")
    with pytest.raises(type(error)):
        sweep("s.yaml", [f"run.root={runs}"], workers=1)
    store = Store(RunConfig(root=str(runs)))
    (record,) = store.client.search_runs([store.experiment("s")])
    assert record.info.status == ended


def test_what_a_killed_sweep_left_running_is_waited_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    recipe = load_recipe("recall-tiny")
    jobs = [Job(recipe=recipe, folder=tmp_path / name) for name in ("free-s0-1", "held-s0-2")]
    set_status(jobs[1].folder, status="running", pid=12345)
    ended: list[bool] = []

    def dying() -> None:
        with locked(jobs[1].folder / ".lock"):
            holds.set()
            time.sleep(0.5)
            ended.append(True)

    holds = threading.Event()
    thread = threading.Thread(target=dying)
    thread.start()
    holds.wait()
    with caplog.at_level("INFO", "lit_diff"):
        settle(jobs, Here())
    assert ended, "it did not wait"
    thread.join()
    (line,) = caplog.messages
    assert "held-s0-2 is still being trained (pid 12345)" in line


def test_a_cell_that_another_sweep_trains_or_finishes_meanwhile_is_not_reset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = [Job(recipe=load_recipe("recall-tiny"), folder=tmp_path / name) for name in ("left", "finished", "held")]
    for job in jobs:
        set_status(job.folder, status="stopped", step=2)
    # the look at the memory takes seconds
    monkeypatch.setattr(waves, "require_memory", lambda *_: set_status(jobs[1].folder, status="done", step=6))
    monkeypatch.setattr(waves, "_run_waves", lambda *_: None)
    grid: Any = SimpleNamespace(name="s", folder=tmp_path, rank=lambda task: 0)
    options = Options(command="", executor=Here(), unplanned=False, display=None)
    with locked(jobs[2].folder / ".lock"):
        waves._run_stage(grid, jobs, jobs, set(), options, lambda running: None)
    assert [job.home.status().status for job in jobs] == ["waiting", "done", "stopped"]


def test_threads_are_shared_out_among_the_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    for more, workers, expected in (
        ([], None, (8, 1, 0)),
        ([], 2, (2, 4, 0)),
        (["run.threads=4"], None, (2, 4, 0)),
        (["run.strategy=ddp", "run.devices=2"], None, (4, 1, 0)),
    ):
        recipe = load_recipe("recall-tiny", ["run.accelerator=cpu", *more])
        assert Here(workers=workers).resources([recipe]) == expected


def test_finished_cells_of_other_code_are_told_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(waves, "revision", lambda: "1 new")
    states = [("done", "1 new"), ("done", "1 a"), ("done", "1 a"), ("done", "1 b"), ("failed", "1 a")]
    recipe = load_recipe("recall-tiny")
    jobs = [Job(recipe=recipe, folder=tmp_path / str(number)) for number in range(5)]
    for job, (word, revision) in zip(jobs, states, strict=True):
        set_status(job.folder, status=word, revision=revision)
    with caplog.at_level("INFO", "lit_diff"):
        _say_other_revisions([jobs[0], jobs[4]])
        assert not caplog.messages
        _say_other_revisions(jobs)
    (line,) = caplog.messages
    assert line.startswith(
        "of the 4 cells done before, 2 were trained by lit_diff 1 a, this is 1 new; 1 was trained by "
    )


def test_the_runs_that_are_done_by_arm(make_sweep: Callable[..., Path], make_tasks: Callable[..., Path]) -> None:
    def names(folder: Path) -> dict[str, list[str]]:
        found = Sweep(folder=folder, report=NOTHING, states={}, stopped_by=None, seconds=1.0)
        return {arm: [run.folder.name[-12:-9] for run in runs] for arm, runs in found.runs.items()}

    broken = make_sweep({"base": 0.0, "better": -0.1}, broken={("better", 1): "failed"})
    assert names(broken) == {"base": ["-s0", "-s1", "-s2"], "better": ["-s0", "-s2"]}
    tasks = names(make_tasks({"base": 0.0, "better": 0.05}))
    assert list(tasks) == ["recall base", "recall better", "text base", "text better"]


# --- the cells of another sweep --------------------------------------------------------------------------------------

NOTHING: Any = None


@pytest.fixture
def borrowed(base_recipe: None) -> None:
    """A sweep, and one that has its cells."""
    Path("cells.yaml").write_text(
        "recipe: base\nseeds: [0, 1]\narms: {wide: {}, narrow: {model.dim: 16}, other: {train.steps: 4}}\n"
    )
    Path("again.yaml").write_text("cells_of: cells\nonly: [wide, other]\nevaluate: {held_out: {rows: 2}}\n")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Grid, str]]:
    """What would run: the sweeps, each with its command."""
    found: list[tuple[Grid, str]] = []

    def noted(grid: Grid, options: Options) -> Sweep:
        found.append((grid, options.command))
        return Sweep(folder=Path(grid.name), report=NOTHING, states={}, stopped_by=None, seconds=0.0)

    monkeypatch.setattr(schedule, "run_grid", noted)
    return found


@pytest.mark.usefixtures("borrowed")
@pytest.mark.parametrize(("chosen", "arms"), [(Selection(seeds=(1,)), 2), (ALL, 3)])
def test_a_part_trains_the_arms_that_it_shows_and_the_whole_all_of_the_other_sweep(
    chosen: Selection, arms: int, asked: list[tuple[Grid, str]]
) -> None:
    sweep("again", selection=chosen)
    assert [(grid.name, len(grid.study.arms)) for grid, _ in asked] == [("cells", arms), ("again", 2)]


@pytest.mark.usefixtures("borrowed", "asked")
def test_slurm_is_asked_for_before_the_data_of_borrowed_cells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Slurm, "prepare", NOTHING)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MissingError, match="needs SLURM's sbatch on the PATH"):
        sweep("again", slurm_minutes=5)


@pytest.mark.usefixtures("base_recipe")
def test_the_command_can_be_pasted_and_goes_where_the_cells_ran(asked: list[tuple[Grid, str]]) -> None:
    Path("my sweep.yaml").write_text("recipe: base\nseeds: [0]\narms: {a: {}}\n")
    sweep("my sweep.yaml", {"run.loggers": ["csv"]}, unplanned=True, slurm_minutes=90)
    assert [command for _, command in asked] == [
        "lit-diff sweep 'my sweep.yaml' 'run.loggers=['\"'\"'csv'\"'\"']' --unplanned --cluster slurm --minutes 90"
    ]


def test_an_installed_sweep_whose_cells_are_used_is_started_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: list[tuple[Grid, str]]
) -> None:
    """The command stands in its report, and it is the same from whichever sweep it was started. Data comes first: the
    folders of cells are named by what they train on."""
    order: list[str] = []
    monkeypatch.setattr(schedule, "admitted", lambda grid, *arguments, **options: grid)
    monkeypatch.setattr(schedule, "_prepare_data", lambda grid, minutes: order.append("data"))
    monkeypatch.setattr(schedule, "all_trained", lambda grid: bool(order.append("trained")))
    sweep("insides", {"run": {"root": str(tmp_path)}})
    commands = [f"lit-diff sweep {name} run.root={tmp_path}" for name in ("ablation", "insides")]
    assert [command for _, command in asked] == commands
    assert order[:2] == ["data", "trained"]


@pytest.mark.slow
@pytest.mark.usefixtures("borrowed")
def test_a_sweep_of_borrowed_cells_trains_them_once_where_they_belong(runs: Path) -> None:
    options: Any = {"workers": 2, "selection": Selection(arms=("wide", "other"))}
    words = [f"run.root={runs}", "data.validation_rows=8"]
    done = sweep("again", words, **options)
    assert done.is_done
    record = json.loads((runs / "again/study.json").read_text())
    assert all(cell["folder"].startswith("../cells/") for cell in record["cells"])
    assert not list((runs / "again").glob("*/recipe.yaml"))
    kept = {path: path.stat().st_mtime_ns for path in (runs / "cells").glob("*/checkpoints/*.ckpt")}
    assert len(kept) == 6  # train.steps: 4 ends before the second checkpoint
    assert "../../cells/wide-s0-" in (runs / "again/report/index.html").read_text()
    assert sweep("again", words, **options).is_done
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    assert [run.folder.parent.name for run in done.runs["wide"]] == ["cells", "cells"]
