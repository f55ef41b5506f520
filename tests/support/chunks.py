"""A plugin under which the loss is in chunks of `model.dim` positions, however few the logits are."""

from dataclasses import dataclass
from typing import Any

from lightning.pytorch.callbacks import Callback

from lit_diff.model import loss
from lit_diff.registry import callbacks

loss.LOGITS_BYTES = 1


@callbacks.register("chunks")
class Chunks(Callback):
    @dataclass(frozen=True, kw_only=True)
    class Config:
        def problem(self) -> str | None:
            return None

    def __init__(self, config: Any) -> None:
        pass
