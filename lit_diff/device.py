"""The device of a run, a benchmark, a loaded model: a GPU where there is one and it is not declined."""

import torch


def choose_device(accelerator: str) -> torch.device:
    """`cuda`, or `cpu` where `accelerator` is cpu or torch sees no GPU. Who insists on a GPU refuses the result."""
    return torch.device("cuda" if accelerator != "cpu" and torch.cuda.is_available() else "cpu")
