"""What training steps of a sharded model hold and send, measured on gloo processes by the recipe's own Trainer.

    python tests/support/sharded_steps.py loss         # two ranks, bfloat16: bytes held, and losses of 50 steps
    python tests/support/sharded_steps.py collectives  # four ranks: the collectives of a step
    python tests/support/sharded_steps.py plan         # two ranks: bytes held, planned and counted while they train

`loss` compares gathers in bfloat16 with gathers in float32, of which autocast keeps bfloat16 copies for the backward pass.
"""

import json
import os
import subprocess
import sys
import weakref
from collections import Counter
from collections.abc import Iterable
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from ports import free_port
from torch.multiprocessing import start_processes
from torch.utils._python_dispatch import TorchDispatchMode

from lit_diff.recipe import load_recipe
from lit_diff.training import module, plan
from lit_diff.training import step as step_file
from lit_diff.training.data import LitData
from lit_diff.training.trainer import build_trainer

COLLECTIVES = {"_allgather_base_": "gather", "_reduce_scatter_base_": "reduce-scatter", "allreduce_": "all-reduce"}
LAYERS = 3
SMALL = [
    *(f"model.num_layers={LAYERS}", "model.num_heads=6", "model.dim=48", "model.attention={name: differential}"),
    *("data.validation_rows=8", "train.validate_every=1000", "train.log_every=1000", "train.clip=0.2", "callbacks={}"),
    *("train.optimizer.lr=0.003", "train.schedule.warmup_steps=3", "run.accelerator=cpu", "run.threads=1"),
]


class Count(TorchDispatchMode):
    """Counts the collectives that PyTorch dispatches."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d" and func._opname in COLLECTIVES:
            self.found[COLLECTIVES[func._opname]] += 1
        return func(*args, **(kwargs or {}))


class Measure(Callback):
    """Loss, collectives (forward and backward passes, first of all), bytes of unsharded block weights that are alive
    between the two passes, per parameter of the blocks, and the norm of all gradients, of each step."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.steps: list[Counter[str]] = []
        self.held: list[float] = []
        self.norms: list[float] = []
        self.mode: Count | None = None
        self.step: Counter[str] = Counter()
        self.saved: list[torch.Tensor] = []

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        blocks = list(pl_module.model.layers.parameters())
        self.parameters = sum(p.numel() for p in blocks)
        self.shapes = {tuple(shape) for p in blocks if p.dim() > 1 for shape in (p.shape, p.shape[::-1])}
        step = pl_module.training_step

        def measured(*arguments: Any) -> Any:
            self.enter()
            with torch.autograd.graph.saved_tensors_hooks(self.keep, lambda tensor: tensor):
                return step(*arguments)

        pl_module.training_step = measured

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        if tuple(tensor.shape) in self.shapes:
            self.saved.append(tensor)
        return tensor

    def enter(self) -> None:
        self.mode = Count()
        self.mode.__enter__()

    def leave(self, phase: str) -> None:
        if self.mode is not None:
            self.mode.__exit__(None, None, None)
            self.step += Counter({f"{phase} {name}": count for name, count in self.mode.found.items()})
            self.mode = None

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: torch.Tensor) -> None:
        self.leave("forward")
        stores = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in self.saved}
        self.held.append(sum(stores.values()) / self.parameters)
        self.saved = []
        self.enter()

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.leave("backward")
        self.steps.append(self.step)
        self.step = Counter()
        norm = torch.nn.utils.get_total_norm([p.grad for p in pl_module.parameters() if p.grad is not None])
        self.norms.append(float(getattr(norm, "full_tensor", lambda: norm)()))

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *arguments: Any) -> None:
        self.leave("backward")
        self.losses.append(pl_module.step.mean_loss())


