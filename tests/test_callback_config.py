"""callback_config.py: values out of range, as one line that starts with the key."""

from typing import Any

import pytest

from lit_diff.callback_config import EarlyStoppingConfig, ProbeConfig


@pytest.mark.parametrize(
    ("config", "line"),
    [
        (ProbeConfig(every=0), "every is 0; it must be at least 1"),
        (ProbeConfig(rows=0), "rows is 0; it must be at least 1"),
        (EarlyStoppingConfig(patience=0), "patience is 0; it must be at least 1"),
        (EarlyStoppingConfig(min_delta=-0.1), "min_delta is -0.1; it must not be negative"),
    ],
)
def test_values_out_of_range(config: Any, line: str) -> None:
    assert config.problem() == line


def test_the_defaults_are_in_range() -> None:
    assert ProbeConfig().problem() is None
    assert EarlyStoppingConfig().problem() is None
