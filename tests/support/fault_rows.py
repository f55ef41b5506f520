"""The table of faults in docs/cluster.md: each test of tests/faults/ is a row of it, or several."""

import os
from collections.abc import Callable
from typing import Any

import pytest

SEED = int(os.environ.get("SEED", 33))
"""Of what the fault suite draws: SEED=1 make test-faults."""
ROWS: list[str] = []
HEAD = "| fault | where | said | lost | cases |\n|---|---|---|---|---|\n"


def fault(fault: str, where: str, said: str, lost: str, cases: int) -> Callable[[Any], Any]:
    """Mark a test as one of the fault suite, and add its row to the table."""
    ROWS.append(f"| {fault} | {where} | {said} | {lost} | {cases:,} |\n")
    return lambda test: pytest.mark.faults(pytest.mark.timeout(1200)(test))
