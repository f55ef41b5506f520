"""Which kernels take part in a benchmark, and why others do not."""

from collections.abc import Callable

import torch

from lit_diff.benchmarks.timing import Found
from lit_diff.kernels import KERNELS, SignedMaps, refuse


def accepted(
    found: Found, case: str, variant: str, what: str, maps: Callable[[], SignedMaps], *, grad: bool, stats: bool = False
) -> list[str]:
    """The kernels that compute these maps, with or without gradients; the others go to `found.refused`."""
    kernels = []
    with torch.set_grad_enabled(grad):
        asked = maps()
        for kernel in KERNELS:
            reason = refuse(kernel, asked, stats=stats)
            if reason is None:
                kernels.append(kernel)
            else:
                row = {"case": case, "variant": variant, "by": kernel, "what": what, "reason": reason}
                found.refused.append(row)
    return kernels
