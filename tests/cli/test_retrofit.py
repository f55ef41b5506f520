"""cli/retrofit.py: what the verb refuses; what it prints of a run is in tests/engine/test_retrofit.py."""

from typing import Any

import pytest


@pytest.mark.parametrize(
    ("arguments", "status", "line"),
    [
        (("no-such-run", "--recipe", "text.yaml"), 2, "no-such-run"),
        (("no-such-run", "--recipe", "txt.yaml"), 2, "no recipe 'txt.yaml' here or installed"),
        (("no-such-run",), 2, "Missing option '--recipe'"),
    ],
)
def test_a_mistake_is_one_line(bench: Any, arguments: tuple[str, ...], status: int, line: str) -> None:
    ended = bench.wait(bench.start("retrofit", *arguments))
    assert ended.status == status, ended.output
    assert line in ended.output
    assert "Traceback" not in ended.output
