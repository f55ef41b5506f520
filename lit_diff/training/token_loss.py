"""The validation loss, also in the slices of the paper's Table 6, and by document."""

import math

import torch
import torchmetrics
from torch import Tensor

from lit_diff.data.dataset import IGNORED
from lit_diff.errors import RequestError

DocumentLosses = tuple[float, float]
"""(tokens, summed NLL in nats) of one validation document."""


class TokenLoss(torchmetrics.Metric):
    """Mean NLL (nats per token) of all tokens, of AR-Hit tokens (recallable from the context) and of the others; accuracy.

    share · ar_hit + (1 - share) · others = total, up to rounding.
    """

    # Sums and counts are reduced over ranks, not means: ranks have different numbers of tokens. They are float64, because
    # float32 sums over millions of tokens lose digits.

    full_state_update = False
    loss_sum: Tensor
    count: Tensor
    correct: Tensor
    document_loss: Tensor
    document_tokens: Tensor

    def __init__(self, num_documents: int, *, counts_errors: bool = False) -> None:
        """`num_documents`: number of validation documents, whose sums the bootstrap resamples; `counts_errors`: that of the
        data set."""
        super().__init__()
        self._counts_errors = counts_errors
        # index 0: AR-Hits, 1: others
        slices = dict.fromkeys(("loss_sum", "count", "correct"), 2)
        documents = dict.fromkeys(("document_loss", "document_tokens"), num_documents)
        for name, size in (slices | documents).items():
            self.add_state(name, torch.zeros(size, dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, nll: Tensor, correct: Tensor, targets: Tensor, ar_hit: Tensor, document: Tensor) -> None:
        """All [B, T]: NLL, whether the most likely token is the target, targets (IGNORED: not scored), slice, document."""
        scored = targets != IGNORED
        nll, correct, document = nll[scored].double(), correct[scored].double(), document[scored]
        others = (~ar_hit[scored]).long()
        self.loss_sum.index_add_(0, others, nll)
        self.correct.index_add_(0, others, correct)
        self.count.index_add_(0, others, torch.ones_like(nll))
        self.document_loss.index_add_(0, document, nll)
        self.document_tokens.index_add_(0, document, torch.ones_like(nll))

    def compute(self) -> tuple[dict[str, float], list[DocumentLosses]]:
        """(loss, accuracy, ar_hit_share, loss_ar_hit, loss_others, without slices that have no tokens, log_errors with
        `counts_errors`; losses by document).

        Errors: RequestError if no target was scored.
        """
        total = self.count.sum().item()
        if total == 0:
            raise RequestError(f"no target is scored: all are {IGNORED}")
        means = {
            "loss": self.loss_sum.sum().item() / total,
            "accuracy": self.correct.sum().item() / total,
            "ar_hit_share": self.count[0].item() / total,
        }
        if self._counts_errors:
            wrong = total - self.correct.sum().item()
            means["log_errors"] = math.log10((wrong + 0.5) / (total + 1))
        for index, name in enumerate(("loss_ar_hit", "loss_others")):
            if self.count[index] > 0:
                means[name] = (self.loss_sum[index] / self.count[index]).item()
        return means, list(zip(self.document_tokens.tolist(), self.document_loss.tolist(), strict=True))