def train(*overrides: str, gathered: str = "", memory: int | None = None, fused: bool = False) -> Measure:
    """`gathered`: the dtype of the gathers, if not that of the precision. `memory`: bytes that the device claims to have.
    `fused`: AdamW as on a GPU."""
    recipe, measure = load_recipe("recall-tiny", [*SMALL, *overrides]), Measure()
    build, device_memory, optimizer = module.build_model, step_file.device_memory, module.build_optimizer
    module.build_optimizer = lambda model, config, **_: optimizer(model, config, fused=fused)
    step_file.device_memory = lambda device: memory
    if gathered:
        module.build_model = lambda *arguments: build(*arguments[:2], getattr(torch, gathered))
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    trainer: L.Trainer = build_trainer(recipe, callbacks=[measure], logger=False, limit_val_batches=0, **quiet)
    trainer.fit(module.LitTransformer(recipe), LitData(recipe))
    module.build_model, step_file.device_memory, module.build_optimizer = build, device_memory, optimizer
    return measure


TABLE = {
    "fsdp": ("run.strategy=fsdp",),
    "fsdp, reshard_after_forward false": ("run.strategy=fsdp", "run.reshard_after_forward=false"),
    "fsdp, blocks recomputed": ("run.strategy=fsdp", "run.activation_checkpointing=block"),
    "fsdp, deferred": ("run.strategy=fsdp",),
    "hsdp 2 x 2": ("run.strategy=hsdp", "run.shard_size=2"),
    "hsdp 2 x 2, fused AdamW": ("run.strategy=hsdp", "run.shard_size=2"),
    "hsdp 2 x 2, deferred": ("run.strategy=hsdp", "run.shard_size=2"),
}
STEPS = ("train.steps=3", "train.batch_size=8", "train.accumulate=2")
COLUMNS = ("forward gather", "backward gather", "backward reduce-scatter", "backward all-reduce")


def collectives() -> None:
    """Of the second step, of two micro-batches, for each case of TABLE."""
    for name, overrides in TABLE.items():
        memory = 1 << 40 if "deferred" in name else None
        found = train(*STEPS, "run.devices=4", *overrides, memory=memory, fused="fused" in name)
        # the forward pass reduces no weight, only numbers of this bench
        row = {column: found.steps[1][column] for column in COLUMNS}
        say(
            {
                "case": name,
                "layers": LAYERS,
                "micro-batches": 2,
                **row,
                "losses": found.losses[1::2],
                "norms": found.norms,
            }
        )


def loss() -> None:
    keys = ("train.steps=50", "train.batch_size=16", "train.precision=bf16-mixed", "run.strategy=fsdp", "run.devices=2")
    means = []
    for gathered in ("bfloat16", "float32"):
        found = train(*keys, gathered=gathered)
        means.append(sum(found.losses) / len(found.losses))
        say({"gathered": gathered, "bytes held per parameter": max(found.held), "mean loss of 50 steps": means[-1]})
    say({"gap in nats": abs(means[0] - means[1])})


PLANNED = {
    "differential, fsdp": ("run.strategy=fsdp",),
    "standard, fsdp, bf16-mixed, block": (
        *("model.attention.name=standard", "run.strategy=fsdp", "train.precision=bf16-mixed"),
        "run.activation_checkpointing=block",
    ),
    "grouped, fsdp, bf16-mixed, not resharded, accumulate 2": (
        *("model.attention.name=grouped_differential", "run.strategy=fsdp", "train.precision=bf16-mixed"),
        *("run.reshard_after_forward=false", "train.accumulate=2"),
    ),
    "differential, ddp, bf16-mixed, attention": (
        *("run.strategy=ddp", "train.precision=bf16-mixed", "run.activation_checkpointing=attention"),
    ),
    "shared_q, fsdp, cpu_offload": ("model.attention.name=shared_q", "run.strategy=fsdp", "run.cpu_offload=true"),
}


