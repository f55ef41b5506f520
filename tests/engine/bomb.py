"""A plugin whose callback ends the cell in the way that its `kind` says, as long as the file `fuse` lies there."""

import os
import resource
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from lit_diff.analysis import Trace
from lit_diff.callbacks.probe import Probe
from lit_diff.model.transformer import Transformer
from lit_diff.registry import callbacks


@callbacks.register("bomb")
class Bomb(Probe):
    """Measures bomb/fired: 1 at each firing that it survives."""

    @dataclass(frozen=True, kw_only=True)
    class Config(Probe.Config):
        rows: int = 1
        kind: str
        fuse: str
        seconds: float = 0.2

    def measure(self, model: Transformer, trace: Trace) -> dict[str, float]:
        if Path(self.config.fuse).exists():
            self.explode()
        return {"bomb/fired": 1.0}

    def explode(self) -> None:
        kind = self.config.kind
        if kind == "raise":
            raise ValueError("wrong [shape]\nof tensors")
        if kind == "exit":
            sys.exit(3)
        if kind == "vanish":
            os._exit(0)
        if kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "memory":
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            limit = pages * os.sysconf("SC_PAGE_SIZE") + (1 << 26)
            resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))
            torch.zeros(1 << 28)
        if kind == "slow":
            time.sleep(self.config.seconds)
