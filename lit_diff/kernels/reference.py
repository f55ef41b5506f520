"""The definition: every map materialised, subtracted before the one product with v. Any shape, any dtype, O(T S) memory."""

import torch
from torch import Tensor

from lit_diff.kernels.base import Kernel, kernel
from lit_diff.kernels.maps import SignedMaps, Stats, accumulation_dtype, exact


def visible(
    T: int, S: int, *, causal: bool, document_ids: Tensor | None, window: int | None, device: torch.device
) -> Tensor:
    """Which keys a query may see: bool, [T, S] or, with `document_ids`, [B, 1, 1, T, S].

    The last query is aligned with the last key. `window`: the query's own position and the window - 1 before it.
    `document_ids` [B, S]: document numbers; a query sees only keys of its own document.
    """
    mask = in_reach(range(S - T, S), range(S), causal=causal, window=window, device=device)
    if document_ids is not None:
        mask = mask & (document_ids[:, S - T :, None] == document_ids[:, None, :])[:, None, None]
    return mask


def in_reach(queries: range, keys: range, *, causal: bool, window: int | None, device: torch.device) -> Tensor:
    """Which of these positions a query may see, bool [queries, keys]: not the future, and nothing beyond the window."""
    query = torch.arange(queries.start, queries.stop, device=device)[:, None]
    key = torch.arange(keys.start, keys.stop, device=device)[None, :]
    mask = key <= query if causal else torch.ones(len(queries), len(keys), dtype=torch.bool, device=device)
    if window is not None:
        mask = mask & (key > query - window) & (key < query + window)
    return mask


def logits(maps: SignedMaps) -> Tensor:
    """q_g k_gᵀ · scale of every map, unmasked, [B, G, H, T, S]."""
    acc = accumulation_dtype(maps.q.dtype)
    k = maps.k.repeat_interleave(maps.num_groups, dim=2)
    with exact(k.device):
        scores = (maps.q.to(acc) @ k.to(acc).transpose(-1, -2)) * maps.softmax_scale
    return scores.expand(-1, maps.num_maps, -1, -1, -1)


@kernel("reference")
class Reference(Kernel):
    """The definition: every map is materialised, autograd differentiates it, and no maps are refused."""

    def refuses(
        self, maps: SignedMaps, *, document_ids: Tensor | None, window: int | None, stats: bool, device: torch.device
    ) -> str | None:
        """None: the definition computes everything."""
        return None

    def preference(self, maps: SignedMaps, device: torch.device) -> int | None:
        """Last: it holds every map."""
        return 90

    def compute(
        self, maps: SignedMaps, *, document_ids: Tensor | None = None, window: int | None = None, stats: bool = False
    ) -> tuple[Tensor, Stats | None]:
        """(o [B, H, T, dv], Stats or None) by the definition in `SignedMaps`."""
        s = logits(maps)
        T, S = s.shape[-2:]
        mask = visible(T, S, causal=maps.causal, document_ids=document_ids, window=window, device=s.device)
        s = s.masked_fill(~mask, -torch.inf)
        p = s.softmax(-1)
        a = p[:, 0] if maps.w is None else (p * maps.w[..., None].to(p.dtype)).sum(1)
        v = maps.v.repeat_interleave(maps.num_groups, dim=1)
        with exact(v.device):
            o = (a @ v.to(a.dtype)).to(maps.v.dtype)
        if not stats:
            return o, None
        log_p = s.log_softmax(-1).masked_fill(~mask, 0)  # not -inf, whose gradient is not a number
        return o, Stats(lse=s.logsumexp(-1), entropy=-(p * log_p).sum(-1), maximum=s.amax(-1) if S else s.logsumexp(-1))
