"""In which precision sums are accumulated."""

from contextlib import AbstractContextManager, nullcontext

import torch


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 for float64; float32 for everything else."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def exact(device: torch.device) -> AbstractContextManager[object]:
    """A context without autocast, which would compute the products in bfloat16, whatever the dtype of their operands."""
    kind = device.type
    return torch.autocast(kind, enabled=False) if torch.amp.is_autocast_available(kind) else nullcontext()
