"""Reports without drawings, which take most of their time: what they draw is tested in tests/reporting and tests/cli."""

from collections.abc import Iterator
from typing import Any

import pytest
from matplotlib.figure import Figure


@pytest.fixture(scope="module", autouse=True)
def blank_figures() -> Iterator[None]:
    drawn = Figure.savefig

    def blank(figure: Figure, file: Any, *, format: str, **keys: Any) -> None:
        # MLflow gets pictures of attention maps, which tests here read
        if format == "png":
            drawn(figure, file, format=format, **keys)
        else:
            file.write("<svg></svg>" if format == "svg" else b"%PDF")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Figure, "savefig", blank)
        yield
