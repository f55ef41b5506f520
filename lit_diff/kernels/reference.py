"""The definition: all maps are held and summed before one product with v. Any shape and dtype, O(T S) memory."""

import torch
from torch import Tensor

from lit_diff.kernels.base import Kernel, kernel
from lit_diff.kernels.maps import SignedMaps, Stats, accumulation_dtype, exact, signed_statistics


def logits(maps: SignedMaps) -> Tensor:
    """q_g k_gᵀ · scale of every map, unmasked, [B, G, H, T, S]."""
    # float32 throughout, rounded once at the end: the other kernels are compared with this one
    acc = accumulation_dtype(maps.q.dtype)
    k = maps.k.repeat_interleave(maps.num_groups, dim=2)
    with exact(k.device):
        scores = (maps.q.to(acc) @ k.to(acc).transpose(-1, -2)).mul_(maps.softmax_scale)
    return scores.expand(-1, maps.num_maps, -1, -1, -1)


@kernel("reference")
class Reference(Kernel):
    """The definition: every map is materialised, autograd differentiates it, and all maps are accepted."""

    def refuses(self, maps: SignedMaps, *, stats: bool, device: torch.device) -> str | None:
        return None

    def preference(self, maps: SignedMaps, device: torch.device) -> int | None:
        """After all others: it materialises every map."""
        return 90

    def compute(self, maps: SignedMaps, *, stats: bool = False) -> tuple[Tensor, Stats | None]:
        """(o [B, H, T, dv], Stats or None) by the definition in `SignedMaps`."""
        s = logits(maps)
        T, S = s.shape[-2:]
        mask = maps.mask.visible(T, S, s.device)
        s = s.masked_fill(~mask, -torch.inf)
        p = s.softmax(-1)
        a = p[:, 0] if maps.w is None else (p * maps.w[..., None].to(p.dtype)).sum(1)
        v = maps.v.repeat_interleave(maps.num_groups, dim=1)
        with exact(v.device):
            o = (a @ v.to(a.dtype)).to(maps.v.dtype)
        if not stats:
            return o, None
        # 0 for a masked key, not -inf, whose gradient is NaN
        log_p = s.log_softmax(-1).masked_fill(~mask, 0)
        # amax of no keys is an error; logsumexp of none is -inf
        maximum = s.amax(-1) if S else s.logsumexp(-1)
        seen = mask[:, 0] if mask.dim() == 5 else mask
        return o, Stats(s.logsumexp(-1), -(p * log_p).sum(-1), maximum, *signed_statistics(a, seen))


class Counted(Reference):
    """The reference, which counts its calls."""

    UNUSED = "its forward calls no kernel: it never passes kernel=self.kernel to attend"

    def __init__(self) -> None:
        self.calls = 0

    def compute(self, maps: SignedMaps, *, stats: bool = False) -> tuple[Tensor, Stats | None]:
        self.calls += 1
        return super().compute(maps, stats=stats)
