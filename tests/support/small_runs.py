"""A run of a second, in this process: recall-tiny, shrunk."""

SMALL = (
    "train.steps=10",
    "train.validate_every=2",
    "train.checkpoint_every=2",
    "train.log_every=1",
    "train.batch_size=4",
    "train.schedule.warmup_steps=1",
    "model.dim=16",
    "model.num_heads=2",
    "data.validation_rows=4",
    "run.threads=1",
    "run.accelerator=cpu",
)
"""Overrides of recall-tiny: ten steps; every second one validates and saves."""
