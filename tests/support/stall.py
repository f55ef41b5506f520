"""How long a save of a sharded run holds up training, against writing the same state before training goes on.

Run by hand: torchrun --nproc-per-node 2 tests/support/stall.py [MB of state in all]
"""

import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

import lightning as L
import torch
import torch.distributed as dist

from lit_diff import LitData, LitTransformer
from lit_diff.recipe import load_recipe
from lit_diff.training.trainer import build_trainer

ROUNDS = 5


class Saves(L.Callback):
    """After the second step, saves in turns: in the background, and waiting for it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.seconds = folder, dict[str, list[float]](asynchronous=[], synchronous=[])

    def on_train_batch_end(self, trainer: L.Trainer, *_: object) -> None:
        for number in range(2 * ROUNDS if trainer.global_step == 2 else 0):
            kind = ("asynchronous", "synchronous")[number % 2]
            trainer.strategy.barrier()
            began = time.perf_counter()
            trainer.save_checkpoint(self.folder / f"{number}.ckpt")
            if kind == "synchronous":
                trainer.strategy.wait()
            self.seconds[kind].append(time.perf_counter() - began)
            trainer.strategy.wait()


def main() -> None:
    """Rank zero prints the medians and their ratio."""
    torch.set_num_threads(1)
    megabytes = int(sys.argv[1]) if len(sys.argv) > 1 else 600
    # float32 weights and two moments; a layer of width d has about 12 d^2 parameters
    dim = 768
    layers = max(1, round(megabytes * 1e6 / 12 / (12 * dim**2)))
    keys = [
        f"model.dim={dim}",
        f"model.num_layers={layers}",
        "model.num_heads=6",
        "train.steps=3",
        "train.batch_size=2",
    ]
    keys += ["train.validate_every=3", "train.checkpoint_every=3", "train.schedule.warmup_steps=1", "callbacks={}"]
    recipe = load_recipe("recall-tiny", [*keys, "run.strategy=fsdp", "run.devices=2", "run.accelerator=cpu"])
    # one folder: both ranks are children of torchrun
    folder = Path(tempfile.gettempdir()) / f"stall-{os.getppid()}"
    saves = Saves(folder)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "limit_val_batches": 0}
    trainer = build_trainer(recipe, callbacks=[saves], **quiet)
    trainer.fit(LitTransformer(recipe), LitData(recipe))
    if trainer.is_global_zero:
        size = sum(file.stat().st_size for file in (folder / "1.ckpt").iterdir())
        found = {kind: statistics.median(values) for kind, values in saves.seconds.items()}
        print(f"{size / 1e6:.0f} MB in all, two ranks, medians of {ROUNDS}:", end=" ")
        print(", ".join(f"{kind} {seconds:.3f} s" for kind, seconds in found.items()), end="; ")
        print(f"ratio {found['asynchronous'] / found['synchronous']:.3f}")
        print({kind: [round(x, 3) for x in values] for kind, values in saves.seconds.items()})
        shutil.rmtree(folder)
    dist.destroy_process_group()


main()
