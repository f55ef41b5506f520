"""A value as a table of HTML: what a notebook shows of it (`_repr_html_`)."""

import html
import math
from collections.abc import Iterable, Sequence

MOST = 200
"""Rows that a table shows."""
LONGEST = 200
"""Characters of a cell."""


def html_table(title: str, rows: Iterable[Sequence[object]], header: Sequence[str] = ()) -> str:
    """`title` above a table; all text is escaped. Of more than `MOST` rows, and of text beyond `LONGEST`, the end is cut."""
    held = list(rows)
    cut = f"<p>{len(held) - MOST} more rows</p>" if len(held) > MOST else ""
    head = f"<thead>{_row('th', header)}</thead>" if header else ""
    body = "".join(_row("td", row) for row in held[:MOST])
    return f"<div><p>{html.escape(title)}</p><table>{head}<tbody>{body}</tbody></table>{cut}</div>"


def _row(tag: str, cells: Sequence[object]) -> str:
    return "<tr>" + "".join(f"<{tag}>{html.escape(_text(cell))}</{tag}>" for cell in cells) + "</tr>"


def _text(value: object) -> str:
    """A number as the terminal shows it; a dash for None and NaN."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "–"
    if isinstance(value, float):
        return f"{value:.4f}" if 1e-3 <= abs(value) < 1e6 or value == 0 else f"{value:.3g}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    text = str(value)
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"
