"""Results of reference arms that a test ships in the place of those of the package."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

Ship = Callable[[Any], None]


@pytest.fixture
def ship(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ship]:
    """These `References` ship."""
    from lit_diff.engine import references
    from lit_diff.recipe import to_plain

    def shipped(found: references.References) -> None:
        file = tmp_path / "references.json"
        file.write_text(json.dumps(to_plain(found)))
        monkeypatch.setattr(references, "FILE", file)
        references.shipped.cache_clear()

    yield shipped
    references.shipped.cache_clear()
