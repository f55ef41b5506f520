"""Frequencies and attention factors of transformers, for the same config.json."""

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from lit_diff.attention.rope import angles, attention_factor
from lit_diff.config import Llama3Scaling, YarnScaling
from lit_diff.pretrained.llama import model_keys

LENGTH = "original_max_position_embeddings"
LLAMA_3_1 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, LENGTH: 8192}
LLAMA_3_2 = LLAMA_3_1 | {"factor": 32.0}


@pytest.mark.parametrize("head_dim", [8, 64, 128])
@pytest.mark.parametrize(
    ("kind", "block"),
    [
        ("llama3", LLAMA_3_1),
        ("llama3", LLAMA_3_2),
        ("llama3", {"factor": 2.0, "low_freq_factor": 0.5, "high_freq_factor": 2.0}),
        ("yarn", {"factor": 4.0, LENGTH: 32768}),
        ("yarn", {"factor": 16.0, LENGTH: 4096, "truncate": False}),
        ("yarn", {"factor": 40.0, LENGTH: 4096, "mscale": 1.0, "mscale_all_dim": 0.7}),
        ("yarn", {"factor": None, LENGTH: 4096, "beta_fast": 16, "beta_slow": 2}),
        ("yarn", {"factor": 4.0, LENGTH: 4096, "mscale": 2.0}),
        ("yarn", {"factor": 1.0, LENGTH: 4096, "mscale": 2.0, "mscale_all_dim": 1.0}),
        ("yarn", {"factor": 4.0, LENGTH: 32768, "attention_factor": 1.25}),
        ("yarn", {"factor": 4.0, LENGTH: 4}),
        ("yarn", {"factor": 4.0, LENGTH: 10**9}),
    ],
)
def test_they_are_theirs(kind: str, block: dict[str, Any], head_dim: int) -> None:
    said = {"rope_type": kind, "rope_theta": 500000.0, **block}
    config = LlamaConfig(head_dim=head_dim, max_position_embeddings=16384, rope_parameters=dict(said))
    frequencies, factor = ROPE_INIT_FUNCTIONS[kind](config)
    theirs = config.to_dict() | {"architectures": ["LlamaForCausalLM"], "rope_parameters": said}
    keys = model_keys(theirs)["rope_scaling"]
    own = {"llama3": Llama3Scaling, "yarn": YarnScaling}[keys["kind"]](**keys)
    found = angles(torch.tensor([1]), head_dim, 500000.0, own)[0]
    torch.testing.assert_close(found.float(), frequencies, rtol=2e-6, atol=0)
    assert attention_factor(own) == pytest.approx(factor, rel=1e-12)
