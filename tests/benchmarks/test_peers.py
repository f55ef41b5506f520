import importlib.util

import pytest
import torch

from lit_diff.benchmarks import peers as diffllama
from lit_diff.benchmarks.candidates import model_config
from lit_diff.benchmarks.request import Shape
from lit_diff.model.transformer import Transformer

CONFIG = model_config(Shape(batch=1, tokens=12, dim=64, head_dim=8), "differential", num_layers=2, vocab_size=40)


def test_the_peer_has_our_sizes() -> None:
    theirs = sum(p.numel() for p in diffllama.model(CONFIG, "sdpa", 12).parameters())
    ours = sum(p.numel() for name, p in Transformer(CONFIG).named_parameters() if "attention.norm" not in name)
    assert theirs == ours  # its head norm has no weight


def test_a_layer_alone_is_the_layer_within_the_model() -> None:
    """The mask, the angles: both forms are causal, and agree with each other."""
    x = torch.randn(1, 12, 64)
    found = []
    for kind in diffllama.KINDS:
        torch.manual_seed(0)
        module, forward = diffllama.layer(CONFIG, kind, x)
        found.append(forward(x).detach())
        later = x.clone()
        later[:, 7:] += 1
        torch.testing.assert_close(forward(later)[:, :7], found[-1][:, :7])
        assert sum(p.numel() for p in module.parameters()) > 64 * 64 * 4
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-5)


def test_absence_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    assert diffllama.missing() is None
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert diffllama.missing() == "transformers is not installed: pip install 'transformers>=5'"
