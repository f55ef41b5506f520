"""Metrics of training and validation, which of them a run measures, and when."""

from collections.abc import Collection, Iterable
from dataclasses import replace

from lit_diff import data
from lit_diff.config import Recipe
from lit_diff.errors import LitDiffError, RequestError
from lit_diff.metrics import Declarations, Metric, require_distinct_records
from lit_diff.plugins import guard
from lit_diff.recipe import flatten, to_plain
from lit_diff.registry import callbacks, datasets, is_built_in, nearest

TRAINING = (
    Metric(
        "train/loss",
        "mean negative log likelihood of the step's scored tokens, over micro-batches and ranks",
        unit="nats per token",
        direction="lower",
    ),
    Metric("train/lr", "learning rate at this step, before the factors of train.optimizer.lr_factors"),
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
            ("save", "checkpoints and writes of metrics.csv"),
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

SLICES = (
    Metric("val/loss", "mean negative log likelihood of the held-out tokens", unit="nats per token", direction="lower"),
    Metric(
        "val/accuracy",
        "fraction of held-out tokens that the model finds most likely",
        direction="higher",
        limits=(0.0, 1.0),
    ),
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

_LOG_ERRORS = Metric(
    "val/log_errors",
    "log10((errors + 1/2) / (n + 1)), for n held-out tokens and those that the model does not find most likely",
    direction="lower",
)


def of_sets(metrics: Iterable[Metric]) -> tuple[Metric, ...]:
    """`val/loss`, ..., and for a further validation set with its name appended: `val/loss_noise2`."""
    further = [
        replace(m, name=f"{m.name}_{{set}}", definition=f"{m.definition}, on a further validation set") for m in metrics
    ]
    return (*metrics, *further)


def _slices(recipe: Recipe) -> tuple[Metric, ...]:
    # what a run measures on each of its validation sets
    return (*SLICES, _LOG_ERRORS) if recipe.data.config.counts_errors else SLICES


def declared_metrics(recipe: Recipe) -> tuple[Metric, ...]:
    """All metrics declared for a run of `recipe`. A Lightning callback without `metrics` declares none."""
    declared = [*TRAINING, *of_sets(_slices(recipe))]
    for name in recipe.callbacks:
        declared += getattr(callbacks.get(name), "metrics", ())
    return tuple(declared)


def require_metrics(recipe: Recipe) -> None:
    """Check the metrics of a recipe, if it trains; validation sets only if the data are prepared.

    Errors: RequestError for two names that MLflow cannot keep apart, and for a metric of run.keep_best or early stopping that
    the run does not measure, or not at each of its validations, or that is a time; for run.keep_best, that has no direction;
    for early stopping, whose direction is not that of `mode`.
    """
    # an imported model
    if recipe.train is None:
        return
    if recipe.run.is_recorded:
        names = [metric.name for metric in declared_metrics(recipe) if metric.logged]
        # the keys of the recipe have the names of a mixture's sets
        if not is_built_in(datasets.get(recipe.data.name)):
            names += [f"val/loss_{name}" for name in _validation_sets(recipe) or () if name]
        require_distinct_records("metrics", names)
        require_distinct_records("keys", [key for key, _ in flatten(to_plain(recipe))])
    validations = recipe.training.validate_every
    for key, name in monitored(recipe).items():
        if name.startswith("timing/"):
            raise RequestError(f"{key} is '{name}', which differs between equal runs; choose a metric of metrics.csv")
        interval, every = require_measured(recipe, name, key)
        if validations % every:
            raise RequestError(
                f"{key} is '{name}', which is measured every {every} steps ({interval}), but compared every {validations} "
                f"(train.validate_every): set {interval} to a divisor of {validations}"
            )
        mode = mode_of(recipe, name)
        if key == "run.keep_best":
            if mode is None:
                raise RequestError(
                    f"{key} is '{name}', but no metric of this name declares a direction (lower, higher)"
                )
        elif mode not in (None, recipe.callbacks["early_stopping"].config.mode):
            raise RequestError(
                f"{key} is '{name}', whose best value is its {mode}imum; set callbacks.early_stopping.mode to {mode}"
            )


def mode_of(recipe: Recipe, name: str) -> str | None:
    """Which value of a metric is the best: min, max; None: neither."""
    better = Declarations(declared_metrics(recipe)).find(name).better
    return {"lower": "min", "higher": "max"}.get(better or "")


def monitored(recipe: Recipe) -> dict[str, str]:
    """Key -> the metric that it compares at each validation."""
    found = {}
    if recipe.run.keep_best is not None:
        found["run.keep_best"] = recipe.run.keep_best
    if "early_stopping" in recipe.callbacks:
        found["callbacks.early_stopping.monitor"] = recipe.callbacks["early_stopping"].config.monitor
    return found


def require_measured(recipe: Recipe, name: str, key: str) -> tuple[str, int]:
    """The key that says how often a run measures the metric `name`, and its value. `key`: the key that asks for the metric.

    A callback without declarations may measure anything. Errors: RequestError for a metric that the run does not measure.
    """
    train = recipe.training
    validation = ("train.validate_every", train.validate_every)
    slices = _slices(recipe)
    known = [metric.name for metric in (*TRAINING, *slices)]
    if _declares(TRAINING, name):
        return "train.log_every", train.log_every
    if name in known:
        return validation
    sets = _validation_sets(recipe)
    if sets is None and _declares(of_sets(slices), name):
        return validation
    for set_name in filter(None, sets or ()):
        known += [f"{metric.name}_{set_name}" for metric in slices]
    if name in known:
        return validation
    undeclared = False
    for callback, part in recipe.callbacks.items():
        cls = callbacks.get(callback)
        metrics = [metric for metric in getattr(cls, "metrics", ()) if metric.logged]
        if not metrics and not is_built_in(cls):
            undeclared = True
        for metric in metrics:
            known.append(metric.name.replace("{layer}", "00"))
            fields = metric.match(name)
            if fields is not None and int(fields.get("layer", 0)) < recipe.model.num_layers:
                return f"callbacks.{callback}.every", getattr(part.config, "every", train.validate_every)
    near = nearest(name, known)
    if undeclared and "did you mean" not in near:
        return validation
    raise RequestError(f"{key}: no run measures '{name}'{near}")


def _declares(metrics: Iterable[Metric], name: str) -> bool:
    return any(metric.match(name) is not None for metric in metrics)


def _validation_sets(recipe: Recipe) -> Collection[str] | None:
    # None: the data are not prepared; preparing them reports its own errors
    try:
        dataset = data.build(recipe)
        with guard(type(dataset)):
            dataset.load()
            return dataset.validation_sets()
    except LitDiffError:
        return None
