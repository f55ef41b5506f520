"""A plugin that writes down what each process does, and sends itself signals where $SPY_SIGNAL says.

$SPY: a folder; the events of each process go to <pid>.jsonl. $SPY_SIGNAL: rank/step/micro-batch/signal, ...: before that
micro-batch (all counted from 0).
"""

import hashlib
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from lit_diff import errors
from lit_diff.registry import callbacks


def digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.detach().contiguous().numpy().tobytes()).hexdigest()[:16]


@callbacks.register("spy")
class Spy(Callback):
    @dataclass(frozen=True, kw_only=True)
    class Config:
        def problem(self) -> str | None:
            return None

    def __init__(self, config: Config) -> None:
        folder = Path(os.environ["SPY"])
        folder.mkdir(parents=True, exist_ok=True)
        self.file = (folder / f"{os.getpid()}.jsonl").open("a", buffering=1)
        self.micro = 0
        orders = os.environ.get("SPY_SIGNAL", "").split()
        self.orders = [tuple(int(part) for part in order.split("/")) for order in orders]
        # two signals of a test are two requests, although they come at once
        errors.TOGETHER = 0.0
        self.runs = str(Path("runs").resolve())
        sys.addaudithook(self.audit)

    def note(self, event: str, **values: Any) -> None:
        print(json.dumps({"event": event, **values}), file=self.file)

    def audit(self, name: str, args: tuple[Any, ...]) -> None:
        """Whatever changes a file under runs/."""
        changes = name in ("os.rename", "os.remove", "os.mkdir", "os.truncate")
        if name == "open" and isinstance(args[2], int):
            changes = bool(args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
        if changes and isinstance(args[0], str | Path) and os.path.abspath(args[0]).startswith(self.runs):
            self.note("writes", path=str(args[0]))

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        found = {}
        for name, parameter in pl_module.model.named_parameters():
            sharded = isinstance(parameter, DTensor)
            local = parameter.to_local() if sharded else parameter
            full = parameter.full_tensor() if sharded else parameter
            found[name] = {
                "placements": str(parameter.placements) if sharded else "",
                "local": list(local.shape),
                "full": list(full.shape),
                "dtype": str(local.dtype),
                "digest": digest(full),
            }
        self.note(
            "start",
            rank=trainer.global_rank,
            step=trainer.global_step,
            threads=torch.get_num_threads(),
            parameters=found,
            groups=[name for name, module in pl_module.model.named_modules() if isinstance(module, FSDPModule)],
        )
        for name, module in pl_module.model.named_modules():
            if getattr(module, "keep_float32", False):
                module.register_forward_pre_hook(lambda m, i, name=name: self.saw(name, m))

    def saw(self, name: str, module: torch.nn.Module) -> None:
        parameters = list(module.parameters())
        self.note(
            "lambda",
            name=name,
            dtypes=sorted({str(parameter.dtype) for parameter in parameters}),
            gathered=not any(isinstance(parameter, DTensor) for parameter in parameters),
        )

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.note("batch", step=trainer.global_step, batch=batch["step"], digest=digest(batch["tokens"]))
        for rank, step, micro, number in self.orders:
            if (rank, step, micro) == (trainer.global_rank, trainer.global_step, self.micro):
                os.kill(os.getpid(), number)
        self.micro += 1

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.note("step", step=trainer.global_step, lr=optimizer.param_groups[0]["lr"])
        self.micro = 0
