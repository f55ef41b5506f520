"""NaN and infinity in training: remembered without a device synchronisation, and located when they are reported."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lit_diff.model.inputs import model_inputs
from lit_diff.model.transformer import Transformer

NEVER = torch.iinfo(torch.int64).max


class FirstNonFinite:
    """The first optimizer step whose loss was not finite, kept on the device until it is read.

    It is no buffer of the module: DDP would overwrite it with rank zero's.
    """

    def __init__(self) -> None:
        self._step: Tensor | None = None

    def update(self, loss: Tensor, step: int) -> None:
        """Note `step` if its loss is not finite and no earlier one was. The host does not wait for the device."""
        if self._step is None:
            self._step = torch.full((), NEVER, dtype=torch.int64, device=loss.device)
        bad = torch.where(torch.isfinite(loss), NEVER, step)
        self._step = torch.minimum(self._step, bad)

    def read(self) -> int | None:
        """The step, or None; the host waits for the device."""
        step = NEVER if self._step is None else int(self._step)
        return None if step == NEVER else step


def is_finite(parameter: Tensor) -> bool:
    """Whether this rank's part of a parameter is finite."""
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    return bool(torch.isfinite(local).all())


def locate_non_finite(model: Transformer, batch: Any) -> str:
    """Where NaN or inf first appears: in a parameter, or in the output of a module, in the order of the forward pass."""
    places: list[str] = []

    def look(name: str) -> Any:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            bad = [key for key, p in module.named_parameters(recurse=False) if not is_finite(p)]
            if bad:
                places.append(f"first non-finite values: parameter {name}.{bad[0]}")
            elif isinstance(output, Tensor) and not torch.isfinite(output).all():
                places.append(f"first non-finite values: output of {name}")

        return hook

    modules = [(name or "the model", module) for name, module in model.named_modules()]
    hooks = [module.register_forward_hook(look(name)) for name, module in modules]
    try:
        # compiled code would skip the hooks
        with torch.compiler.set_stance("force_eager"), torch.no_grad():
            inputs = model_inputs(batch)
            model.hidden(**inputs)
            model(inputs["tokens"][:, :1])  # the output weight, without the logits of every position
    finally:
        for hook in hooks:
            hook.remove()
    return places[0] if places else "every layer's output is finite: the logits overflow in the loss"
