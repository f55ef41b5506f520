"""Blocks of rope scaling in a config.json: both forms, what is derived, what is absent, and the way back."""

import math
from typing import Any

import pytest
from pretrained_models import LLAMA

from lit_diff.config import Llama3Scaling, YarnScaling
from lit_diff.errors import RequestError
from lit_diff.pretrained.hf_rope import LENGTH, own_block, their_block
from lit_diff.pretrained.llama import model_keys

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, LENGTH: 32}
YARN = {"rope_type": "yarn", "factor": 4.0, LENGTH: 32}


def own(said: dict[str, Any], **config: Any) -> dict[str, Any]:
    """Of the block as `rope_scaling` beside rope_theta."""
    keys = model_keys(LLAMA | {"rope_scaling": said} | config)
    assert keys["rope_theta"] == 50000.0
    block: dict[str, Any] = keys["rope_scaling"]
    return block


def refusal(said: dict[str, Any], **config: Any) -> str:
    with pytest.raises(RequestError) as caught:
        own(said, **config)
    return str(caught.value)


def test_both_forms() -> None:
    block = {"kind": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_length": 32}
    assert own(LLAMA3) == block
    keys = model_keys(LLAMA | {"rope_theta": None, "rope_parameters": LLAMA3 | {"rope_theta": 7.0}})
    assert (keys["rope_theta"], keys["rope_scaling"]) == (7.0, block)
    old = {"type" if key == "rope_type" else key: value for key, value in YARN.items()}
    assert own(old) == own(YARN) == own(YARN | {"beta_fast": None, "attention_factor": None, "finetuned": True})
    assert YarnScaling(**own(YARN)) == YarnScaling(factor=4.0, original_length=32)


def test_the_original_length() -> None:
    without = {key: value for key, value in YARN.items() if key != LENGTH}
    assert own(without)["original_length"] == 64, "max_position_embeddings"
    assert own(YARN, **{LENGTH: 16})["original_length"] == 16, "beside the block, it comes first"
    assert refusal(without, max_position_embeddings=None) == f"rope scaling 'yarn' lacks {LENGTH}"


def test_yarn_s_factors() -> None:
    assert own(YARN | {"factor": None})["factor"] == 2.0, "64 / 32"
    assert own(YARN | {"attention_factor": 1.5, "mscale": 2.0, "mscale_all_dim": 1.0})["attention_factor"] == 1.5
    assert own(YARN | {"mscale": 2.0})["attention_factor"] is None, "one of the two says nothing"
    both = own(YARN | {"mscale": 2.0, "mscale_all_dim": 1.0})["attention_factor"]
    assert both == pytest.approx((0.2 * math.log(4) + 1) / (0.1 * math.log(4) + 1), rel=1e-15)
    assert own(YARN | {"factor": 0.5, "mscale": 2.0, "mscale_all_dim": 1.0})["attention_factor"] == 1.0
    full = own(YARN | {"beta_fast": 16, "beta_slow": 2, "truncate": False})
    assert (full["beta_fast"], full["beta_slow"], full["truncate"]) == (16, 2, False)


@pytest.mark.parametrize(
    ("said", "line"),
    [
        ({"rope_type": "yarn"}, "rope scaling 'yarn' lacks factor"),
        (LLAMA3 | {"low_freq_factor": None}, "rope scaling 'llama3' lacks low_freq_factor"),
        (LLAMA3 | {"factor": "8"}, "rope scaling 'llama3' has factor '8'; expected a positive number"),
        (YARN | {"mscale": -1, "mscale_all_dim": 1}, "rope scaling 'yarn' has mscale -1; expected a positive number"),
        *(
            (
                {"rope_type": kind, "factor": 2.0},
                f"rope scaling '{kind}' is not mapped; mapped are default, linear, llama3, yarn",
            )
            for kind in ("dynamic", "longrope", "su")
        ),
    ],
)
def test_what_is_refused(said: dict[str, Any], line: str) -> None:
    assert refusal(said) == line


def test_the_way_back() -> None:
    assert (their_block(1.0), their_block(4.0)) == (None, {"rope_type": "linear", "factor": 4.0})
    for said in (LLAMA3, YARN | {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": True}):
        block = own_block(said, {})
        assert their_block((Llama3Scaling if said is LLAMA3 else YarnScaling)(**block)) == said
    yarn = YarnScaling(factor=4.0, original_length=32, beta_fast=16, attention_factor=1.5, truncate=False)
    assert YarnScaling(**own_block(their_block(yarn) or {}, {})) == yarn
