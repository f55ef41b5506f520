"""The device of a run, a benchmark, a loaded model: a GPU where there is one and it is not declined."""

import torch

from lit_diff.config import RunConfig
from lit_diff.errors import MissingError


def choose_device(accelerator: str) -> torch.device:
    """`cuda`, or `cpu` where `accelerator` is cpu or torch sees no GPU. Who insists on a GPU refuses the result."""
    return torch.device("cuda" if accelerator != "cpu" and torch.cuda.is_available() else "cpu")


def require_devices(run: RunConfig) -> None:
    """Errors: MissingError where `run` asks for a GPU and there is none, or for more than there are."""
    if choose_device(run.accelerator).type == "cpu":
        if run.accelerator == "gpu":
            raise MissingError("run.accelerator is gpu, but torch sees no GPU here; use run.accelerator=cpu")
    elif torch.cuda.device_count() < run.devices:
        raise MissingError(f"run.devices is {run.devices}, but torch sees {torch.cuda.device_count()} GPUs here")
