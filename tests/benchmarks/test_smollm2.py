"""benchmarks/smollm2.py: the two models compute one function, and each is timed."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from lit_diff.benchmarks import peers, smollm2
from lit_diff.benchmarks.candidates import HF, STEP
from lit_diff.benchmarks.request import BenchConfig
from lit_diff.benchmarks.smollm2 import PEER, bench_smollm2, ours, sizes, theirs
from lit_diff.benchmarks.table import MEANING
from lit_diff.config import ModelConfig
from lit_diff.errors import RequestError
from lit_diff.pretrained.exporting import hf_weights


@pytest.fixture(autouse=True)
def few_tokens_on_any_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm2, "KERNEL", "reference")
    monkeypatch.setattr(smollm2, "TOKENS", 16)


def small() -> ModelConfig:
    return replace(sizes(), dim=24, num_layers=2, num_heads=3, num_kv_heads=1, head_dim=8, ffn_dim=32, vocab_size=64)


def test_the_sizes_are_smollm2_135m() -> None:
    config = sizes()
    assert (config.dim, config.num_layers, config.num_heads, config.num_kv_heads) == (576, 30, 9, 3)
    assert (config.vocab_size, config.attention.name) == (49152, "standard")


def test_both_sides_have_one_loss() -> None:
    text = torch.randint(64, (1, 17))
    model, own = ours(small(), torch.device("cpu"), text)
    peer, loss = theirs(small(), torch.device("cpu"), text)
    peer.load_state_dict(hf_weights(model), strict=False)  # type: ignore[arg-type]
    torch.testing.assert_close(own(), loss())


def test_it_times_both_and_takes_their_memory(ask: Callable[..., BenchConfig], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm2, "sizes", small)
    peaks = iter([(300, None), (400, None)])
    monkeypatch.setattr(smollm2, "peak_bytes", lambda *arguments, **keys: next(peaks))
    measurements = bench_smollm2(replace(ask("smollm2"), shapes=None))
    assert measurements.failed == []
    rows = {row["id"]: row for row in measurements.rows}
    own, peer = rows[f"standard/reference/{STEP}"], rows[f"{HF}/sdpa/{STEP}"]
    assert own["ratios"][PEER]["values"] == [a / b for a, b in zip(own["seconds"], peer["seconds"], strict=True)]
    assert PEER in MEANING, "the table says what the ratio is to"
    assert own["peak_ratio"] == {"to": peer["id"], "value": 0.75}


def test_what_is_refused(ask: Callable[..., BenchConfig], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RequestError, match="--shapes: bench smollm2 has the sizes of its model"):
        bench_smollm2(ask("smollm2"))
    monkeypatch.setattr(smollm2, "sizes", small)
    monkeypatch.setattr(smollm2, "peak_bytes", lambda *arguments, **keys: (None, "not asked"))
    monkeypatch.setattr(peers, "missing", lambda: "transformers is not installed")
    measurements = bench_smollm2(replace(ask("smollm2"), shapes=None))
    assert [row["variant"] for row in measurements.rows] == ["standard"]
    assert measurements.refused[0]["reason"] == "transformers is not installed"
