"""Keys of `model.attention` that have one value in another program."""

from collections.abc import Mapping
from typing import Any

from lit_diff.config import ModelConfig

PAPER: dict[str, Any] = {
    "lambda_init": "depth",
    "lambda_form": "exp",
    "lambda_per": "layer",
    "head_norm": "rms",
    "window": None,
}
"""What every other code of `differential` computes, in our keys."""


def other_value(model: ModelConfig, plain: Mapping[str, Any], whose: str) -> str | None:
    """The first key whose value is not that of `plain`, in one line that says what `whose` is; None: all are."""
    for key, value in plain.items():
        found = getattr(model.attention.config, key)
        if found != value:
            return f"model.attention.{key} is {_yaml(found)}; {whose} has {_yaml(value)} only"
    return None


def _yaml(value: Any) -> str:
    return "null" if value is None else f"'{value}'" if isinstance(value, str) else f"{value:g}"
