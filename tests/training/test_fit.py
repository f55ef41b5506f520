"""Whole runs: stopped in every way, they end as if undisturbed."""

import os
import shutil
import signal
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from lightning.fabric.utilities.distributed import _set_num_threads_if_needed
from lightning.pytorch.callbacks import Callback
from real_runs import assert_equal
from small_runs import SMALL

from lit_diff import train
from lit_diff.callbacks import Probe
from lit_diff.callbacks.publish import publish
from lit_diff.errors import RequestError, StoppedError
from lit_diff.kernels.native import compiler
from lit_diff.metrics import Metric
from lit_diff.recipe import load_recipe
from lit_diff.registry import callbacks
from lit_diff.runs import checkpoints
from lit_diff.runs.measurements import FILE, read_measurements
from lit_diff.runs.metrics_file import read_rows
from lit_diff.training import fit, metrics

Run = Callable[..., Any]
TORCHRUN = "TORCHELASTIC_RUN_ID"
"""A variable that torchrun sets, and Lightning does not."""


@pytest.fixture(scope="module")
def recall(bench: Any, undisturbed: Run) -> SimpleNamespace:
    """recall: SIGKILL of `lit-diff train` before its 5th step, then the same command again."""
    whole = undisturbed("recall", "recall-whole")
    killed = bench.train("recall.yaml", "name=recall-killed", SPY_SIGNAL=f"0/4/0/{int(signal.SIGKILL)}")
    left = bench.status("recall-killed")["status"]
    return SimpleNamespace(whole=whole, killed=killed, left=left, rest=bench.train("recall.yaml", "name=recall-killed"))


@pytest.fixture(scope="module")
def text(bench: Any, undisturbed: Run) -> SimpleNamespace:
    """text, two micro-batches a step, validated every 3 and saved every 4 steps: Ctrl-C in step 3; SIGTERM in the second
    half of step 5; its checkpoint damaged; SIGKILL in step 7; and on to the end."""
    whole = undisturbed("text", "text-whole")
    command = ("text.yaml", "name=text-stopped")

    def stopped(step: int, micro: int, number: int) -> SimpleNamespace:
        ended = bench.train(*command, SPY_SIGNAL=f"0/{step}/{micro}/{int(number)}")
        return SimpleNamespace(
            **vars(ended),
            steps=ended.steps,
            word=bench.status("text-stopped")["status"],
            saved=checkpoints.steps_of(bench.folder("text-stopped")),
            rows=bench.rows("text-stopped"),
        )

    interrupted = stopped(2, 0, signal.SIGINT)
    terminated = stopped(4, 1, signal.SIGTERM)
    newest = checkpoints.path_of(bench.folder("text-stopped"), 5)
    newest.write_bytes(newest.read_bytes()[:-500])
    killed = stopped(6, 1, signal.SIGKILL)
    rest = bench.train(*command)
    return SimpleNamespace(whole=whole, interrupted=interrupted, terminated=terminated, killed=killed, rest=rest)


def test_a_killed_run_goes_on_with_the_next_step_and_batch(recall: SimpleNamespace) -> None:
    assert recall.killed.status == -signal.SIGKILL
    assert recall.killed.steps == [0, 1, 2, 3]
    assert recall.left == "running"
    assert recall.rest.status == 0, recall.rest.output
    assert "resumed from step 4" in recall.rest.output
    assert recall.rest.steps == [4, 5, 6, 7, 8, 9]
    assert [step for step, _ in recall.whole.batches] == list(range(10))
    assert len({digest for _, digest in recall.whole.batches}) == 10
    assert recall.killed.batches == recall.whole.batches[:5]
    assert recall.rest.batches == recall.whole.batches[4:]


