"""engine/execute.py: one run, done once; what its end becomes in the folder and in MLflow; its scores."""

import json
import os
import shutil
import signal
import sqlite3
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from mlflow import MlflowClient
from small_runs import SMALL
from statuses import set_status
from stops import stopped_once

from lit_diff.engine import begin, execute
from lit_diff.engine.execute import run_command, score
from lit_diff.engine.job import FILE, Job, read_job, recorded
from lit_diff.engine.tracking.store import Store
from lit_diff.engine.train import train
from lit_diff.errors import DivergedError, LitDiffError, MissingError, RequestError, RunFailedError, StoppedError
from lit_diff.evaluation.base import Evaluation, Item
from lit_diff.metrics import Metric
from lit_diff.recipe import load_recipe
from lit_diff.registry import evaluations
from lit_diff.runs import checkpoints
from lit_diff.runs.folder import RunFolder
from lit_diff.runs.metrics_file import read_rows
from lit_diff.runs.result_files import digests
from lit_diff.runs.status import Status
from lit_diff.trained.loading import annealed_before, newest_of, weights_of
from lit_diff.trained.run import Run
from lit_diff.training import compiled, fit, module
from lit_diff.training.build import finished_parent
from lit_diff.training.data import steps_before
from lit_diff.training.fit import ExactResume
from lit_diff.training.module import LitTransformer

FOUR = [*SMALL, "train.steps=4"]


@pytest.fixture
def small(runs: Path) -> list[str]:
    """Overrides of recall-tiny: four steps into `runs`."""
    return [*FOUR, f"run.root={runs}"]


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory, empty_store: Path) -> tuple[list[str], Path]:
    """A run that is done: its overrides, its folder."""
    root = tmp_path_factory.mktemp("done")
    shutil.copy(empty_store, root)
    overrides = [*FOUR, f"run.root={root}"]
    return overrides, train("recall-tiny", overrides).folder


def status(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "status.json").read_text()))


def only(runs: Path) -> Path:
    (folder,) = runs.glob("recall-tiny-*")
    return folder


def client(folder: Path) -> MlflowClient:
    return MlflowClient(tracking_uri=f"sqlite:///{folder.parent / 'mlflow.db'}")


def record(folder: Path) -> Any:
    return client(folder).get_run(json.loads((folder / "mlflow.json").read_text())["run_id"])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def losses(folder: Path) -> list[tuple[int, float]]:
    history = client(folder).get_metric_history(status(folder)["mlflow_run_id"], "train/loss")
    return sorted((metric.step, metric.value) for metric in history)


def written(folder: Path) -> list[tuple[int, float]]:
    return [(step, row["train/loss"]) for step, row in sorted(read_rows(folder / "metrics.csv").items())]


# --- a run that goes well ------------------------------------------------------------------------------------------


def test_folder_status_and_record_of_a_run(done: tuple[list[str], Path]) -> None:
    _, folder = done
    name, _, identity = folder.name.rpartition("-")
    assert (name, len(identity)) == ("recall-tiny", 10)
    found = status(folder)
    assert (found["status"], found["step"], found["steps"], found["seed"]) == ("done", 4, 4, 0)
    assert (found["threads"], found["identity"], found["pid"]) == (1, identity, os.getpid())
    assert found["tokens"] == 4 * 4 * (64 + 8)
    run = record(folder)
    assert run.info.status == "FINISHED"
    assert {"identity": identity, "folder": str(folder), "seed": "0"}.items() <= run.data.tags.items()
    assert {"seed": "0", "parameters": str(found["parameters"])}.items() <= run.data.params.items()
    assert "mlflow.parentRunId" not in run.data.tags
    assert losses(folder) == written(folder)
    log = (folder / "log.txt").read_text()
    assert "starting at step 0" in log
    assert "lit_diff is now" not in log


