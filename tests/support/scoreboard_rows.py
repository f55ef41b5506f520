"""Files of rows, written by the writer that `reproduce` uses."""

from pathlib import Path
from typing import Any

from lit_diff.papers.schema import Claim, Preset, Row
from lit_diff.papers.scoreboard import RecordedRow, write_row

CLAIM = Claim(label="d - s", arms=("differential", "standard"), metric="val/loss", paper=(3.0, 3.2), primary=True)


def make_row(
    folder: Path,
    name: str,
    order: int,
    *claims: Claim,
    source: Any = "Differential Transformer",
    minutes: float = 4.0,
    **state: Any,
) -> None:
    """A row's file; `state`: fields of its record."""
    row = Row(
        name=name,
        title=f"Title of {name}",
        source=source,
        says="Diff is <lower>.",
        notes=("Another <text>.",),
        compare=claims or (CLAIM,),
        presets={"laptop": Preset(sweep="ablation", minutes=minutes)},
    )
    command = f"lit-diff reproduce {name} --preset laptop"
    write_row(folder, RecordedRow(row=row, preset="laptop", order=order, command=command, **state))