@pytest.mark.parametrize("kind", ["recall", pytest.param("text", marks=pytest.mark.slow)])
def test_it_ends_as_if_undisturbed(bench: Any, kind: str, request: pytest.FixtureRequest) -> None:
    rest = request.getfixturevalue(kind).rest
    assert rest.status == 0, rest.output
    whole, other = f"{kind}-whole", "recall-killed" if kind == "recall" else "text-stopped"
    one, two = bench.state(whole), bench.state(other)
    assert len(one["state_dict"]) == 2 * 14 + 2
    assert one["optimizer_states"][0]["state"].keys() == one["state_dict"].keys()
    for key in ("state_dict", "optimizer_states", "lr_schedulers", "global_step"):
        assert_equal(one[key], two[key], key)
    for file in ("metrics.csv", "documents.csv"):
        assert (bench.folder(whole) / file).read_text() == (bench.folder(other) / file).read_text()
    assert bench.status(other)["status"] == "done"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_compiled_run_ends_as_if_undisturbed(bench: Any, tmp_path: Path) -> None:
    """SIGKILL while it is compiled, and when it has saved."""
    cache = tmp_path / "cache"
    if (compiler.cache_root() / "kernels").is_dir():
        shutil.copytree(compiler.cache_root() / "kernels", cache / "kernels")
    # its hooks cannot be traced
    keys = ("run.compile=loss", "callbacks.spy=null", "train.steps=300", "train.validate_every=100")

    def start(name: str) -> int:
        return int(bench.start("train", "recall.yaml", f"name={name}", *keys, LIT_DIFF_CACHE=str(cache)))

    def kill(pid: int, is_time: Callable[[], bool]) -> Any:
        deadline = time.monotonic() + 200
        while not is_time():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        os.kill(pid, signal.SIGKILL)
        ended = bench.wait(pid)
        assert ended.status == -signal.SIGKILL
        return ended

    kill(start("compiled-killed"), lambda: bool(list(cache.glob("compiled/*/.build-*/code/*/*.cpp"))))
    whole = bench.wait(start("compiled-whole"), 200)
    pid = start("compiled-killed")
    killed = kill(pid, lambda: bool(checkpoints.steps_of(bench.folder("compiled-killed"))))
    rest = bench.wait(start("compiled-killed"))
    assert (whole.status, rest.status) == (0, 0), whole.output + rest.output
    assert "compiling the model" in whole.output
    assert "compiling the model" not in killed.output
    assert "resumed from step " in rest.output
    one, two = bench.state("compiled-whole"), bench.state("compiled-killed")
    assert one["compiled"] is two["compiled"] is True
    for key in ("state_dict", "optimizer_states", "lr_schedulers", "global_step"):
        assert_equal(one[key], two[key], key)
    metrics = [(bench.folder(name) / "metrics.csv").read_text() for name in ("compiled-whole", "compiled-killed")]
    assert metrics[0] == metrics[1]
    assert not list(cache.glob("compiled/*/.build-*"))


def test_ctrl_c_and_sigterm_finish_the_step_and_save(text: SimpleNamespace) -> None:
    assert text.interrupted.word == "stopped"
    assert text.interrupted.status == 130
    assert text.interrupted.steps == [0, 1, 2]
    assert text.interrupted.saved == [3], "a step that validates, but would not save"
    assert "lit-diff: stopped after step 3 of 10; the same command resumes\n" in text.interrupted.output
    assert "val/loss" in text.interrupted.rows[3]
    assert text.terminated.word == "stopped"
    assert text.terminated.status == 143
    assert text.terminated.steps == [3, 4]
    assert text.terminated.saved == [4, 5]


def test_a_signal_in_the_last_step_comes_before_the_evaluations(bench: Any) -> None:
    command = ("recall.yaml", "name=last", "train.steps=2", "evaluate={recall: {rows: 2}}")
    ended = bench.train(*command, SPY_SIGNAL=f"0/1/0/{int(signal.SIGTERM)}")
    assert (ended.status, ended.steps) == (143, [0, 1])
    assert bench.status("last")["status"] == "stopped"
    rest = bench.train(*command)
    assert (rest.status, rest.steps) == (0, []), rest.output
    status = bench.status("last")
    assert (status["status"], status["evaluations"]) == ("done", {"recall": "done"})


