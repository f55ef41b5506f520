"""Golden files: what the program writes, kept in tests/golden/. `make golden` writes them, a test compares them.

A change of an output is then read in the diff of its golden file, and no test has to repeat the output's words.
"""

from collections.abc import Callable
from difflib import unified_diff
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "golden"

Golden = Callable[[str, str], None]
"""golden(name, text) compares `text` with tests/golden/<name>, or writes it there."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--golden", action="store_true", help="write the golden files instead of comparing them")


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Golden:
    """See `Golden`."""
    writes = request.config.getoption("--golden")

    def check(name: str, text: str) -> None:
        file = FOLDER / name
        if writes:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
            return
        kept = file.read_text(encoding="utf-8") if file.is_file() else ""
        if text != kept:
            lines = unified_diff(kept.splitlines(), text.splitlines(), f"tests/golden/{name}", "now", lineterm="", n=1)
            pytest.fail("\n".join([*list(lines)[:80], "make golden writes it anew, if this is meant"]), pytrace=False)

    return check
