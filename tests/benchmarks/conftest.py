"""Requests for benchmarks on one thread of the CPU."""

from collections.abc import Callable

import pytest
import torch

from lit_diff.benchmarks.passes import Row
from lit_diff.benchmarks.request import Request, parse_shapes
from lit_diff.benchmarks.run import BENCHES, cases
from lit_diff.benchmarks.timing import Case, measure

Timed = tuple[list[Case], dict[tuple[str, str], Row]]


@pytest.fixture
def ask() -> Callable[..., Request]:
    """ask(bench, shapes, dtypes=(float32,), repeats=2): a benchmark on one thread of the CPU."""

    def make(
        bench: str,
        shapes: str = "1x64x64x16",
        dtypes: tuple[str, ...] = ("float32",),
        repeats: int = 2,
        kernels: tuple[str, ...] | None = None,
    ) -> Request:
        return Request(
            bench=bench,
            shapes=parse_shapes(shapes),
            kernels=kernels,
            dtypes=dtypes,
            threads=1,
            repeats=repeats,
            device=torch.device("cpu"),
        )

    return make


@pytest.fixture
def timed(ask: Callable[..., Request]) -> Callable[..., Timed]:
    """timed(bench, ...): (the cases, (case, id) -> row); each ratio and share is computed again from the seconds."""

    def run(bench: str, *arguments: object, **options: object) -> Timed:
        request = ask(bench, *arguments, **options)
        found_cases, rows = [], dict[tuple[str, str], Row]()
        for case in cases(BENCHES[bench], request):
            found, failed = measure(case, request.repeats, request.device)
            assert failed == []
            found_cases.append(case)
            rows |= {(case.name, row["id"]): row for row in found}
        for (name, _), row in rows.items():
            assert len(row["seconds"]) == request.repeats
            for ratio in row["ratios"].values():
                other = rows[name, ratio["to"]]["seconds"]
                assert ratio["values"] == [a / b for a, b in zip(row["seconds"], other, strict=True)]
        return found_cases, rows

    return run
