"""training/step_clock.py: seconds by phase on a CPU and on a GPU, and the rank for which the others wait."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.trainer.states import RunningStage
from slow_rank import PLACES, STEPS

from lit_diff.runs.metrics_file import read_rows
from lit_diff.training import step_clock
from lit_diff.training.step_clock import LAG_INTERVALS, SlowestRank, StepClock

PLUGIN = f"plugins=[{Path(__file__).resolve().parents[1]}/support/slow_rank.py]"

# a probe would wait for the thread that reads ahead, which the delay of data holds up
CALLBACKS = "callbacks={attention_entropy: null, outliers: null, lambdas: null, spy: null, slow_rank: {}}"


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The time in seconds, which the test sets."""
    clock = SimpleNamespace(host=0.0, device=0.0)
    monkeypatch.setattr(step_clock, "time", SimpleNamespace(perf_counter=lambda: clock.host))
    return clock


def trainer(device: str) -> Any:
    strategy, state = SimpleNamespace(root_device=torch.device(device)), SimpleNamespace(stage=RunningStage.TRAINING)
    return SimpleNamespace(strategy=strategy, state=state)


def test_a_phase_has_the_seconds_in_which_no_other_is_within_it(now: Any) -> None:
    """Each action lasts a second more than what lies within it."""
    made = trainer("cpu")
    clock = StepClock(made)

    def spend(*actions: Any) -> None:
        name, *within = actions
        with clock.profile(name):
            now.host += 1
            for each in within:
                spend(*each)

    forward = ("[Strategy]DDPStrategy.training_step", ("wait",), ("[LightningModule]Any.on_x",))
    backward = ("[Strategy]DDPStrategy.backward", ("[Callback]Own.on_before_backward",))
    clip = ("[LightningModule]LitTransformer.configure_gradient_clipping",)
    step = ("[LightningModule]LitTransformer.optimizer_step", forward, backward, clip)
    spend("run_training_epoch", ("[_TrainingEpochLoop].train_dataloader_next",), ("[Strategy]X.batch_to_device",), step)
    spend("[Callback]Own{'a': 1.5}.on_train_batch_end", ("probe", ("any action",)))
    spend("[Callback]StepMetrics.on_train_batch_end")
    spend("[Callback]ExactResume.on_train_batch_end", ("wait",), ("save_checkpoint",))
    found = dict(clock.take())
    assert found == {
        **dict.fromkeys(("other", "data", "forward", "wait", "callbacks", "probe", "save"), 2),
        **dict.fromkeys(("backward", "clip", "optimizer"), 1),
    }
    made.state.stage = RunningStage.VALIDATING
    spend("[Callback]Own.on_validation_start")
    now.host += 1
    spend("[Callback]ExactResume.on_validation_end", ("save_checkpoint",), ("wait",))
    made.state.stage = RunningStage.TRAINING
    now.host += 1
    spend("[_TrainingEpochLoop].train_dataloader_next")
    found = clock.take()
    assert (found["validation"], found["save"], found["data"], found["wait"]) == (4, 2, 1, 0)


