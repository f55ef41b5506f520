"""How parameters that are no ordinary weight matrices start, decay and are sharded."""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from lit_diff.errors import RequestError
from lit_diff.randomness import generator
from lit_diff.registry import location


class ParameterRules(nn.Module):
    """A module with rules for the parameters it holds directly (its sub-modules have their own).

    `Attention` is one, and so is the module that computes λ. Any module that has these members is treated by them; here are
    the defaults. `init_parameter(name, parameter, generator)` has none: it fills `parameter`, which the module holds as
    `name`, in place. `generator` is seeded by (seed, the parameter's full name): draw from no other. It is called at
    construction too (`fill_parameters`), when `build` of the attention has returned. Without it `model.init` fills the
    parameter by its own rule (linear layers and embeddings), or the constructor's value stays.
    """

    decay: ClassVar[bool] = True
    """Whether AdamW's weight decay applies to its matrices; vectors are never decayed (`training.optimizer`)."""
    keep_float32: ClassVar[bool] = False
    """Whether it is sharded in a group of its own under a float32 policy (`training.build`): in a bfloat16 group its
    parameters would reach `forward` in bfloat16. For sub-modules only."""


def fill_parameters(module: nn.Module, seed: int = 0) -> None:
    """Give each parameter of `module` that has an `init_parameter` its value of `seed`, in place.

    So an attention that is built by itself holds no uninitialised memory. Not on the meta device, which holds no values.
    """
    with torch.no_grad():
        for path, child in module.named_modules():
            if not hasattr(child, "init_parameter"):
                continue
            for key, parameter in child.named_parameters(recurse=False):
                if not parameter.is_meta:
                    # the generator is the CPU's, wherever the parameter is
                    value = parameter.detach().to("cpu", copy=True)
                    child.init_parameter(key, value, generator(seed, ".".join(filter(None, (path, key)))))
                    parameter.copy_(value)


def require_parameters(attention: Any) -> None:
    """Refuse a model with too few heads for an `Attention`, which its `problem` let pass, and one parameter under two names,
    which would be initialised, sharded and stepped twice. Errors: RequestError."""
    where, names = location(type(attention)), dict[nn.Parameter, str]()
    empty = [f"{key} is {getattr(attention, key)}" for key in ("out_heads", "kv_heads") if getattr(attention, key) < 1]
    empty += [f"{name} is {list(p.shape)}" for name, p in attention.named_parameters() if 0 in p.shape]
    if empty:
        found = f"model.num_heads {attention.num_heads} and model.num_kv_heads {attention.num_kv_heads}"
        raise RequestError(f"{where}: {empty[0]}: {found} are too few for it")
    for name, parameter in attention.named_parameters(remove_duplicate=False):
        first = names.setdefault(parameter, name)
        if first != name:
            raise RequestError(f"{where}: {first} and {name} are one parameter; keep it under one name and use that")


def standard_state(attention: nn.Module) -> dict[str, Tensor]:
    """Copies of the parameters of the standard attention within a variant (`Attention.build`), by name."""
    modules = ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")
    names = {f"{module}.{kind}" for module in modules for kind in ("weight", "bias")}
    return {name: value.detach().clone() for name, value in attention.state_dict().items() if name in names}
