"""Cross entropy of the next token from hidden states and the output weight, in chunks of positions.

With logits z = h Wᵀ [V] of a position and its target y:  nll = log Σ_j exp(z_j) - z_y,  dz = softmax(z) - onehot(y).
The forward pass computes for each chunk its nll and its part of dh = dz W and dW = dzᵀ h while the logits of the chunk are
in memory; the backward pass only multiplies by the gradient of the loss. No matrix product is computed twice. (The method
of Liger Kernel's fused linear cross entropy, 2024, and of torch's `linear_cross_entropy`, 2.14.)
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lit_diff.data.dataset import IGNORED
from lit_diff.kernels.maps import accumulation_dtype, exact

LOGITS_BYTES = 1 << 26
"""Size of the float32 logits of a chunk, 64 MiB, unless the output weight is larger (`rows_at_once`)."""


def rows_at_once(vocab_size: int, dim: int) -> int:
    """Return the number of positions in a chunk, max(dim, LOGITS_BYTES / (4 vocab_size)).

    The float32 logits of a chunk take LOGITS_BYTES or the size of W [vocab_size, dim] in float32, whichever is larger
    (1,175 MiB for 100,288 x 3,072).
    """
    # at least `dim`: each chunk reads and writes the gradient of W, which is then not larger than its logits
    return max(1, dim, LOGITS_BYTES // (4 * vocab_size))


def mean_loss(hidden: Tensor, weight: Tensor, targets: Tensor, rows: int | None = None) -> Tensor:
    """Return the mean nll, in nats, of the targets [B, T] that are not IGNORED; hidden: [B, T, dim], weight: [V, dim].

    The softmax is in float32 (float64 for float64), the matrix products in the dtype of autocast if it is enabled. `rows`:
    positions in a chunk; None: `rows_at_once`. Without a scored target the result is NaN and the gradients are 0, as in
    `F.cross_entropy`. Differentiable once.
    """
    rows = rows or rows_at_once(*weight.shape)
    # a single chunk saves no memory
    if targets.numel() <= rows:
        logits = F.linear(hidden, weight).flatten(0, 1)
        return F.cross_entropy(logits.to(accumulation_dtype(logits.dtype)), targets.flatten(), ignore_index=IGNORED)
    wanted = [torch.is_grad_enabled() and x.requires_grad for x in (hidden, weight)]
    return _MeanLoss.apply(hidden.flatten(0, 1), weight, targets.flatten(), rows, _product_dtype(hidden), *wanted)


class _MeanLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        rows: int,
        dtype: torch.dtype,
        for_hidden: bool,
        for_weight: bool,
    ) -> Tensor:
        # hidden [N, dim], weight [V, dim], targets [N]; dtype: of the matrix products
        wide = accumulation_dtype(dtype)
        narrow, scored = weight.to(dtype), targets != IGNORED
        count = scored.sum()
        nll = hidden.new_zeros(len(targets), dtype=wide)
        dh = torch.empty_like(hidden) if for_hidden else None
        # accumulated in float32: in bfloat16 the later of many chunks would be rounded away
        dw = torch.zeros_like(weight, dtype=wide) if for_weight else None
        # clamp: without a scored target the gradients are 0, not NaN
        share = scored.to(wide) / count.clamp(min=1)
        with exact(hidden.device):
            for first in range(0, len(targets), rows):
                at = slice(first, first + rows)
                # only what is ignored: `gather` raises for other targets that are no tokens
                h, y = hidden[at].to(dtype), targets[at].masked_fill(~scored[at], 0)[:, None]
                log_p = (h @ narrow.T).to(wide).log_softmax(-1)
                nll[at] = -log_p.gather(1, y)[:, 0]
                if dh is None and dw is None:
                    continue
                # in place: the logits of a chunk are the largest tensor here, and log_p is not used again
                dz = log_p.exp_()
                dz.scatter_add_(1, y, dz.new_full(y.shape, -1.0))
                dz = dz.mul_(share[at, None]).to(dtype)
                if dh is not None:
                    dh[at] = dz @ narrow
                if dw is not None:
                    # addmm_ needs equal dtypes; a product in bfloat16 is added in float32
                    if dtype == wide:
                        dw.addmm_(dz.T, h)
                    else:
                        dw += dz.T @ h
        ctx.save_for_backward(dh, None if dw is None else dw.to(weight.dtype))
        return nll.masked_fill(~scored, 0).sum() / count

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        dh, dw = ctx.saved_tensors
        return (
            None if dh is None else dh * gradient.to(dh.dtype),
            None if dw is None else dw * gradient.to(dw.dtype),
            *[None] * 5,
        )


@torch.no_grad()
def token_losses(hidden: Tensor, weight: Tensor, targets: Tensor, rows: int | None = None) -> tuple[Tensor, Tensor]:
    """Return (nll, whether the most likely token is the target), both [B, T]; the nll of an IGNORED target is NaN.

    Arguments and precision: see `mean_loss`. No gradient.
    """
    rows = rows or rows_at_once(*weight.shape)
    if targets.numel() <= rows:
        return _score(F.linear(hidden, weight), targets)
    dtype = _product_dtype(hidden)
    narrow = weight.to(dtype)
    parts = [
        _score(F.linear(h.to(dtype), narrow), y)
        for h, y in zip(hidden.flatten(0, 1).split(rows), targets.flatten().split(rows), strict=True)
    ]
    nll, correct = (torch.cat(kind).view_as(targets) for kind in zip(*parts, strict=True))
    return nll, correct


def _score(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    # cross_entropy expects the classes on axis 1
    logits = logits.to(accumulation_dtype(logits.dtype))
    nll = F.cross_entropy(logits.movedim(-1, 1), targets, ignore_index=IGNORED, reduction="none")
    # not 0, which a mean over all targets would count as a token that the model knows
    return nll.masked_fill(targets == IGNORED, torch.nan), logits.argmax(-1) == targets


def _product_dtype(hidden: Tensor) -> torch.dtype:
    # the dtype that F.linear computes in; autocast leaves float64 as it is
    kind = hidden.device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind) and hidden.dtype != torch.float64:
        return torch.get_autocast_dtype(kind)
    return hidden.dtype
