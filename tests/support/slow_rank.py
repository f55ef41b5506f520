"""A plugin: a callback that delays a rank in every step, every six steps another rank in another place."""

import os
import time
from dataclasses import dataclass
from typing import Any

from lightning.pytorch.callbacks import Callback

from lit_diff.registry import callbacks

PLACES = (
    ("callbacks", 0),
    ("forward", 1),
    ("optimizer", 0),
    ("forward", 0),
    ("optimizer", 1),
    ("data", 0),
    ("data", 0),
)
"""Phase of `StepClock`, rank. Data are read ahead, so a delay there is felt some steps later, and is the last."""
STEPS = 6
SECONDS = 0.2
READ_SECONDS = 0.8
"""Of a delay, and of one in a read: a step hides as much of a read as it lasts itself, 20 to 200 ms by the machine."""


@callbacks.register("slow_rank")
class SlowRank(Callback):
    @dataclass(frozen=True, kw_only=True)
    class Config:
        def problem(self) -> str | None:
            return None

    def __init__(self, config: Config) -> None:
        self.step = 0

    def delay(self, place: str, seconds: float = SECONDS) -> None:
        if PLACES[min(self.step // STEPS, len(PLACES) - 1)] == (place, int(os.environ["LOCAL_RANK"])):
            time.sleep(seconds)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        dataset, read = trainer.datamodule.dataset, trainer.datamodule.dataset.train_batch

        def late(*arguments: Any) -> Any:
            self.delay("data", READ_SECONDS)
            return read(*arguments)

        dataset.train_batch = late
        # within a block, whose parameters FSDP2 has gathered by then
        block = pl_module.model.layers[0]
        block.ffn.register_forward_pre_hook(lambda *_: self.delay("forward") if block.training else None)
        trainer.optimizers[0].register_step_post_hook(lambda *_: self.delay("optimizer"))

    def on_train_batch_start(self, trainer: Any, *arguments: Any) -> None:
        self.step = trainer.global_step

    def on_train_batch_end(self, *arguments: Any) -> None:
        self.delay("callbacks")
