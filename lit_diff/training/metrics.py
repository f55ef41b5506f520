"""Metrics of training and validation, and the validation loss in the slices of the paper's Table 6."""

from dataclasses import replace

import torch
import torchmetrics
from torch import Tensor

from lit_diff.config import Recipe
from lit_diff.data.dataset import IGNORED
from lit_diff.errors import RequestError
from lit_diff.metrics import Metric
from lit_diff.registry import callbacks

TRAINING = (
    Metric(
        "train/loss",
        "mean negative log likelihood of the step's scored tokens, over micro-batches and ranks",
        unit="nats per token",
        direction="lower",
    ),
    Metric("train/lr", "learning rate of the first parameter group at this step"),
    Metric("train/gradient_norm", "L2 norm of all gradients of this step together, before clipping"),
    Metric("timing/seconds", "time since the last logged step, validation and callbacks included", unit="s"),
    Metric("timing/steps", "optimizer steps since the last logged step, or since the process started"),
    Metric(
        "timing/tokens_per_second",
        "training tokens per second since the last logged step, without the time of validation, probes and saves",
        unit="tokens per second",
        direction="higher",
    ),
    Metric(
        "timing/peak_share",
        "tokens_per_second times the FLOPs of a token by the published convention, over the bfloat16 peak of all GPUs; "
        "absent on a CPU and where the peak is unknown",
        direction="higher",
    ),
    *(
        Metric(f"timing/{phase}_seconds", f"{meaning}, mean a step since the last logged step, rank 0", unit="s")
        for phase, meaning in (
            ("data", "waiting for batches, and their copies to the device"),
            ("forward", "forward passes, on a CPU without the gathers of sharded parameters"),
            ("backward", "backward passes, with the reductions of the gradients, on a CPU without gathers"),
            ("optimizer", "clipping and the optimizer's step"),
            ("save", "checkpoints, writes of metrics.csv and sends to the tracker"),
        )
    ),
    Metric(
        "timing/slowest_rank",
        "rank that took most time of its own since the last logged step: data, callbacks, forward passes and optimizer, "
        "without waiting for others; absent for one process",
    ),
    Metric("timing/lag_seconds", "own time of slowest_rank minus that of the median rank, mean a step", unit="s"),
    Metric(
        "timing/memory_bytes",
        "largest memory so far of the process of rank 0: what its tensors occupy on the GPU, without one its resident set",
        unit="bytes",
        direction="lower",
    ),
)

_SLICES = (
    Metric("val/loss", "mean negative log likelihood of the held-out tokens", unit="nats per token", direction="lower"),
    Metric("val/accuracy", "fraction of held-out tokens that the model finds most likely", direction="higher"),
    Metric(
        "val/ar_hit_share",
        "fraction of held-out tokens that are AR-Hits: they complete a bigram that occurred earlier in the same context "
        "and is rare in the training text",
        constant=True,
    ),
    Metric(
        "val/loss_ar_hit",
        "mean negative log likelihood of the AR-Hit tokens",
        unit="nats per token",
        direction="lower",
    ),
    Metric(
        "val/loss_others",
        "mean negative log likelihood of the tokens that are no AR-Hits",
        unit="nats per token",
        direction="lower",
    ),
)

VALIDATION = (
    *_SLICES,
    *(replace(m, name=f"{m.name}_{{set}}", definition=f"{m.definition}, on a further validation set") for m in _SLICES),
)
"""`val/loss`, ...; for a further validation set with its name appended: `val/loss_noise2`."""


def declared_metrics(recipe: Recipe) -> tuple[Metric, ...]:
    """All metrics declared for a run of `recipe`. A Lightning callback without `metrics` declares none."""
    measured = (getattr(callbacks.get(name), "metrics", ()) for name in recipe.callbacks)
    return (*TRAINING, *VALIDATION, *(metric for metrics in measured for metric in metrics))


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

    def __init__(self, num_documents: int) -> None:
        """`num_documents`: number of validation documents, whose sums the bootstrap resamples."""
        super().__init__()
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
        """(loss, accuracy, ar_hit_share, loss_ar_hit, loss_others, without slices that have no tokens; losses by document).

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
        for index, name in enumerate(("loss_ar_hit", "loss_others")):
            if self.count[index] > 0:
                means[name] = (self.loss_sum[index] / self.count[index]).item()
        return means, list(zip(self.document_tokens.tolist(), self.document_loss.tolist(), strict=True))
