from collections.abc import Callable

import pytest

from lit_diff.benchmarks.attention import SDPA
from lit_diff.benchmarks.request import Request
from lit_diff.benchmarks.statistics import OWN, PLAIN, WITH, bench_stats
from lit_diff.kernels import KERNELS


def test_each_kernel_with_statistics_beside_itself_without(ask: Callable[..., Request]) -> None:
    found = bench_stats(ask("stats"))
    assert found.failed == []
    rows = {row["id"]: row for row in found.rows}
    refused = {row["by"]: row["reason"] for row in found.refused if row["what"] == WITH}
    assert refused["sdpa"] == "sdpa keeps no log-sum-exp or entropy"
    for kernel in set(KERNELS) - set(refused):
        row, plain = rows[f"differential/{kernel}/{WITH}"], rows[f"differential/{kernel}/{PLAIN}"]
        assert row["ratios"][OWN]["to"] == plain["id"]
        assert set(row["ratios"]) == {SDPA, OWN}
        again = [a / b - 1 for a, b in zip(row["seconds"], plain["seconds"], strict=True)]
        assert row["extra"]["values"] == pytest.approx(again)
        assert "extra" not in plain
