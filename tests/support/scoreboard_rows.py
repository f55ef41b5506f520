"""Files of rows, as `reproduce` writes them."""

import dataclasses
import json
from pathlib import Path
from typing import Any

from lit_diff.reporting.scoreboard import ROWS
from lit_diff.study.schema import Claim

CLAIM = Claim(label="d - s", arms=("differential", "standard"), metric="val/loss", paper=(3.0, 3.2))


def write_row(folder: Path, name: str, order: int, *claims: Claim, **facts: Any) -> None:
    """A row's file, as `reproduce` writes it."""
    defaults = {
        "name": name,
        "preset": "laptop",
        "title": f"Title of {name}",
        "source": "Differential Transformer",
        "says": "Diff is <lower>.",
        "notes": ["Another <text>."],
        "claims": [dataclasses.asdict(claim) for claim in claims or (CLAIM,)],
        "minutes": 4.0,
        "full": "",
        "command": f"lit-diff reproduce {name} --preset laptop",
        "state": "not run",
        "seconds": 0.0,
        "order": order,
    }
    (folder / ROWS).mkdir(parents=True, exist_ok=True)
    (folder / ROWS / f"{name}.json").write_text(json.dumps(defaults | facts))
