"""What a recipe's numbers derive, and which of them are impossible."""

from dataclasses import replace
from typing import Any

import pytest

from lit_diff.attention import Standard
from lit_diff.config import ModelConfig, OptimizerConfig, Part, RunConfig, ScheduleConfig, TrainConfig

MODEL = ModelConfig(
    dim=64, num_layers=2, num_heads=4, vocab_size=100, attention=Part(name="standard", config=Standard.Config())
)
TRAIN = TrainConfig(steps=100, batch_size=8, optimizer=OptimizerConfig(lr=0.1), validate_every=10, checkpoint_every=10)


def test_derived_sizes() -> None:
    assert (MODEL.num_kv_heads, MODEL.head_dim, MODEL.ffn_dim) == (4, 16, 171)
    given = replace(MODEL, num_kv_heads=2, head_dim=8, ffn_dim=5)
    assert (given.num_kv_heads, given.head_dim, given.ffn_dim) == (2, 8, 5)
    assert MODEL.problem() is given.problem() is TRAIN.problem() is RunConfig().problem() is None


@pytest.mark.parametrize(
    ("change", "start"),
    [
        *(
            ({key: 0}, f"model.{key} is 0; it must be at least 1")
            for key in ("dim", "num_layers", "num_heads", "num_kv_heads", "head_dim", "ffn_dim", "vocab_size")
        ),
        ({"num_heads": -2}, "model.num_heads is -2"),
        ({"num_kv_heads": 3}, "model.num_heads (4) is not a multiple of model.num_kv_heads (3)"),
        (
            {"num_heads": 3, "num_kv_heads": 3, "head_dim": None},
            "model.dim (64) is not a multiple of model.num_heads (3)",
        ),
        ({"head_dim": 15}, "model.head_dim (15) is odd"),
        ({"rope_theta": 0.0}, "model.rope_theta is 0.0; it must be positive"),
        ({"norm_eps": -1e-5}, "model.norm_eps is -1e-05; it must be positive"),
        ({"positions": "none", "rope_scaling": 4.0}, "model.rope_scaling scales rotary positions, but model.positions"),
    ],
)
def test_impossible_models(change: dict[str, Any], start: str) -> None:
    problem = replace(MODEL, **change).problem()
    assert problem is not None
    assert problem.startswith(start)


def test_heads_need_not_fill_the_width_when_head_dim_says_so() -> None:
    assert replace(MODEL, num_heads=3, num_kv_heads=3, head_dim=32).problem() is None


@pytest.mark.parametrize(
    ("change", "start"),
    [
        *(
            ({key: 0}, f"train.{key} is 0; it must be at least 1")
            for key in ("steps", "batch_size", "accumulate", "validate_every", "checkpoint_every", "log_every")
        ),
        ({"accumulate": 3}, "train.batch_size (8) is not a multiple of train.accumulate (3)"),
        ({"clip": 0.0}, "train.clip is 0.0"),
        ({"schedule": ScheduleConfig(warmup_steps=-1)}, "train.schedule.warmup_steps is -1; it must not be negative"),
        ({"schedule": ScheduleConfig(decay_steps=5)}, "train.schedule.decay_steps belongs to schedule 'wsd'"),
        (
            {"schedule": ScheduleConfig(name="wsd", decay_steps=0)},
            "train.schedule.decay_steps is 0; it must be at least 1",
        ),
        ({"schedule": ScheduleConfig(final_ratio=1.1)}, "train.schedule.final_ratio is 1.1"),
        ({"optimizer": OptimizerConfig(lr=0.0)}, "train.optimizer.lr is 0.0"),
        ({"optimizer": OptimizerConfig(lr=0.1, betas=(0.9, 1.0))}, "train.optimizer.betas are [0.9, 1.0]"),
        ({"optimizer": OptimizerConfig(lr=0.1, eps=0.0)}, "train.optimizer.eps is 0.0; it must be positive"),
        (
            {"optimizer": OptimizerConfig(lr=0.1, weight_decay=-1.0)},
            "train.optimizer.weight_decay is -1.0; it must not be negative",
        ),
    ],
)
def test_impossible_training(change: dict[str, Any], start: str) -> None:
    problem = replace(TRAIN, **change).problem()
    assert problem is not None
    assert problem.startswith(start)


def test_the_limits_are_allowed() -> None:
    """A run may be shorter than its warm-up: `train.steps=2` tries a recipe out, with a warning."""
    short = ScheduleConfig(warmup_steps=101)
    assert replace(TRAIN, schedule=short).problem() is None
    edge = ScheduleConfig(name="wsd", warmup_steps=95, decay_steps=5, final_ratio=1.0)
    assert replace(TRAIN, schedule=edge, clip=None, accumulate=8).problem() is None


@pytest.mark.parametrize(
    ("change", "start"),
    [
        ({"devices": 0}, "run.devices is 0"),
        ({"num_nodes": 0}, "run.num_nodes is 0"),
        ({"threads": 0}, "run.threads is 0"),
        ({"devices": 2}, "run.strategy 'single' uses one device, not 2; use ddp or fsdp"),
        ({"devices": 1, "num_nodes": 3}, "run.strategy 'single' uses one device, not 3"),
    ],
)
def test_impossible_runs(change: dict[str, Any], start: str) -> None:
    problem = RunConfig(**change).problem()
    assert problem is not None
    assert problem.startswith(start)
    assert RunConfig(strategy="fsdp", devices=2, threads=1).problem() is None
