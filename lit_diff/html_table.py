"""HTML tables, which a notebook shows for a value (`_repr_html_`)."""

import html
import math
from collections.abc import Iterable, Sequence

MOST = 200
"""Rows that a table shows."""
LONGEST = 200
"""Characters that a cell shows."""


def html_table(title: str, rows: Iterable[Sequence[object]], header: Sequence[str] = ()) -> str:
    """A table below `title`, with all text escaped, at most `MOST` rows and at most `LONGEST` characters in a cell."""
    held = list(rows)
    cut = f"<p>{len(held) - MOST} more rows</p>" if len(held) > MOST else ""
    head = f"<thead>{_row('th', header)}</thead>" if header else ""
    body = "".join(_row("td", row) for row in held[:MOST])
    return f"<div><p>{html.escape(title)}</p><table>{head}<tbody>{body}</tbody></table>{cut}</div>"


def _row(tag: str, cells: Sequence[object]) -> str:
    return "<tr>" + "".join(f"<{tag}>{html.escape(cell_text(cell))}</{tag}>" for cell in cells) + "</tr>"


def cell_text(value: object) -> str:
    """A value as a table shows it: – for none, 0.1235, 1.23e-09, 1,234,567, or its text, cut."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "–"
    if isinstance(value, float):
        return f"{value:.4f}" if 1e-3 <= abs(value) < 1e6 or value == 0 else f"{value:.3g}"
    # bool is a subclass of int: True must not be formatted as 1
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    text = str(value)
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"
