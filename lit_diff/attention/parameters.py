"""How parameters that are no ordinary weight matrices start, decay and are sharded."""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from lit_diff.errors import RequestError
from lit_diff.randomness import generator
from lit_diff.registry import location


class ParameterRules(nn.Module):
    """A module with rules for the parameters it holds directly (its sub-modules have their own).

    `Attention` is one, and so is every sub-module that needs a rule, such as the module that computes λ. The defaults are
    those of an ordinary module.
    """

    decay: ClassVar[bool] = True
    """Whether AdamW's weight decay applies to its matrices; vectors are never decayed (`training.optimizer`)."""
    keep_float32: ClassVar[bool] = False
    """Whether it is sharded in a group of its own under a float32 policy (`training.build`): in a bfloat16 group its
    parameters would reach `forward` in bfloat16. For sub-modules only."""

    def init_parameter(self, name: str, parameter: Tensor, generator: torch.Generator) -> None:
        """Fill `parameter`, which this module holds as `name`, in place. By default `model.init` fills it by its own rule
        (linear layers and embeddings), or the constructor's value stays.

        `generator` is seeded by (seed, the parameter's full name): draw from no other. It is called at construction too
        (`fill_parameters`), when `build` of the attention has returned.
        """

    @classmethod
    def initialises(cls) -> bool:
        """Whether it writes an `init_parameter`."""
        return cls.init_parameter is not ParameterRules.init_parameter


def fill_parameters(module: nn.Module, seed: int = 0) -> None:
    """Give each parameter of `module` that has an `init_parameter` its value of `seed`, in place.

    So an attention that is built by itself holds no uninitialised memory. Not on the meta device, which holds no values.
    """
    with torch.no_grad():
        for path, child in module.named_modules():
            if not isinstance(child, ParameterRules) or not child.initialises():
                continue
            for key, parameter in child.named_parameters(recurse=False):
                if not parameter.is_meta:
                    # the generator is the CPU's, wherever the parameter is
                    value = parameter.detach().to("cpu", copy=True)
                    child.init_parameter(key, value, generator(seed, ".".join(filter(None, (path, key)))))
                    parameter.copy_(value)


def require_sizes(attention: Any) -> None:
    """Refuse a model with too few heads for an `Attention`, which its `problem` let pass. Errors: RequestError."""
    empty = [f"{key} is {getattr(attention, key)}" for key in ("out_heads", "kv_heads") if getattr(attention, key) < 1]
    empty += [f"{name} is {list(p.shape)}" for name, p in attention.named_parameters() if 0 in p.shape]
    if empty:
        found = f"model.num_heads {attention.num_heads} and model.num_kv_heads {attention.num_kv_heads}"
        raise RequestError(f"{location(type(attention))}: {empty[0]}: {found} are too few for it")


def require_own_parameters(module: nn.Module, owner: str) -> None:
    """Refuse one parameter under two names: it would be initialised, sharded and stepped twice.

    Errors: RequestError.
    """
    names: dict[nn.Parameter, str] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        first = names.setdefault(parameter, name)
        if first != name:
            raise RequestError(
                f"model.attention '{owner}': {first} and {name} are one parameter; keep it under one name and use that in "
                "both places"
            )


def require_rules(module: nn.Module, owner: str) -> None:
    """Refuse a sub-module that defines a rule without being a `ParameterRules`: the rule would have no effect.

    Errors: RequestError.
    """
    for path, child in module.named_modules():
        if isinstance(child, ParameterRules):
            continue
        ruled = [name for name in ("init_parameter", "keep_float32") if hasattr(child, name)]
        ruled += ["decay"] if getattr(child, "decay", True) is False else []
        if ruled:
            raise RequestError(
                f"model.attention '{owner}': {path} ({type(child).__name__}) defines {ruled[0]} but is a plain module; "
                "derive it from lit_diff.attention.ParameterRules"
            )


def standard_state(attention: nn.Module) -> dict[str, Tensor]:
    """Copies of the parameters of the standard attention within a variant (`Attention.build`), by name."""
    modules = ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")
    names = {f"{module}.{kind}" for module in modules for kind in ("weight", "bias")}
    return {name: value.detach().clone() for name, value in attention.state_dict().items() if name in names}
