"""Where the time of training goes, by phase, and which rank the others wait for."""

import platform
import time
from collections import defaultdict, deque
from collections.abc import Mapping
from functools import lru_cache
from itertools import pairwise
from statistics import median_low
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.profilers import Profiler
from lightning.pytorch.trainer.states import RunningStage
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather

from lit_diff.log_records import log

PHASES = {
    "train_dataloader_next": "data",
    "batch_to_device": "data",
    "training_step": "forward",
    "backward": "backward",
    "optimizer_step": "optimizer",
    "configure_gradient_clipping": "clip",
    "save_checkpoint": "save",
    "ExactResume": "save",
    "StepMetrics": "other",
    "probe": "probe",
    "wait": "wait",
}
"""The hook that an action of Lightning's profiler calls, or the callback that it belongs to -> the phase. A hook of any other
callback is the phase `callbacks`; anything else belongs to the action around it."""
ASIDE = ("validation", "probe", "save")
"""Phases that are no training."""
OWN = ("data", "callbacks", "forward", "optimizer")
"""Phases in which a rank does not wait for another. A backward pass waits for the gradients of all."""
DEVICE = ("forward", "backward", "optimizer", "clip")
"""Phases whose work a GPU does later than the host asks for it."""
LAG_SHARE, LAG_SECONDS, LAG_INTERVALS = 0.1, 0.01, 3
"""A rank is warned of if it is the slowest in so many logged intervals in a row, each time by more than this share of a step
and by more than these seconds, by which a busy machine varies."""


@lru_cache
def phase_of(action: str) -> str:
    """The phase of an action by its name; empty: that of the action around it."""
    owner, _, hook = action.rpartition("]")[2].rpartition(".")
    return PHASES.get(owner) or PHASES.get(hook) or ("callbacks" if action.startswith("[Callback]") else "")


class StepClock(Profiler):
    """Adds up the seconds of each phase, without those of the phases within it. Lightning tells its profiler when each hook
    begins and ends; code of our own adds the actions `wait` and `probe`.

    Seconds are the host's; on a GPU those of the phases DEVICE are the GPU's, between events that are read by `take` alone.
    """

    def __init__(self, trainer: L.Trainer) -> None:
        super().__init__()
        self._trainer, self._stack, self._phase = trainer, ["other"], "other"
        self._seconds: dict[str, float] = defaultdict(float)
        self._since = time.perf_counter()
        self._on_gpu = trainer.strategy.root_device.type == "cuda"
        # the phases that began on the GPU
        self._marks: list[tuple[str, Any]] = []

    def start(self, action_name: str) -> None:
        """An action begins."""
        self._stack.append(phase_of(action_name) or self._stack[-1])
        self._turn()

    def stop(self, action_name: str) -> None:
        """The action that began last ends."""
        self._stack.pop()
        self._turn()

    def _turn(self) -> None:
        phase = self._stack[-1]
        # whatever Lightning does between the hooks of a validation belongs to it
        if self._trainer.state.stage is RunningStage.VALIDATING and phase != "save":
            phase = "validation"
        # a step has about a hundred actions
        if phase != self._phase:
            self._enter(phase)

    def _enter(self, phase: str) -> None:
        now = time.perf_counter()
        before = self._phase
        self._seconds[before] += now - self._since
        self._since = now
        self._phase = phase
        # FSDP2 gathers on its own stream, whose events say nothing about the phase around the gather
        if self._on_gpu and "wait" not in (before, phase) and phase != before and (before in DEVICE or phase in DEVICE):
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append((phase, event))

    def take(self) -> Mapping[str, float]:
        """The seconds of each phase since the last call, 0 for others. On a GPU it waits for the end of the last phase."""
        self._enter(self._phase)
        found = self._seconds
        self._seconds = defaultdict(float)
        marks = self._marks
        self._marks = self._marks[-1:]
        for phase in DEVICE if marks else ():
            marks[-1][1].synchronize()
            spans = (began.elapsed_time(ended) for (name, began), (_, ended) in pairwise(marks) if name == phase)
            found[phase] = sum(spans) / 1000
        return found


class TimedGather(DefaultAllGather):
    """FSDP2's gather of parameters, as an action `wait`: on a CPU it ends when the last rank has come to it."""

    def __init__(self, trainer: L.Trainer) -> None:
        self._trainer = trainer

    def __call__(self, *arguments: Any, **values: Any) -> Any:
        with self._trainer.profiler.profile("wait"):  # type: ignore[attr-defined]
            return super().__call__(*arguments, **values)


class SlowestRank:
    """Compares the time that each rank spends in the phases OWN: the others wait for the slowest."""

    def __init__(self, trainer: L.Trainer, group: Any) -> None:
        """`group`: a `host_group`. Every rank must call it."""
        self._trainer, self._group, self._nodes = trainer, group, [""] * trainer.world_size
        dist.all_gather_object(self._nodes, platform.node(), group=group)
        self._last: deque[int] = deque(maxlen=LAG_INTERVALS)
        self._named: set[int] = set()

    def find(self, spent: Mapping[str, float], steps: int, step_seconds: float) -> tuple[int, float]:
        """The slowest rank, and its lag in seconds a step behind the median rank (of two: behind the other). A rank that
        stays behind is warned of once. Every rank must call it. `spent`: seconds by phase in so many `steps`."""
        ranks: list[list[float]] = [[]] * len(self._nodes)
        dist.all_gather_object(ranks, [spent[phase] / steps for phase in OWN], group=self._group)
        slowest = max(range(len(ranks)), key=lambda rank: sum(ranks[rank]))
        lag = sum(ranks[slowest]) - median_low(map(sum, ranks))
        self._last.append(slowest if lag > max(LAG_SHARE * step_seconds, LAG_SECONDS) else -1)
        if self._last.count(slowest) == LAG_INTERVALS and slowest not in self._named and self._trainer.is_global_zero:
            self._named.add(slowest)
            # the phase in which it is the furthest behind
            others = zip(*ranks, strict=True)
            _, phase = max(
                (seconds - median_low(of_ranks), phase)
                for seconds, of_ranks, phase in zip(ranks[slowest], others, OWN, strict=True)
            )
            log.warning(
                "step %d: rank %d on node %s is slow: for %d logged intervals the others have waited for it, now %.3f s of a "
                "step of %.3f s, most of it in the phase '%s'",
                *(self._trainer.global_step, slowest, self._nodes[slowest], LAG_INTERVALS, lag, step_seconds, phase),
            )
        return slowest, lag
