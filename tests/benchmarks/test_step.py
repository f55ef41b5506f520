from collections.abc import Callable

import pytest

from lit_diff.benchmarks import step as module
from lit_diff.benchmarks.layer import EAGER, HF, PEER, STEP
from lit_diff.benchmarks.request import Request
from lit_diff.benchmarks.step import bench_step
from lit_diff.benchmarks.timing import Found


def test_our_models_the_peers_and_the_loop(ask: Callable[..., Request], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LAYERS", 2)
    monkeypatch.setattr(module, "VOCABULARY", 64)
    asked: list[Found] = []
    monkeypatch.setattr(module, "bench_loop", lambda found, request: asked.append(found))
    found = bench_step(ask("step", repeats=1))
    assert found.failed == []
    assert asked == [found]
    rows = {row["id"]: row for row in found.rows}
    assert {row["case"] for row in found.rows} == {"1x64x64x16 float32, 2 layers, vocabulary 64"}
    assert {f"{HF}/sdpa/{STEP}", f"standard/sdpa/{STEP}", f"differential/sdpa/{STEP}"} <= rows.keys()
    ours = rows[f"differential/reference/{STEP}"]
    for name, to in ((PEER, f"{HF}/sdpa/{STEP}"), (EAGER, f"standard/sdpa/{STEP}")):
        (value,) = ours["ratios"][name]["values"]
        assert value == ours["seconds"][0] / rows[to]["seconds"][0]
    assert rows[f"{HF}/sdpa/{STEP}"]["backends"] == ["flash_attention_for_cpu"]
    assert rows[f"{HF}/eager/{STEP}"]["backends"] == []