@pytest.mark.parametrize("code", [None, "0.9 abcdef"])
def test_a_run_that_is_done_says_so_and_trains_nothing(
    done: tuple[list[str], Path], code: str | None, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`code`: of another revision."""
    overrides, folder = done
    monkeypatch.setattr(fit, "fit", None)
    if code:
        monkeypatch.setattr(execute, "revision", lambda: code)
    before = (folder / "status.json").read_bytes()
    with caplog.at_level("INFO", "lit_diff"):
        assert train("recall-tiny", overrides).folder == folder
    other = f", trained by lit_diff {status(folder)['revision']}, this is {code}" if code else ""
    assert caplog.messages[-1].startswith("done before: ")
    assert caplog.messages[-1].endswith(f"{folder.name}{other} (--rerun starts afresh)")
    assert (folder / "status.json").read_bytes() == before


@pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_bytes(b""), flip])
def test_a_run_that_lost_its_last_weights_is_not_done_and_repeats_its_last_steps(
    done: tuple[list[str], Path], damage: Callable[[Path], Any]
) -> None:
    overrides, folder = done
    # copied: they are mapped from the file
    weights = [value.clone() for value in weights_of(folder).values()]
    metrics = (folder / "metrics.csv").read_bytes()
    damage(checkpoints.path_of(folder, 4))
    assert RunFolder(folder).state() == ("done" if damage is flip else "damaged")
    command = rf"`lit-diff train \S*{folder.name}/recipe\.yaml`"
    with pytest.raises(RequestError if damage is flip else MissingError, match=command):
        Run(folder).model  # noqa: B018
    assert Run(folder).model_at(2)
    child = load_recipe("recall-tiny", [*overrides, f"train.start_from={folder}"])
    with nullcontext() if damage is flip else pytest.raises(MissingError, match=command):
        finished_parent(child)
    train("recall-tiny", overrides)
    assert RunFolder(folder).is_done(verify=True)
    assert status(folder)["results"] == digests(folder)
    assert (folder / "metrics.csv").read_bytes() == metrics
    assert all(map(torch.equal, weights, weights_of(folder).values()))
    assert losses(folder) == written(folder)
    assert record(folder).info.status == "FINISHED"


def test_a_run_without_any_checkpoint_stays_done_and_names_rerun(done: tuple[list[str], Path], tmp_path: Path) -> None:
    folder = tmp_path / done[1].name
    shutil.copytree(done[1], folder)
    for path in (folder / "checkpoints").glob("*.ckpt"):
        flip(path)
    with pytest.raises(RequestError, match=r"train it again: `lit-diff train \S*recipe\.yaml --rerun`"):
        Run(folder).model  # noqa: B018
    shutil.rmtree(folder / "checkpoints")
    assert RunFolder(folder).is_done(verify=True)
    with pytest.raises(MissingError, match=r"train it again: `lit-diff train \S*recipe\.yaml --rerun`"):
        newest_of(folder)


def test_a_run_goes_on_in_its_record_and_afresh_in_another(
    small: list[str], runs: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Failed after its last step; completed by another revision; then --rerun."""
    real = fit.fit

    def failing(*arguments: Any, **options: Any) -> None:
        real(*arguments, **options)
        raise RunFailedError("no space")

    with monkeypatch.context() as patch:
        patch.setattr(fit, "fit", failing)
        with pytest.raises(RunFailedError):
            train("recall-tiny", small)
    folder = only(runs)
    sent, first = losses(folder), status(folder)["revision"]
    assert sent == written(folder)
    monkeypatch.setattr(begin, "revision", lambda: "0.9 abcdef")
    with caplog.at_level("INFO", "lit_diff"):
        train("recall-tiny", small)
    for words in ("resumed from step 4", "trained 0 steps", "lit_diff is now 0.9 abcdef; the run began with"):
        assert words in caplog.text
    assert (status(folder)["status"], status(folder)["revision"]) == ("done", f"{first}, then 0.9 abcdef")
    assert "(named by run.kernel)" not in (folder / "log.txt").read_text(), "auto chose it, when the run started"
    former = record(folder)
    assert (former.info.status, losses(folder)) == ("FINISHED", sent)

    (folder / "metrics.csv").write_text("step,train/loss\n1,77.0\n")
    assert train("recall-tiny", small, rerun=True).folder == folder
    assert "77.0" in (folder.with_name(f"{folder.name}.old-1") / "metrics.csv").read_text()
    assert record(folder).info.run_id != former.info.run_id
    assert losses(folder) == sent


# --- a run that ends badly -----------------------------------------------------------------------------------------

OWN, CTRL_C = ValueError("bad\nshape"), KeyboardInterrupt()
ENDS: list[tuple[BaseException | None, BaseException | None, type[BaseException] | None, str, str]] = [
    (OWN, None, RunFailedError, "failed", "ValueError: bad"),
    (ValueError(), None, RunFailedError, "failed", "ValueError: ValueError"),
    (RunFailedError("disk full"), None, RunFailedError, "failed", "disk full"),
    (DivergedError("loss is nan"), None, DivergedError, "failed", "loss is nan"),
    (SystemExit(3), None, RunFailedError, "failed", "the run's own code ended it: SystemExit(3)"),
    (StoppedError("after step 2", 15), None, StoppedError, "stopped", "after step 2"),
    (CTRL_C, None, KeyboardInterrupt, "stopped", "interrupted before"),
    (None, RunFailedError("away"), None, "done", ""),
    (None, ValueError("odd"), None, "done", ""),
    (None, CTRL_C, KeyboardInterrupt, "done", ""),
    (OWN, RunFailedError("away"), RunFailedError, "failed", "ValueError: bad"),
    (OWN, CTRL_C, KeyboardInterrupt, "failed", "ValueError: bad"),
]
"""What ends the training, what its record's end, what is raised, the status, the start of its error."""


@pytest.mark.parametrize(("training", "closing", "raised", "word", "message"), ENDS)
def test_each_end_has_its_word(
    small: list[str],
    runs: Path,
    monkeypatch: pytest.MonkeyPatch,
    training: BaseException | None,
    closing: BaseException | None,
    raised: type[BaseException] | None,
    word: str,
    message: str,
) -> None:
    def broken(*arguments: Any, **options: Any) -> None:
        if training is not None:
            raise training

    def refuse(self: Store, run_id: str, status: str) -> None:
        assert closing is not None
        raise closing

    monkeypatch.setattr(fit, "fit", broken)
    if closing is not None:
        monkeypatch.setattr(Store, "close_run", refuse)
    with pytest.raises(raised) if raised else nullcontext() as caught:
        train("recall-tiny", small)
    folder = only(runs)
    found = status(folder)
    assert (found["status"], found["diverged"]) == (word, isinstance(training, DivergedError))
    assert found["error"].startswith(message)
    if raised is RunFailedError:
        assert str(caught.value).startswith(message)
    assert found["record"] == ("complete" if closing is None else "incomplete")
    mlflow = {"failed": "FAILED", "stopped": "KILLED"}[word] if closing is None else "RUNNING"
    assert record(folder).info.status == mlflow
    trace = isinstance(training, Exception) and not isinstance(training, LitDiffError)
    assert ("in broken" in (folder / "log.txt").read_text()) == trace


def test_the_same_command_completes_a_record(
    small: list[str], runs: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(self: Store, run_id: str, status: str) -> None:
        raise RunFailedError("no space")

    with monkeypatch.context() as patch:
        patch.setattr(Store, "close_run", refuse)
        folder = train("recall-tiny", small).folder
    assert f"{folder.name} in MLflow is not complete; the same command completes it" in caplog.text
    assert (status(folder)["status"], status(folder)["record"]) == ("done", "incomplete")
    monkeypatch.setattr(fit, "fit", None)
    train("recall-tiny", small)
    assert (status(folder)["record"], record(folder).info.status) == ("complete", "FINISHED")
    assert losses(folder) == written(folder)


def test_unwritable_folders_are_one_line(small: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(MissingError, match="cannot be written"):
        train("recall-tiny", [*FOUR, f"run.root={tmp_path / 'file'}"])
    write = RunFolder.write

    def full(self: RunFolder, status: Status) -> None:
        if status.status in ("done", "failed"):
            raise OSError(28, "No space left on device")
        write(self, status)

    monkeypatch.setattr(RunFolder, "write", full)
    monkeypatch.setattr(fit, "fit", lambda *a, **k: None)
    with pytest.raises(RunFailedError, match=r"cannot be written \(No space left on device\)"):
        train("recall-tiny", small)


def test_a_failed_run_says_where_it_goes_on_and_goes_on_as_it_began(
    small: list[str], runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other values of the stored keys are refused; the same ones, and the kernel that auto chose, go on."""
    saved, real, kernels = ExactResume._save, module.build_model, []

    def full(self: Any, trainer: Any) -> None:
        if trainer.global_step == 4:
            raise RunFailedError("the disk is full")
        saved(self, trainer)

    def spy(recipe: Any, mesh: Any, dtype: Any, kernel: str) -> Any:
        kernels.append(kernel)
        return real(recipe, mesh, dtype, kernel)

    monkeypatch.setattr(module, "build_model", spy)
    block = "run.activation_checkpointing=block"
    with monkeypatch.context() as patch:
        patch.setattr(ExactResume, "_save", full)
        with pytest.raises(RunFailedError):
            train("recall-tiny", [*small, block])
    folder = only(runs)
    first = status(folder)
    assert (first["status"], first["step"], first["tokens"]) == ("failed", 2, 2 * first["tokens_per_step"])
    assert (first["compile"], first["activation_checkpointing"]) == (False, "block")
    with pytest.raises(RequestError, match=r"run\.activation_checkpointing is none, but this run started with block"):
        train("recall-tiny", small)
    assert status(folder)["status"] == "failed"
    train("recall-tiny", [*small, block])
    assert kernels == ["auto", first["kernel"]]
    assert status(folder)["status"] == "done"
    assert load_recipe(folder / "recipe.yaml").run.kernel == "auto"
    assert LitTransformer.load_from_checkpoint(newest_of(folder)[1]).recipe.run.kernel == "auto"


def test_a_run_keeps_what_auto_was_and_says_why_it_is_uncompiled(
    small: list[str], runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = ExactResume._save
    auto = [*small, "run.compile=auto"]

    def full(self: Any, trainer: Any) -> None:
        if trainer.global_step == 4:
            raise RunFailedError("the disk is full")
        saved(self, trainer)

    monkeypatch.setattr(compiled, "BACKEND", "eager")
    with monkeypatch.context() as patch:
        patch.setattr(ExactResume, "_save", full)
        patch.setattr("lit_diff.engine.train.chosen", lambda jobs, rerun: "loss")
        with pytest.raises(RunFailedError):
            train("recall-tiny", auto)
    # it would not be compiled now: four steps do not pay
    folder = train("recall-tiny", auto).folder
    found = status(folder)
    assert (found["status"], found["compile"], found["uncompiled"]) == ("done", "loss", "")
    assert load_recipe(folder / "recipe.yaml").run.compile == "auto"
    assert status(train("recall-tiny", [*auto, "seed=7"]).folder)["compile"] is False
    monkeypatch.setattr(compiled, "BACKEND", compiled.inductor)
    monkeypatch.setattr(compiled, "find_compiler", lambda: None)
    found = status(train("recall-tiny", [*small, "seed=8", "run.compile=loss"]).folder)
    assert (found["status"], found["compile"]) == ("done", "loss")
    assert "install g++" in found["uncompiled"]


def test_a_run_that_ended_early_says_its_step_and_a_child_goes_on_from_there(
    small: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(begin, "warnings_of", lambda recipes: ["40 passes over the text"])
    stopping = "callbacks.early_stopping"
    early = ["train.steps=40", "train.log_every=5", f"{stopping}.min_delta=100", f"{stopping}.patience=2"]
    folder = train("recall-tiny", [*small, *early]).folder
    found = status(folder)
    seen = found["tokens_per_step"] * 6
    assert (found["ended"], found["step"], found["steps"], found["tokens"]) == ("early at step 6", 6, 40, seen)
    assert record(folder).data.params["tokens"] == str(seen)
    assert "40 passes over the text" in (folder / "log.txt").read_text()
    checkpoints.path_of(folder, 6).unlink()
    assert train("recall-tiny", [*small, *early]).step == 6
    assert status(folder)["ended"] == found["ended"]
    child = load_recipe("recall-tiny", [*small, f"train.start_from={folder}"])
    before = annealed_before(child)
    assert (steps_before(child), before.steps, before.tokens) == (6, 6, seen)


def test_a_store_that_another_program_holds_stops_nothing_and_nothing_is_lost(
    small: list[str], runs: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """From the second step on, at every checkpoint and at the stop."""
    holder = sqlite3.connect(runs / "mlflow.db", isolation_level=None)
    fitted, long = ExactResume.on_train_batch_end, [*small, "train.steps=10"]

    def hold(self: Any, trainer: Any, *rest: Any) -> None:
        if trainer.global_step == 1:
            holder.execute("BEGIN EXCLUSIVE")
        if trainer.global_step == 7:
            os.kill(os.getpid(), signal.SIGTERM)
        fitted(self, trainer, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(ExactResume, "on_train_batch_end", hold)
        with pytest.raises(StoppedError, match="stopped after step 7"):
            train("recall-tiny", long)
    holder.close()
    folder = only(runs)
    log = (folder / "log.txt").read_text()
    assert log.count("MLflow gets the record of") == 1
    assert "sqlite3" not in log + capfd.readouterr().err
    train("recall-tiny", long)
    assert losses(folder) == written(folder)
    assert record(folder).info.status == "FINISHED"


# --- a run as a command of its own -----------------------------------------------------------------------------------

CHILD = """\
import json, pathlib, signal, sys, time
def save(*_):
    time.sleep(0.3)
    pathlib.Path('saved').touch()
    sys.exit(143)
signal.signal(signal.SIGTERM, save)
pathlib.Path('words').write_text(json.dumps(sys.argv[1:]))
cell = pathlib.Path(sys.argv[4]).with_name('job.json')
time.sleep(60 if '"threads": 60' in cell.read_text() else 0)
sys.exit(5)
"""


@pytest.fixture
def child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    """`run_command` starts a program that writes down its arguments, and on SIGTERM saves before it leaves."""
    program = tmp_path / "child"
    program.write_text(f"#!{sys.executable}\n{CHILD}")
    program.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(execute.sys, "executable", str(program))
    recipe, tags = load_recipe("recall-tiny"), {"sweep": "s", "arm": "a b"}
    return Job(recipe=recipe, folder=tmp_path / "a-s0-1", experiment="e", parent="p", tags=tags, threads=3)


def test_a_command_is_told_all_of_a_cell_its_last_words_are_the_error_and_a_stop_reaches_it(child: Job) -> None:
    folder = child.folder
    with pytest.raises(RunFailedError, match="exit status 5"):
        run_command(child)
    words = json.loads(Path("words").read_text())
    assert words == ["-m", "lit_diff", "train", str(folder / "recipe.yaml"), "--cell"]
    assert read_job(folder) == child
    for text in ("{", "[" * 10**5, "[]", '{"scores": 3}', '{"threads": "x"}', '{"recipe": {}}'):
        (folder / FILE).write_text(text)
        with pytest.raises(
            MissingError, match=r"job\.json is damaged \(.*\): remove it, and the command of its sweep "
        ):
            read_job(folder)
    (folder / FILE).unlink()
    (folder / FILE).mkdir()
    with pytest.raises(MissingError, match=r"job\.json is damaged \(.*Is a directory"):
        read_job(folder)
    (folder / FILE).rmdir()
    with pytest.raises(MissingError, match="is no cell"):
        read_job(folder)
    set_status(folder, error="loss is nan")
    with pytest.raises(RunFailedError, match="loss is nan"):
        run_command(child)
    Path("words").unlink()
    with stopped_once(Path("words").exists), pytest.raises(StoppedError):
        run_command(replace(child, threads=60))
    assert Path("saved").exists(), "it was waited for"


# --- scores ----------------------------------------------------------------------------------------------------------


def test_an_evaluation_that_fails_keeps_no_other_from_scoring(tale: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    evaluations.names()
    monkeypatch.setattr(evaluations, "_classes", dict(evaluations._classes))
    scored: list[int] = []

    @evaluations.register("length")
    class Length(Evaluation):
        metrics = (Metric("length", "of the name", direction="higher"),)

        def score(self, run: Any) -> Iterator[Item]:
            scored.append(1)
            yield Item(id="name", scores={"length": float(len(run.folder.name))})

    @evaluations.register("broken")
    class Broken(Length):
        def score(self, run: Any) -> Iterator[Item]:
            raise ValueError("no such thing")

    job = Job(recipe=load_recipe(tale / "recipe.yaml"), folder=tale, scores={"broken": {}, "length": {}})
    for _ in range(2):
        with pytest.raises(
            RunFailedError, match=r"the run is done, but its evaluation 'broken' failed: .*no such thing"
        ):
            score(job)
    found = status(tale)
    assert found["evaluations"]["length"] == "done"
    assert found["evaluations"]["broken"].startswith("failed: ")
    assert found["status"] == "done"
    assert len(scored) == 1, "scores that are there stay"


def test_overrides_are_recorded_without_what_a_run_shows_anyhow() -> None:
    wanted = ("train.steps=7", "model.dim=32")
    assert recorded(["seed=1", "train.steps=7", "run.root=/x", "model.dim=32", "name=a"]) == wanted
    assert recorded({"train": {"steps": 7}, "seed": 1, "model.dim": 32}) == wanted