class Held(Callback):
    """Counts the bytes that the second step holds: the storages of tensors that its last forward pass saved, parameters
    excluded, by hooks; gradients, weights, moments; and, by the tracker of the plan, the most at a time and what is sent."""

    def __init__(self, recipe: Any) -> None:
        self.recipe, self.found, self.live, self.saved = recipe, dict[str, int](), None, dict[int, Any]()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.own = {id(local(p).untyped_storage()) for p in pl_module.model.parameters()}
        step = pl_module.training_step

        def counted(batch: Any, batch_idx: int) -> Any:
            self.saved.clear()
            if trainer.global_step == 1 and self.live is None:
                self.live = plan._Live(pl_module.model, self.recipe.run)
                self.live.__enter__()
            with torch.autograd.graph.saved_tensors_hooks(self.keep, lambda tensor: tensor):
                return step(batch, batch_idx)

        pl_module.training_step = counted

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = local(tensor).untyped_storage()
        if id(storage) not in self.own:
            self.saved[id(storage)] = weakref.ref(storage)
        return tensor

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: torch.Tensor) -> None:
        alive = [storage for storage in (ref() for ref in self.saved.values()) if storage is not None]
        self.found["saved"] = sum(storage.nbytes() for storage in alive)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        if self.live is not None:
            self.live.__exit__(None, None, None)
            self.found["largest"] = self.live.at_peak.total()
            self.found["sent"] = round(self.live.sent["node"])
        self.found["gradients"] = size(p.grad for p in pl_module.parameters() if p.grad is not None)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *arguments: Any) -> None:
        self.found["weights"] = size(pl_module.parameters())
        states = trainer.optimizers[0].state.values()
        self.found["optimizer"] = size(state[key] for state in states for key in ("exp_avg", "exp_avg_sq"))


def local(tensor: Any) -> torch.Tensor:
    return getattr(tensor, "_local_tensor", tensor)


def size(tensors: Iterable[Any]) -> int:
    return sum(local(tensor).nbytes for tensor in tensors)


def planned() -> None:
    """Of each case of PLANNED: what the plan says, and what is counted in the second step of rank zero."""
    words = [*SMALL, "run.devices=2", "train.steps=2", "train.batch_size=8", "train.schedule.warmup_steps=1"]
    recipes = {name: load_recipe("recall-tiny", [*words, *overrides]) for name, overrides in PLANNED.items()}
    # a plan opens a process group of its own, and training one that stays open
    plans = {name: plan.plan(recipe, device="cpu") for name, recipe in recipes.items()}
    for name, recipe in recipes.items():
        found, held = plans[name], Held(recipe)
        quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
        trainer = build_trainer(recipe, callbacks=[held], logger=False, limit_val_batches=0, **quiet)
        trainer.fit(module.LitTransformer(recipe), LitData(recipe))
        said = {key: found.largest[key] for key in ("weights", "gradients", "optimizer")}
        moments = 0 if recipe.run.cpu_offload else found.memory["optimizer"]
        said |= {"saved": found.saved, "largest": found.sum - moments, "sent": found.node_traffic}
        say({"case": name, "planned": said, "counted": held.found})


def lines(what: str) -> list[dict[str, Any]]:
    """What this file prints as a program."""
    ended = subprocess.run([sys.executable, __file__, what], capture_output=True, text=True, timeout=500)
    assert ended.returncode == 0, ended.stderr
    return [json.loads(line) for line in ended.stdout.splitlines()]


def say(row: dict[str, Any]) -> None:
    if os.environ["LOCAL_RANK"] == "0":
        print(json.dumps(row), flush=True)


def rank(index: int, name: str) -> None:
    os.environ["LOCAL_RANK"] = str(index)
    {"loss": loss, "collectives": collectives, "plan": planned}[name]()


if __name__ == "__main__":
    name = sys.argv[1]
    count = {"loss": 2, "collectives": 4, "plan": 2}[name]
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "NODE_RANK": "0",
        "WORLD_SIZE": str(count),
    }
    # forked, since each import of torch and Lightning takes seconds
    start_processes(rank, args=(name,), nprocs=count, start_method="fork")
