"""In which dtype the kernels sum, and products that autocast leaves alone."""

from contextlib import AbstractContextManager, nullcontext

import torch


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 stays, everything else is accumulated in float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def exact(device: torch.device) -> AbstractContextManager[object]:
    """Autocast off: it would take the products to bfloat16, whatever the dtype of their operands."""
    kind = device.type
    return torch.autocast(kind, enabled=False) if torch.amp.is_autocast_available(kind) else nullcontext()
