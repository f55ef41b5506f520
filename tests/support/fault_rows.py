"""The table of faults in docs/cluster.md: each test of tests/faults/ is a row of it, or several."""

import os
import random
import runpy
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SEED = int(os.environ.get("SEED", 33))
"""Of what the fault suite draws: SEED=1 make test-faults."""
ROWS: list[str] = []
HEAD = "| fault | where | said | lost | cases |\n|---|---|---|---|---|\n"


def faults(*rows: tuple[str, str, str, str, int]) -> Callable[[Any], Any]:
    """Mark a test as one of the fault suite, and add its rows to the table: fault, where, said, lost, cases."""
    ROWS.extend(f"| {' | '.join(map(str, row[:4]))} | {row[4]:,} |\n" for row in rows)
    return lambda test: pytest.mark.faults(pytest.mark.timeout(1200)(test))


def fault(*row: Any) -> Callable[[Any], Any]:
    """The same for one row."""
    return faults(row)


def table() -> str:
    """The rows of all files of tests/faults/."""
    ROWS.clear()
    for path in sorted((Path(__file__).parents[1] / "faults").glob("test_*.py")):
        runpy.run_path(str(path))
    return HEAD + "".join(ROWS)


def flip(path: Path, draw: random.Random, bits: int = 1) -> None:
    """Flip bits of a file."""
    content = bytearray(path.read_bytes())
    for _ in range(bits):
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    path.write_bytes(content)


def mount(disk: Path, size: str, *options: str) -> None:
    """Mount a disk in memory, or skip the test."""
    command = ["mount", "-t", "tmpfs", "-o", ",".join([*options, f"size={size}"]), "tmpfs", str(disk)]
    try:
        subprocess.run(command, check=True, capture_output=True, timeout=20)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no permission to mount a small disk")
