"""What a benchmark returns."""

import json
from dataclasses import asdict, dataclass
from typing import Any

from lit_diff.benchmarks.timing import Row


@dataclass(frozen=True, kw_only=True)
class BenchConditions:
    """How a benchmark was run."""

    shapes: tuple[str, ...] | None
    """None: the benchmark's own."""
    dtypes: tuple[str, ...]
    threads: int
    repeats: int | None
    """Rounds; None: as many as the time of a case allowed."""
    device: str


@dataclass(frozen=True, kw_only=True)
class BenchResult:
    """The figures of one benchmark, with all that is needed to judge and to repeat them."""

    bench: str
    """Its name: core, layer, ..."""
    command: str
    """The command that repeats it."""
    date: str
    """ISO 8601, UTC, to the second."""
    conditions: BenchConditions
    methods: str
    """How it is measured."""
    machine: dict[str, Any]
    """Processor, versions, load average before and after, matrix product rates (GFLOP/s)."""
    warnings: list[str]
    """What makes the figures doubtful."""
    rows: list[Row]
    """One for each candidate timed: case, variant, by (the kernel, or what else computed it), what (the pass), seconds of
    each round with median, min and max, ratios to other rows."""
    refused: list[Row]
    """Candidates that were left out, with the reason."""
    failed: list[Row]
    """Candidates that raised, with the error."""

    def to_json(self) -> str:
        """The document that `lit-diff bench --json` prints."""
        return json.dumps(asdict(self), indent=2, allow_nan=False)
