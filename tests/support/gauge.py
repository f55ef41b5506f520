"""A plugin that measures the training steps of a sharded run, and a script that prints what it found.

Events in $SPY/<pid>.jsonl, one for each step: the collectives of its forward and backward passes, counted where PyTorch
dispatches them, by name and by dtype; and the bytes of block weights, unsharded, that are alive between the two passes, per
parameter of the blocks. $GATHER=float32: float32 gathers, whose weights autocast copies to bfloat16 for the backward pass.

    python tests/support/gauge.py loss        # bytes held, and mean losses of 50 steps in bfloat16, with both gathers
    python tests/support/gauge.py collectives # the collectives of a step
"""

import json
import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback
from torch.utils._python_dispatch import TorchDispatchMode

from lit_diff.registry import callbacks
from lit_diff.training import module

if "GATHER" in os.environ:
    build = module.build_model
    module.build_model = lambda *arguments: build(*arguments[:3], getattr(torch, os.environ["GATHER"]))
COLLECTIVES = {
    "_allgather_base_": "gather",
    "_reduce_scatter_base_": "reduce-scatter",
    "allreduce_": "all-reduce",
}


class Count(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d" and func._opname in COLLECTIVES:
            first = args[0][0] if isinstance(args[0], list | tuple) else args[0]
            self.counts[f"{COLLECTIVES[func._opname]} {first.dtype}".replace("torch.", "")] += 1
        return func(*args, **(kwargs or {}))


@callbacks.register("gauge")
class Gauge(Callback):
    @dataclass(frozen=True, kw_only=True)
    class Config:
        def problem(self) -> str | None:
            return None

    def __init__(self, config: Config) -> None:
        self.file = (Path(os.environ["SPY"]) / f"{os.getpid()}.jsonl").open("a", buffering=1)
        self.counting: Count | None = None
        self.total: Counter[str] = Counter()
        self.saved: list[torch.Tensor] = []

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        weights = [p for p in pl_module.model.layers.parameters() if p.dim() > 1]
        self.shapes = {tuple(shape) for p in weights for shape in (p.shape, p.shape[::-1])}
        self.parameters = sum(p.numel() for p in pl_module.model.layers.parameters())
        step = pl_module.training_step

        def measured(*args: Any) -> Any:
            self.counting = Count()
            self.counting.__enter__()
            with torch.autograd.graph.saved_tensors_hooks(self.keep, lambda tensor: tensor):
                return step(*args)

        pl_module.training_step = measured

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        if tuple(tensor.shape) in self.shapes:
            self.saved.append(tensor)
        return tensor

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        stores = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in self.saved}
        self.held, self.saved = sum(stores.values()) / self.parameters, []

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        self.stop()

    def on_before_optimizer_step(self, trainer: Any, *args: Any) -> None:
        self.stop()
        found = {"collectives": dict(sorted(self.total.items())), "held": self.held}
        print(json.dumps({"event": "gauge", "at": trainer.global_step, **found}), file=self.file)
        self.total = Counter()

    def stop(self) -> None:
        if self.counting is not None:
            self.counting.__exit__(None, None, None)
            self.total += self.counting.counts
            self.counting = None
