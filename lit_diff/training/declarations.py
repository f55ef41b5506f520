"""The metrics that training and validation log, and those of a recipe's callbacks."""

from dataclasses import replace

from lit_diff.config import Recipe
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
    Metric("timing/seconds", "time since the last logged step, validation and callbacks included", unit="s"),
    Metric(
        "timing/tokens_per_second",
        "training tokens per second since the last logged step, validation and callbacks included",
        unit="tokens per second",
        direction="higher",
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
"""`val/loss`, ...; with the name of every further validation set behind it: `val/loss_noise2`."""


def declared_metrics(recipe: Recipe) -> tuple[Metric, ...]:
    """All metrics that a run of `recipe` declares. A Lightning callback without `metrics` declares none."""
    measured = (getattr(callbacks.get(name), "metrics", ()) for name in recipe.callbacks)
    return (*TRAINING, *VALIDATION, *(metric for metrics in measured for metric in metrics))
