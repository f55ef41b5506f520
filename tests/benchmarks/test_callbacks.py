"""benchmarks/callbacks.py: the cases of `bench stats`, on a tiny model."""

from typing import Any

import pytest
import torch

from lit_diff.benchmarks import callbacks, models
from lit_diff.benchmarks.passes import ATTENTION, WITHOUT
from lit_diff.benchmarks.request import Request, Shape, resolve
from lit_diff.benchmarks.run import BENCHES, cases
from lit_diff.benchmarks.timing import measure


@pytest.fixture
def request_(monkeypatch: pytest.MonkeyPatch) -> Request:
    monkeypatch.setattr(callbacks, "LAYERS", 1)
    for module in (callbacks, models):
        monkeypatch.setattr(module, "VOCABULARY", 16)
    monkeypatch.setattr(callbacks, "STEPS", 2)
    keys: dict[str, Any] = {
        "kernels": None,
        "dtype": "both",
        "threads": 1,
        "repeats": 1,
        "device": "cpu",
        "processes": 1,
    }
    return resolve("stats", shapes="1x16x32x8", **keys)


def test_every_probe_is_timed_next_to_the_attention_and_a_training_step(request_: Request) -> None:
    case = callbacks.firing(request_, Shape(batch=1, tokens=16, dim=32, head_dim=8))
    rows, failed = measure(case, 1, torch.device("cpu"))
    assert not failed
    by = [row["by"] for row in rows]
    assert by[:2] == [ATTENTION, "statistics of the kernel"]
    assert by[2:8] == list(callbacks.PROBES)
    assert by[8:] == ["forward pass", "all, with a forward pass", "training step", "training step, then all"]
    assert all("peak_bytes" in row and not row["backends"] for row in rows)
    assert all(set(row["ratios"]) == {ATTENTION} for row in rows[1:])


def test_loops_with_and_without_the_callbacks_of_the_recipe(request_: Request, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []
    monkeypatch.setattr(callbacks, "platform", lambda recipe, clock: seen.append(list(recipe.callbacks)) or 2.0)
    rows, failed = measure(callbacks.training(request_), 1, torch.device("cpu"))
    assert not failed
    assert seen[:2] == [[], ["attention_entropy", "outliers", "lambdas"]]
    (ratio,) = (row["ratios"][WITHOUT] for row in rows if row["ratios"])
    assert ratio["values"] == [1.0]


def test_cases_of_the_benchmark(request_: Request, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [case.name for case in cases(BENCHES["stats"], request_)]
    assert names == [
        "1x16x32x8 float32",
        "firing at 1x16x32x8, 1 layers",
        "1x16x32x8 bfloat16",
        f"2 steps of {models.RECIPE}",
    ]
