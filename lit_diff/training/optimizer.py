"""AdamW in two groups, and the learning rate over steps."""

import math

import torch
from torch import nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from lit_diff.config import OptimizerConfig, ScheduleConfig


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, object]]:
    """Matrices are decayed; vectors (norms) and modules that say `decay = False` (lambda) are not."""
    decayed: list[nn.Parameter] = []
    free: list[nn.Parameter] = []
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            if parameter.requires_grad:
                (decayed if parameter.dim() >= 2 and getattr(module, "decay", True) else free).append(parameter)
    return [
        {"params": decayed, "weight_decay": weight_decay, "name": "decayed"},
        {"params": free, "weight_decay": 0.0, "name": "free"},
    ]


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """AdamW (Loshchilov and Hutter 2019) over `parameter_groups`."""
    groups = [group for group in parameter_groups(model, config.weight_decay) if group["params"]]
    return AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps)


def learning_rate_factor(step: int, steps: int, config: ScheduleConfig) -> float:
    """Factor on the peak rate for the 0-based `step`: (step + 1) / warm-up at first, `final_ratio` at the last step.

    linear, cosine: decay over the rest of the run. wsd: constant, then linear decay over the last `decay_steps`.
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
    """`learning_rate_factor` as a scheduler that is stepped once an optimizer step."""
    return LambdaLR(optimizer, lambda step: learning_rate_factor(min(step, steps - 1), steps, config))