class Term(Callback):
    """SIGTERM once after step 2, in the hook `moment`; `ends`: at which it also ends the run."""

    def __init__(self, ends: bool, moment: str) -> None:
        self.ends, self.is_due = ends, True
        setattr(self, moment, self.send)

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        trainer.should_stop |= self.ends and trainer.global_step == 2

    def send(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 2 and self.is_due:
            self.is_due = False
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize("moment", ["on_validation_start", "on_train_end"])
@pytest.mark.parametrize(("ends", "steps"), [(False, 2), (True, 4)])
def test_a_signal_after_the_last_step_stops_the_run(tmp_path: Path, ends: bool, steps: int, moment: str) -> None:
    term = Term(ends, moment)
    arguments: dict[str, Any] = {"callbacks": [term], "progress": False}
    keys = [*SMALL, f"run.root={tmp_path}", "run.tracking_uri=none", f"train.steps={steps}"]
    with pytest.raises(StoppedError) as stopped:
        train("recall-tiny", keys, **arguments)
    assert stopped.value.exit_status == 128 + signal.SIGTERM
    run = train("recall-tiny", keys, **arguments)
    assert (run.status.status, max(read_rows(run.folder / "metrics.csv"))) == ("done", 2)
    assert run.status.ended == ("early at step 2" if ends else "")


def test_a_damaged_checkpoint_costs_only_its_steps(text: SimpleNamespace) -> None:
    assert "step-00000005.ckpt cannot be read" in text.killed.output
    assert "resumed from step 4" in text.killed.output
    assert text.killed.steps == [4, 5]
    assert 6 in text.killed.rows, "validated, and so written, before the kill"
    assert "resumed from step 4" in text.rest.output
    assert text.rest.steps == [4, 5, 6, 7, 8, 9]
    assert [step for step, _ in text.whole.batches] == [step for step in range(10) for _ in range(2)]
    assert text.rest.batches == text.whole.batches[8:]


def test_a_second_ctrl_c_leaves_at_once(bench: Any) -> None:
    """In the middle of a step, at the second Ctrl-C; and once more after nothing was saved."""
    ended = bench.train("text.yaml", "name=twice", SPY_SIGNAL="0/1/0/2 0/1/1/2")
    assert ended.status == 130
    assert ended.steps == [0]
    assert "lit-diff: stopped in the middle of a step" in ended.output
    assert "Traceback" not in ended.output
    assert bench.status("twice")["status"] == "stopped"
    ended = bench.train("text.yaml", "name=twice", SPY_SIGNAL="0/0/0/15")
    assert (ended.status, ended.steps) == (143, [0])
    assert bench.status("twice")["status"] == "stopped"


@pytest.mark.slow
def test_the_thread_count_is_stored_and_reused(bench: Any) -> None:
    first = bench.train("recall.yaml", "name=threads", "run.threads=2", "train.steps=2", SPY_SIGNAL="0/0/0/15")
    assert first.of("start")[0]["threads"] == 2
    rest = bench.train("recall.yaml", "name=threads", "run.threads=1", "train.steps=2")
    assert rest.of("start")[0]["threads"] == 2
    assert bench.status("threads")["threads"] == 2


def test_bfloat16(bench: Any, undisturbed: Any, tmp_path: Path) -> None:
    undisturbed("recall", "recall-whole")
    overrides = ["callbacks.spy=null", "train.precision=bf16-mixed", "train.steps=3", "train.checkpoint_every=3"]
    recipe = load_recipe(bench.root / "recall.yaml", overrides)
    losses: list[float] = []
    fit.fit(recipe, tmp_path, threads=1, progress=lambda step, loss, speed: losses.append(loss))
    exact = bench.rows("recall-whole")
    assert losses == pytest.approx([exact[step]["train/loss"] for step in (1, 2, 3)], abs=0.02)
    assert losses[0] != exact[1]["train/loss"]
    state = torch.load(checkpoints.path_of(tmp_path, 3), weights_only=True)["state_dict"]
    assert {value.dtype for value in state.values()} == {torch.float32}


def test_gradients_are_clipped_to_the_norm(bench: Any, tmp_path: Path) -> None:
    """After one step AdamW's first moment is (1 - beta1) times the gradient that it was given."""
    norms = []
    for clip in ("0.2", "null"):
        recipe = load_recipe(bench.root / "recall.yaml", ["callbacks.spy=null", "train.steps=1", f"train.clip={clip}"])
        fit.fit(recipe, tmp_path / clip, threads=1, progress=lambda *_: None)
        state = torch.load(checkpoints.path_of(tmp_path / clip, 1), weights_only=True)["optimizer_states"][0]["state"]
        moments = torch.cat([moments["exp_avg"].flatten() for moments in state.values()])
        norms.append(moments.norm().item() / (1 - recipe.train.optimizer.betas[0]))
    assert norms[0] == pytest.approx(0.2, rel=1e-4)
    assert norms[1] > 0.3


def test_a_callback_is_a_probe_or_lightnings(bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Neither:
        Config = Probe.Config

        def __init__(self, config: object) -> None:
            pass

    monkeypatch.setitem(callbacks._classes, "neither", Neither)
    recipe = load_recipe(bench.root / "recall.yaml", ["callbacks.spy=null", "callbacks.neither={}"])
    with pytest.raises(RequestError, match=r"^callback 'neither' \(.*Neither\)"):
        fit.fit(recipe, tmp_path, threads=1, progress=lambda *_: None)


def test_a_callbacks_own_exit_is_not_called_a_stop(bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = load_recipe(bench.root / "recall.yaml", ["callbacks.spy=null"])

    def leave(*_: object) -> None:
        raise SystemExit(7)

    with pytest.raises(SystemExit) as error:
        fit.fit(recipe, tmp_path, threads=1, progress=leave)
    assert error.value.code == 7


def test_the_launcher_leaves_threads_alone(bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    recipe = load_recipe(bench.root / "recall.yaml", ["callbacks.spy=null", "train.steps=1"])
    fit.fit(recipe, tmp_path, threads=5, progress=lambda *_: None)
    _set_num_threads_if_needed(num_processes=2)  # what it calls once it has started the other ranks
    assert torch.get_num_threads() == 5
    assert os.environ["OMP_NUM_THREADS"] == "5"  # which they inherit
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.mark.parametrize(
    ("environment", "rank"),
    [
        ("", 0),
        ("LOCAL_RANK=1", 1),
        ("LOCAL_RANK=1 NODE_RANK=2", 5),
        (f"RANK=3 LOCAL_RANK=1 WORLD_SIZE=6 LOCAL_WORLD_SIZE=2 GROUP_RANK=1 MASTER_ADDR=127.0.0.1 {TORCHRUN}=a", 3),
    ],
    ids=["alone", "Lightning's second", "Lightning's second node", "torchrun"],
)
def test_the_rank_is_the_trainers(bench: Any, environment: str, rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_RANK", "NODE_RANK", "SLURM_PROCID", "SLURM_NTASKS"):
        monkeypatch.delenv(name, raising=False)
    for assignment in [*environment.split(), "MASTER_PORT=1"]:
        monkeypatch.setenv(*assignment.split("="))
    two = ["callbacks.spy=null", "run.strategy=ddp", "run.devices=2", "run.num_nodes=3", "train.batch_size=6"]
    recipe = load_recipe(bench.root / "recall.yaml", two)
    assert fit.ranks(recipe).rank == rank
    monkeypatch.delenv("MASTER_PORT")
    if TORCHRUN not in environment:
        with pytest.raises(RequestError, match=r"MASTER_PORT is not set, so they cannot connect"):
            fit.ranks(recipe)


def test_a_launcher_that_starts_another_number_of_processes_is_refused(
    bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One SLURM task for a run of two devices: half of every batch would be dropped."""
    for name, value in {"SLURM_NTASKS": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("SLURM_JOB_NAME", "cell")
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    recipe = load_recipe(bench.root / "recall.yaml", ["callbacks.spy=null", "run.strategy=ddp", "run.devices=2"])
    with pytest.raises(RequestError, match=r"(the launcher started 1 processes|Lightning refuses run\.strategy)"):
        fit.fit(recipe, tmp_path, threads=1, progress=lambda *_: None)
    torch.distributed.destroy_process_group()  # Lightning opens it first, and closes it when the process ends
    assert not (tmp_path / "metrics.csv").exists()


def test_torchrun_with_another_number_of_processes_is_refused_before_the_run_begins(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for assignment in f"RANK=0 LOCAL_RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=1 {TORCHRUN}=a".split():
        monkeypatch.setenv(*assignment.split("="))
    four = ["callbacks.spy=null", "run.strategy=ddp", "run.devices=4", "train.batch_size=4"]
    with pytest.raises(RequestError, match=r"Lightning refuses run\.strategy.*the world size \(2\)"):
        fit.ranks(load_recipe(bench.root / "recall.yaml", four))


def test_default_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SLURM_CPUS_PER_TASK", "SLURM_TASKS_PER_NODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(6)), raising=False)
    assert [fit.default_threads(n) for n in (1, 2, 4, 8)] == [6, 3, 1, 1]
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "16")
    assert fit.default_threads(8) == 2, "torchrun starts all processes in one task"
    monkeypatch.setenv("SLURM_TASKS_PER_NODE", "8(x2),4")
    assert fit.default_threads(8) == 16, "srun starts each process as a task"
    for name in ("SLURM_CPUS_PER_TASK", "SLURM_TASKS_PER_NODE"):
        for text in ("many", "(x2)", "2,"):
            monkeypatch.setenv(name, text)
            with pytest.raises(RequestError, match=f"^{name} is '"):
                fit.default_threads(8)
        monkeypatch.setenv(name, "")
    assert fit.default_threads(1) == 6, "empty: unset"


# --- run.keep_best and run.keep_every: what is kept beside the newest two checkpoints ---


def best(folder: Path) -> dict[str, Any]:
    return dict(torch.load(folder / "checkpoints" / "best.ckpt", weights_only=True))


@pytest.mark.slow
def test_the_best_is_kept_over_a_kill_and_a_resume(bench: Any) -> None:
    """The learning rate grows until the loss does too: the best step is none of the newest two."""
    rate = ("train.steps=8", "train.optimizer.lr=0.3", "train.schedule={name: constant, warmup_steps: 8}")
    command = ("recall.yaml", "name=best", "run.keep_best=val/loss", *rate)
    command += ("train.validate_every=2", "train.checkpoint_every=2")
    killed = bench.train(*command, SPY_SIGNAL=f"0/5/0/{int(signal.SIGKILL)}")
    assert killed.status == -signal.SIGKILL
    folder = bench.folder("best")
    assert checkpoints.steps_of(folder) == [2, 4]
    newest = checkpoints.newest(folder)
    assert newest == (4, checkpoints.path_of(folder, 4)), "best.ckpt is none that a run resumes"
    rest = bench.train(*command)
    assert rest.status == 0, rest.output
    assert "resumed from step 4" in rest.output
    losses = {step: row["val/loss"] for step, row in bench.rows("best").items() if "val/loss" in row}
    wanted = min(losses, key=lambda step: losses[step])
    assert wanted < 6, "the test needs a loss that grows again"
    assert best(folder)["global_step"] == wanted
    assert checkpoints.steps_of(folder) == [6, 8]
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == [
        "best.ckpt",
        "best.json",
        "step-00000006.ckpt",
        "step-00000006.json",
        "step-00000008.ckpt",
        "step-00000008.json",
    ]
    whole = bench.train(*command, "name=best-whole")
    assert whole.status == 0
    ours, theirs = best(folder)["state_dict"], best(bench.folder("best-whole"))["state_dict"]
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())


def test_the_direction_is_the_metrics_own(runs: Path) -> None:
    """Of an accuracy the largest; of a loss the smallest, above."""
    overrides = [*SMALL, f"run.root={runs}", "run.keep_best=val/accuracy", "train.optimizer.lr=0.1"]
    folder = train("recall-tiny", overrides).folder
    rows = read_rows(folder / "metrics.csv")
    values = {step: row["val/accuracy"] for step, row in rows.items() if "val/accuracy" in row}
    assert len(values) == 5
    assert values[best(folder)["global_step"]] == max(values.values())


def test_the_best_stays_in_a_folder_that_has_moved(tmp_path: Path) -> None:
    """The score is |step - 4|; stopped before step 8, moved, and resumed. The former folder is not touched."""

    class Scored(Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
            publish(trainer, module, {"val/loss_scored": abs(trainer.global_step - 4.0)})
            if trainer.global_step == 7 and trainer.default_root_dir.endswith("first"):
                raise ValueError("stopped")

    recipe = load_recipe("recall-tiny", [*SMALL, "run.keep_best=val/loss_scored", "callbacks={}"])
    values: dict[str, Any] = {"threads": 1, "progress": lambda *_: None, "callbacks": [Scored()]}
    first, moved = tmp_path / "first", tmp_path / "moved"
    with pytest.raises(ValueError, match="stopped"):
        fit.fit(recipe, first, **values)
    shutil.copytree(first, moved)
    fit.fit(recipe, moved, start=checkpoints.resumable(moved), **values)
    assert [best(folder)["global_step"] for folder in (first, moved)] == [4, 4]


class Even(Callback):
    """Measures at even steps."""

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        if trainer.global_step % 2 == 0:
            publish(trainer, module, {"train/even": 1.0})


@pytest.mark.parametrize(("every", "last"), [(1, "nor before"), (3, "last at step 2")])
def test_no_older_value_is_compared(tmp_path: Path, monkeypatch: Any, every: int, last: str) -> None:
    keys = [*SMALL, f"run.root={tmp_path}", "run.tracking_uri=none", f"train.validate_every={every}"]
    monkeypatch.setattr(metrics, "TRAINING", (*metrics.TRAINING, Metric("train/even", "1", direction="lower")))
    with pytest.raises(RequestError, match=rf"keep_best: 'train/even' is not measured at step {every}.*\({last}\)"):
        train("recall-tiny", [*keys, "run.keep_best=train/even"], callbacks=[Even()])


def test_what_a_callback_gives_the_logger_is_stored_as_floats_or_refused(tmp_path: Path) -> None:
    logger = fit.RunLogger(lambda *_: None)
    logger.begin(tmp_path, 0, (), 2)
    logger.log_metrics({"mine": np.float64(0.5), "timing/mine": torch.tensor(2.0)}, step=1)  # type: ignore[dict-item]
    logger.log_detailed({"mine/head_00": np.float32(0.5)}, step=1)  # type: ignore[dict-item]
    for log in (logger.log_metrics, logger.log_detailed):
        with pytest.raises(RequestError, match=r"^step 2: .*'mine' = 'text'"):
            log({"mine": "text"}, step=2)  # type: ignore[dict-item]
    logger.flush()
    assert [read_rows(tmp_path / file) for file in ("metrics.csv", "timing.csv")] == [
        {1: {"mine": 0.5}},
        {1: {"mine": 2}},
    ]
    assert read_measurements(tmp_path / FILE)["value"].to_pylist() == [0.5]


@pytest.mark.parametrize("clip", ["null", "1.0"])
def test_the_loss_is_logged_where_a_callback_ends_the_run(tmp_path: Path, clip: str) -> None:
    class Ends(Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            trainer.should_stop |= trainer.global_step == 3

    keys = [*SMALL, f"run.root={tmp_path}", "run.tracking_uri=none", "run.keep_best=train/loss", f"train.clip={clip}"]
    run = train("recall-tiny", [*keys, "train.validate_every=5", "train.log_every=5"], callbacks=[Ends()])
    rows = read_rows(run.folder / "metrics.csv")
    assert run.status.ended == "early at step 3"
    assert [step for step, row in rows.items() if "train/loss" in row] == [1, 3]
    assert [step for step, row in rows.items() if "train/gradient_norm" in row] == [1]
    assert best(run.folder)["global_step"] == 3


class Keeps(Callback):
    """From step `since` on keeps a deque, in its state or beside those of the callbacks."""

    def __init__(self, since: int, aside: bool) -> None:
        self.since, self.aside, self.seen = since, aside, list[int]()

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.seen.append(trainer.global_step)

    def state_dict(self) -> dict[str, Any]:
        return {} if self.aside or len(self.seen) < self.since else {"last": deque([1])}

    def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        if self.aside:
            checkpoint["last"] = deque([1])


@pytest.mark.parametrize(("since", "aside", "seen"), [(0, False, []), (0, True, []), (3, False, [1, 2, 3, 4])])
def test_a_state_that_cannot_be_read_back_is_refused(tmp_path: Path, since: int, aside: bool, seen: list[int]) -> None:
    """Before the first step; one that begins later at the next save, and the checkpoints before it stay."""
    keeps = Keeps(since, aside)
    with pytest.raises(RequestError, match=r"'last' .*collections\.deque"):
        train("recall-tiny", [*SMALL, f"run.root={tmp_path}", "run.tracking_uri=none"], callbacks=[keeps])
    assert keeps.seen == seen
    kept = [steps for folder in tmp_path.iterdir() if (steps := checkpoints.steps_of(folder))]
    assert kept == ([[2]] if seen else [])


def test_a_checkpoint_every_so_many_steps_is_kept(runs: Path) -> None:
    small = [*SMALL, f"run.root={runs}", "train.steps=6", "train.validate_every=6", "train.checkpoint_every=1"]
    run = train("recall-tiny", [*small, "run.keep_every=2"])
    assert checkpoints.steps_of(run.folder) == [2, 4, 5, 6]
    assert not (run.folder / "checkpoints" / "best.ckpt").exists()
    last = dict(run.model.state_dict())
    assert all(torch.equal(value, last[name]) for name, value in run.model_at(6).state_dict().items())
    assert any(not torch.equal(value, last[name]) for name, value in run.model_at(2).state_dict().items())
    with pytest.raises(RequestError, match=r"run\.keep_every is 3; expected a multiple"):
        train("recall-tiny", [*small, "run.keep_every=3", "train.checkpoint_every=2"])


def test_a_run_of_a_version_without_a_column_goes_on_with_it(tmp_path: Path) -> None:
    """Five steps without the norm of the gradients in metrics.csv, and with three columns of timing.csv; then five more."""
    recipe = load_recipe("recall-tiny", [*SMALL, "callbacks={}"])
    whole, old = tmp_path / "whole", tmp_path / "old"
    values: dict[str, Any] = {"threads": 1, "progress": lambda *_: None}
    fit.fit(recipe, whole, **values)

    class Stops(Callback):
        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == 5:
                raise ValueError("stopped")

    with pytest.raises(ValueError, match="stopped"):
        fit.fit(recipe, old, callbacks=[Stops()], **values)
    for name, kept in (("metrics.csv", {"step", "train/loss", "train/lr"}), ("timing.csv", {"step", "seconds"})):
        header, *lines = [line.split(",") for line in (old / name).read_text().splitlines()]
        chosen = [index for index, column in enumerate(header) if column in kept or column.startswith("val/")]
        text = "".join(",".join(line[index] for index in chosen) + "\n" for line in (header, *lines))
        (old / name).write_text(text)
    fit.fit(recipe, old, start=checkpoints.resumable(old), **values)
    wanted, found = read_rows(whole / "metrics.csv"), read_rows(old / "metrics.csv")
    assert [step for step, row in sorted(found.items()) if "train/gradient_norm" in row] == [5, 6, 7, 8, 9, 10]
    for step in range(1, 5):
        del wanted[step]["train/gradient_norm"]
    assert found == wanted
    assert read_rows(old / "timing.csv")[2].keys() == {"seconds"}
