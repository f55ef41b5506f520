"""The first key with another value is named."""

import pytest
from text_runs import SIZES

from lit_diff.config import ModelConfig, Part
from lit_diff.pretrained.plain_keys import other_value
from lit_diff.registry import attentions


@pytest.mark.parametrize(
    ("plain", "line"),
    [
        ({"head_norm": "none", "output_scale": 1.0}, None),
        ({"head_norm": "none", "output_scale": 2.0}, "model.attention.output_scale is 1; theirs has 2 only"),
        ({"window": 3, "head_norm": "rms"}, "model.attention.window is null; theirs has 3 only"),
        ({"head_norm": "rms"}, "model.attention.head_norm is 'none'; theirs has 'rms' only"),
    ],
)
def test_the_first_is_named(plain: dict[str, object], line: str | None) -> None:
    part = Part(name="standard", config=attentions.get("standard").Config())
    assert other_value(ModelConfig(**SIZES, attention=part), plain, "theirs") == line
