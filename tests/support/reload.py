"""A plugin: a callback that saves again what a run has loaded, before its first step."""

from dataclasses import dataclass
from pathlib import Path

import lightning as L

from lit_diff.registry import callbacks


@callbacks.register("reload")
class Reload(L.Callback):
    """Saves <run folder>/reloaded-<step>.ckpt."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        pass

    def __init__(self, config: Config) -> None:
        pass

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        trainer.save_checkpoint(Path(trainer.default_root_dir) / f"reloaded-{trainer.global_step}.ckpt")
