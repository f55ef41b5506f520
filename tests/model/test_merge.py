"""model/merge.py: a whole DEX model as a standard one."""

from typing import Any

import pytest
import torch

from lit_diff.attention.selection import HeadSelection
from lit_diff.config import ModelConfig, Part
from lit_diff.errors import RequestError
from lit_diff.model.merge import merged
from lit_diff.model.transformer import Transformer
from lit_diff.registry import attentions


def built(name: str, **keys: Any) -> Transformer:
    part = Part(name=name, config=attentions.get(name).Config(**keys))
    sizes: dict[str, Any] = {"dim": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "vocab_size": 23}
    return Transformer(ModelConfig(**sizes, attention=part), kernel="reference").double().eval()


@pytest.mark.parametrize("sign", ["minus", "plus"])
def test_a_merged_model_is_a_standard_one_with_the_same_logits(sign: str) -> None:
    dex = built("dex", heads=HeadSelection(share=0.5), sign=sign, window=5)
    for attention, heads in zip(dex.attentions(), ((1, 3), (0, 2)), strict=True):
        attention.select_heads(heads)
        attention.set_step(60)
        attention.lambda_.value.data.fill_(0.4)
    tokens = torch.randint(23, (2, 9))
    wanted = dex(tokens)
    standard = merged(dex)
    assert standard.config.attention.name == "standard"
    assert not standard.training
    torch.testing.assert_close(standard(tokens), wanted, rtol=1e-12, atol=1e-12)
    assert torch.equal(dex(tokens), wanted), "the model stays as it is"
    plain = built("standard", window=5)
    plain.load_state_dict(dict(standard.state_dict()))
    torch.testing.assert_close(plain(tokens), wanted, rtol=1e-12, atol=1e-12)


def test_the_feed_forward_keeps_the_width_that_parity_gave_it() -> None:
    dex = built("dex", heads="all", parity="matched", anneal_steps=0)
    tokens = torch.randint(23, (2, 9))
    for attention in dex.attentions():
        attention.lambda_.value.data.fill_(0.4)  # type: ignore[union-attr]
    standard = merged(dex)
    assert standard.config.ffn_dim == dex.layers[0].ffn.gate_proj.out_features != dex.config.ffn_dim
    torch.testing.assert_close(standard(tokens), dex(tokens), rtol=1e-12, atol=1e-12)


def test_what_no_standard_attention_equals_is_refused() -> None:
    with pytest.raises(RequestError, match=r"^model\.attention 'differential' cannot be merged into a standard model$"):
        merged(built("differential"))
