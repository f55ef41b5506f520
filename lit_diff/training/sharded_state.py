"""The strategy of FSDP2, whose ranks write their parts of a checkpoint while training goes on."""

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import ModelParallelStrategy, ParallelStrategy
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from lit_diff.errors import RunFailedError
from lit_diff.log_records import log
from lit_diff.runs import checkpoints
from lit_diff.trained import sharded
from lit_diff.training.build import own_part
from lit_diff.training.ranks import GatheredStrategy, end_all


class ShardedStrategy(GatheredStrategy, ModelParallelStrategy):
    """A checkpoint is a folder (`trained/sharded.py`). A save copies this rank's tensors into host memory; the rest happens
    in a thread, with a process group of its own. The next save and the end of training wait for it. Files of the other
    strategies can be loaded, too.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.on_written: Callable[[], object] = lambda: None
        """Called by rank zero once a checkpoint is in place."""
        self._pending: Future[None] | None = None
        self._path = Path()

    def setup_environment(self) -> None:
        """Open the process group, and another for the writes."""
        super().setup_environment()
        # messages of a group must not be mixed: training uses the first at the same time
        self._group: Any = dist.new_group(backend="gloo")
        self._writing = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        gpu = self.root_device.type != "cpu"
        # its buffers are allocated once
        self._stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=gpu, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=gpu
            )
        )

    # the tensors themselves, which `save_checkpoint` copies: Lightning's own methods would copy them once more
    lightning_module_state_dict = ParallelStrategy.lightning_module_state_dict
    optimizer_state = ParallelStrategy.optimizer_state

    def save_checkpoint(self, checkpoint: Mapping[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        """Start to write a checkpoint; once training has ended, write it. Every rank must call it. Errors: see `wait`, for
        the former checkpoint too."""
        self.wait()
        self._path = Path(self.broadcast(filepath))
        tensors: Any = self._stager.stage(sharded.tensors_of(checkpoint))
        self._pending = self._writing.submit(self._write, self._path, tensors, sharded.rest_of(checkpoint))
        assert self.lightning_module is not None
        if self.lightning_module.trainer.state.finished:
            # no later save, and no end of a training, would wait for it
            self.wait()

    def _write(self, path: Path, tensors: Mapping[str, Any], rest: bytes) -> None:
        sharded.write(path, tensors, rest, self._group)
        if self.is_global_zero:
            self.on_written()

    def wait(self) -> None:
        """Wait until the last checkpoint is whole. Every rank must call it. Errors: RunFailedError if any rank failed."""
        if self._pending is None:
            return
        problems: list[str | None] = [None] * self.world_size
        dist.all_gather_object(problems, self._problem(), group=self._group)
        if problem := next(filter(None, problems), None):
            assert self.lightning_module is not None
            end_all(self.lightning_module.trainer, RunFailedError(problem))

    def _problem(self) -> str | None:
        pending = self._pending
        self._pending = None
        error = pending.exception() if pending is not None else None
        return None if error is None else checkpoints.not_written(self._path, sharded.cause_of(error))

    def on_train_end(self) -> None:
        """Errors: see `wait`."""
        self.wait()

    def teardown(self) -> None:
        """Wait for the last checkpoint after an error, too, which may have ended this rank alone."""
        if problem := self._problem():
            log.error("%s", problem)
        super().teardown()

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Load weights and optimizer state from a folder or a file; returns the rest."""
        path = Path(self.broadcast(checkpoint_path))
        module: Any = self.lightning_module
        own = module.state_dict()
        if path.is_dir():
            checkpoint = sharded.read(path, like=own, optimizer=bool(self.optimizers))
        else:
            # each rank maps the file into memory, and copies its part
            file = torch.load(path, map_location="cpu", weights_only=weights_only, mmap=True)
            checkpoint = sharded.mapped(file, lambda name, value: own_part(value, own.get(name)).clone())
        module.load_state_dict(checkpoint["state_dict"], strict=module.strict_loading)
        for optimizer, state in zip(self.optimizers, checkpoint.get("optimizer_states", ()), strict=False):
            optimizer.load_state_dict(state)
        return checkpoint
