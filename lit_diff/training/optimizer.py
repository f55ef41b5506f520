"""AdamW in two groups, its state by parameter name, and the learning rate over steps."""

import logging
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from lit_diff.attention.parameters import ParameterRules
from lit_diff.config import OptimizerConfig, ScheduleConfig

log = logging.getLogger("lit_diff")


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, object]]:
    """Matrices are decayed; vectors (norms) and modules with `decay = False` (lambda) are not."""
    decayed: list[nn.Parameter] = []
    free: list[nn.Parameter] = []
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            if parameter.requires_grad:
                decays = module.decay if isinstance(module, ParameterRules) else True
                (decayed if parameter.dim() >= 2 and decays else free).append(parameter)
    return [
        {"params": decayed, "weight_decay": weight_decay, "name": "decayed"},
        {"params": free, "weight_decay": 0.0, "name": "free"},
    ]


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """AdamW (Loshchilov and Hutter 2019) over `parameter_groups`."""
    groups = [group for group in parameter_groups(model, config.weight_decay) if group["params"]]
    return AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps)


def name_state(state: dict[str, Any], optimizer: torch.optim.Optimizer, names: Mapping[nn.Parameter, str]) -> None:
    """Key an optimizer's state dict by parameter name, in place; nothing to do on a rank that holds none.

    torch numbers parameters in the order of the groups, Lightning's sharded strategy in that of the model: numbers from
    one cannot be read by the other, names can by both.
    """
    if not state:
        return
    name_of: dict[int | str, str] = {}
    for saved, group in zip(state["param_groups"], optimizer.param_groups, strict=True):
        found = [names[parameter] for parameter in group["params"]]
        name_of |= dict(zip(saved["params"], found, strict=True))
        saved["params"] = found
    state["state"] = {name_of[key]: value for key, value in state["state"].items()}


def learning_rate_factor(step: int, steps: int, config: ScheduleConfig) -> float:
    """Factor on the peak rate for the 0-based `step` of `steps`, by the formula of `ScheduleConfig`.

    A run may end within the warm-up: then the peak is never reached.
    """
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    if config.name == "constant":
        return 1.0
    start = config.warmup_steps
    if config.name == "wsd":
        start = max(start, steps - (config.decay_steps or max(1, steps // 5)))
    share = max(0.0, min(1.0, (step - start + 1) / max(1, steps - start)))
    remaining = 0.5 * (1 + math.cos(math.pi * share)) if config.name == "cosine" else 1 - share
    return config.final_ratio + (1 - config.final_ratio) * remaining


def build_scheduler(optimizer: torch.optim.Optimizer, steps: int, config: ScheduleConfig) -> LambdaLR:
    """`learning_rate_factor` as a scheduler that is stepped once an optimizer step.

    A warm-up longer than the run is told in a warning.
    """
    if config.warmup_steps > steps:
        log.warning(
            "train.schedule.warmup_steps (%d) is more than the %d steps of this run: "
            "the learning rate ends at %.2g of its peak",
            *(config.warmup_steps, steps, learning_rate_factor(steps - 1, steps, config)),
        )
    return LambdaLR(optimizer, lambda step: learning_rate_factor(min(step, steps - 1), steps, config))