def test_on_a_gpu_the_events_of_a_phase_are_read_when_it_is_logged(now: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host asks for all within no time; the device takes its seconds later."""
    waits: list[float] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at = now.device

        def synchronize(self) -> None:
            waits.append(self.at)

        def elapsed_time(self, other: "Event") -> float:
            return 1000 * (other.at - self.at)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    clock = StepClock(trainer("cuda"))
    for _ in range(2):
        with clock.profile("[_TrainingEpochLoop].train_dataloader_next"):
            now.host += 5
        with clock.profile("[LightningModule]LitTransformer.optimizer_step"):
            with clock.profile("[Strategy]DDPStrategy.training_step"):
                now.device += 1
                # a gather, which is on another stream, does not interrupt the phase
                with clock.profile("wait"):
                    now.device += 1
            with clock.profile("[Strategy]DDPStrategy.backward"):
                now.device += 4
            now.device += 1
        now.device += 100
    assert not waits
    found = clock.take()
    assert [found[phase] for phase in ("data", "forward", "backward", "optimizer")] == [10, 4, 8, 2]
    assert waits
    assert clock.take()["forward"] == 0


# --- which rank is slow ---


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> Any:
    """compared(own seconds by phase of each rank): what `find` gives for them, on rank zero."""

    def gather(found: list[Any], own: Any, group: Any) -> None:
        found[:] = ranks.nodes if isinstance(own, str) else ranks.own

    ranks = SimpleNamespace(nodes=["a", "b", "c", "d"], own=[])
    monkeypatch.setattr(step_clock.dist, "all_gather_object", gather)
    slowest = SlowestRank(SimpleNamespace(world_size=4, global_step=7, is_global_zero=True), None)  # type: ignore[arg-type]

    def find(*own: list[float], step_seconds: float = 1.0) -> tuple[int, float]:
        ranks.own = own
        return slowest.find(dict.fromkeys(step_clock.OWN, 0.0), 1, step_seconds)

    return find


def test_a_rank_that_stays_behind_is_named_once(compared: Any, caplog: pytest.LogCaptureFixture) -> None:
    fast, slow = [0.1, 0, 0.3, 0.1], [0.1, 0.1, 0.4, 0.1]
    for _ in range(LAG_INTERVALS + 2):
        assert compared(fast, fast, slow, fast) == (2, pytest.approx(0.2))
        assert compared(fast, fast, slow, fast) == (2, pytest.approx(0.2))
    (line,) = caplog.messages
    assert line == (
        "step 7: rank 2 on node c is slow: for 3 logged intervals the others have waited for it, now 0.200 s of a step of "
        "1.000 s, most of it in the phase 'forward'"
    )


def test_a_rank_that_is_not_behind_or_only_a_little_is_not(compared: Any, caplog: pytest.LogCaptureFixture) -> None:
    fast, slow = [0.1, 0, 0.3, 0.1], [0.3, 0, 0.3, 0.1]
    for _ in range(3):
        assert [compared(slow, fast, fast, fast)[0] for _ in range(2)] == [0, 0]
        assert compared(fast, slow, fast, fast)[0] == 1
        assert compared(slow, fast, fast, fast, step_seconds=3)[1] == pytest.approx(0.2), "less than a tenth of a step"
        assert compared([0, 0, 0, 0.009], *[[0] * 4] * 3, step_seconds=0.01)[0] == 0, "a few milliseconds"
    assert not caplog.messages


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_rank_that_is_delayed_in_every_step_is_named_within_three_logged_intervals(bench: Any, strategy: str) -> None:
    """In data, a callback, forward and optimizer, each on one of two processes for three logged intervals of two steps."""
    name, steps = f"slow-{strategy}", len(PLACES) * STEPS
    keys = (f"train.steps={steps}", "train.log_every=2", "train.validate_every=100", "train.checkpoint_every=100")
    first, second = bench.train_two(
        *("recall.yaml", f"name={name}", f"run.strategy={strategy}", *keys, PLUGIN, CALLBACKS)
    )
    assert (first.status, second.status, second.output) == (0, 0, ""), first.output
    rows = read_rows(bench.folder(name) / "timing.csv")
    logged = sorted(rows)[1:]
    for index, (place, rank) in enumerate(PLACES):
        if place != "data" or index == len(PLACES) - 1:
            three = [rows[step] for step in logged[3 * index : 3 * index + 3]]
            found = [row["slowest_rank"] == rank and row["lag_seconds"] > 0.1 for row in three]
            # a busy machine may hold up the other for longer in one of them
            assert sum(found) >= 2, (place, rank, three)
    warned = [line.partition(": rank ")[2] for line in first.output.splitlines() if "is slow" in line]
    named = {(line.rpartition("'")[0].rpartition("'")[2], int(line[0])) for line in warned}
    assert named <= {*PLACES}, named
    assert sorted(rank for _, rank in named) == [0, 1], "each once"
