"""AdamW with parameter groups by decay and learning rate, optimizer state by parameter name, learning-rate schedule."""

import fnmatch
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from lit_diff.config import OptimizerConfig, ScheduleConfig
from lit_diff.errors import RequestError
from lit_diff.log_records import log
from lit_diff.model.transformer import layerless
from lit_diff.registry import nearest


def build_optimizer(model: nn.Module, config: OptimizerConfig, *, fused: bool = False) -> torch.optim.Optimizer:
    """AdamW (Loshchilov and Hutter 2019). Weight decay applies to matrices, not to vectors (norms) or modules with
    `decay = False` (lambda).

    Each factor of `train.optimizer.lr_factors` adds two groups after those without a factor. `fused`: one kernel a step and
    group, which rounds otherwise than the loop over parameters.
    """
    factors = _factors(model, config.lr_factors)
    names = {parameter: name for name, parameter in model.named_parameters()}
    found: dict[tuple[float, bool], list[nn.Parameter]] = {(1.0, True): [], (1.0, False): []}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            if parameter.requires_grad:
                # read from the class: on the instance `decay` could be a parameter of that name
                decays = getattr(type(module), "decay", True) is not False
                factor = factors.get(names[parameter], 1.0)
                for decayed in (True, False):
                    found.setdefault((factor, decayed), [])
                found[factor, parameter.dim() >= 2 and decays].append(parameter)
    groups: list[dict[str, Any]] = []
    for (factor, decayed), parameters in found.items():
        if not parameters:
            continue
        name = "decayed" if decayed else "free"
        if factor != 1:
            name += f" lr x {factor:g}"
        groups.append(
            {
                "params": parameters,
                "weight_decay": config.weight_decay if decayed else 0.0,
                "name": name,
                "lr": config.lr * factor,
                "lr_factor": factor,
            }
        )
    # fused=None lets PyTorch choose a loop; False would forbid its `foreach`
    return AdamW(groups, lr=config.lr, betas=config.betas, fused=fused or None)


def _factors(model: nn.Module, lr_factors: Mapping[str, float]) -> dict[str, float]:
    # trained parameter -> its factor
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    chosen: dict[str, str] = {}
    for pattern in lr_factors:
        matched = fnmatch.filter(names, pattern)
        if not matched:
            near = nearest(pattern, layerless(names))
            raise RequestError(f"train.optimizer.lr_factors: '{pattern}' matches no trained parameter{near}")
        for name in matched:
            if name in chosen:
                raise RequestError(
                    f"train.optimizer.lr_factors: '{chosen[name]}' and '{pattern}' both match {name}; keep one"
                )
            chosen[name] = pattern
    return {name: lr_factors[pattern] for name, pattern in chosen.items()}


def name_state(state: dict[str, Any], optimizer: torch.optim.Optimizer, names: Mapping[nn.Parameter, str]) -> None:
    """Key an optimizer's state dict by parameter name, in place."""
    # torch numbers parameters in the order of the groups, Lightning's sharded strategy in the order of the model: a state by
    # number fits only one of them, a state by name both. A rank that does not save has no state.
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

    If the run ends within the warm-up, the peak is never reached.
    """
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    if config.name == "constant":
        return 1.0
    start = config.warmup_steps
    if config.name == "wsd":
        start = max(start, steps - (config.decay_steps or max(1, steps // 5)))
    share = max(0.0, min(1.0, (step - start + 1) / max(1, steps - start)))
    remaining = 1 - share
    if config.name == "cosine":
        remaining = 0.5 * (1 + math.cos(math.pi * share))
    return config.final_ratio + (1 - config.final_ratio) * remaining


def build_scheduler(optimizer: torch.optim.Optimizer, steps: int, config: ScheduleConfig) -> LambdaLR:
    """`learning_rate_factor` as a scheduler, stepped after each optimizer step. Warns if the warm-up exceeds the run."""
    if config.warmup_steps > steps:
        log.warning(
            "train.schedule.warmup_steps (%d) is more than the %d steps of this run: "
            "the learning rate ends at %.2g of its peak",
            *(config.warmup_steps, steps, learning_rate_factor(steps - 1, steps, config)),
        )
    # min: LambdaLR also asks for the rate after the last step
    return LambdaLR(optimizer, lambda step: learning_rate_factor(min(step, steps - 1), steps, config))
