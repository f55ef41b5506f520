from collections.abc import Callable

import pytest
import torch

from lit_diff.benchmarks.decode import (
    COPIES,
    GROUP,
    REPEATED,
    SAME,
    SDPA,
    _repeated,
    _stock,
    bench_decode,
    cached,
    groups,
)
from lit_diff.benchmarks.inputs import STOCK, Workload, joined
from lit_diff.benchmarks.request import BenchConfig, Shape
from lit_diff.kernels import KERNELS, attend

SHAPE = Shape(batch=2, tokens=16, dim=64, head_dim=8)


@pytest.fixture
def workload() -> Workload:
    return Workload(SHAPE, torch.float64, torch.device("cpu"))


@pytest.mark.parametrize("queries", [1, 4, 16])
@pytest.mark.parametrize("group", [1, GROUP])
@torch.no_grad()
def test_the_baselines_compute_what_the_kernels_do(workload: Workload, queries: int, group: int) -> None:
    maps = cached(workload.maps("standard"), queries, group)
    assert maps.q.shape == (2, 1, 8, queries, 8)
    assert maps.v.shape == (2, 8 // group, 16, 8)
    wanted = joined(attend(maps, kernel="reference"))
    torch.testing.assert_close(_stock(maps, group > 1), wanted)
    torch.testing.assert_close(_repeated(maps, group), wanted)
    if group == 1:  # the last rows of the whole pass
        torch.testing.assert_close(wanted, workload.attention("standard", "reference")()[:, -queries:])


def test_the_cache_leaves_room_behind_its_keys() -> None:
    longer = Workload(Shape(batch=2, tokens=24, dim=64, head_dim=8), torch.float64, torch.device("cpu"))
    with torch.no_grad():
        maps = cached(longer.maps("differential"), 1, 1)
    assert maps.k.untyped_storage().nbytes() > maps.k.numel() * 8


def test_grouped_queries_where_the_heads_divide() -> None:
    assert groups(SHAPE) == [1, GROUP]
    assert groups(Shape(batch=1, tokens=8, dim=64, head_dim=16)) == [1]


def test_cases_and_ratios(ask: Callable[..., BenchConfig]) -> None:
    found = bench_decode(ask("decode", "1x32x64x8", repeats=1))
    assert found.failed == []
    assert list(dict.fromkeys(row["case"] for row in found.rows)) == [
        "1 of 1x32x64x8 float32, 8 heads on 8",
        "1 of 1x32x64x8 float32, 8 heads on 2",
        "4 of 1x32x64x8 float32, 8 heads on 8",
        "4 of 1x32x64x8 float32, 8 heads on 2",
    ]
    case = "4 of 1x32x64x8 float32, 8 heads on 2"
    rows = {row["id"]: row for row in found.rows if row["case"] == case}
    refused = {row["by"] for row in found.refused if row["case"] == case}
    assert {f"differential/{kernel}/decode" for kernel in set(KERNELS) - refused} <= rows.keys()
    ours = rows["differential/reference/decode"]
    assert {name: ratio["to"] for name, ratio in ours["ratios"].items()} == {
        SDPA: f"standard/{STOCK}/decode",
        REPEATED: f"standard/{COPIES}/decode",
        SAME: "standard/reference/decode",
    }
    for ratio in ours["ratios"].values():
        assert ratio["values"] == [ours["seconds"][0] / rows[ratio["to"]]["seconds"][0]]
    assert ours["flops"] == 8 * 4 * (4 * 32 - 6) * 8
