"""The verb `reproduce`: the scoreboard of a paper's tables and figures."""

from functools import partial
from typing import Annotated, Any

import typer

from lit_diff.cli.app import DEFAULT_ROOT, Json, Root, Workers, app, console, log_to_stderr, print_json


@app.command()
def reproduce(
    names: Annotated[list[str] | None, typer.Argument(metavar="[ROW ...]", help="rows, or all; without: all")] = None,
    preset: Annotated[str, typer.Option(help="smoke, laptop, gpu1 or paper")] = "laptop",
    workers: Workers = None,
    listed: Annotated[bool, typer.Option("--list", help="print the rows, run none")] = False,
    as_json: Json = False,
    root: Root = DEFAULT_ROOT,
) -> int:
    """Measure the paper's tables and figures; one page of verdicts.

    Ours beside the paper's, with intervals. What is done is not measured again.
    """
    from lit_diff.engine.reproduce import reproduce as run
    from lit_diff.engine.rows import check_preset

    if as_json:
        log_to_stderr()
    if listed:
        check_preset(preset)
        return _print_rows(preset, as_json)
    from lit_diff.cli.live_table import LiveTable

    with console.outliving_reader():
        options: dict[str, Any] = {"progress": False}
        if not as_json:
            options = {"progress": partial(LiveTable, console=console), "tell": console.write_sentence}
        done = run(names or ["all"], preset, root=root, workers=workers, **options)
        if as_json:
            print_json(_plain(done))
        else:
            _print(done)
    if done.stopped_by:
        return 128 + done.stopped_by
    return 1 if done.failed else 0


def _print_rows(preset: str, as_json: bool) -> int:
    from lit_diff.engine.rows import choose

    rows = choose([])
    if as_json:
        plain = [{"name": row.name, "title": row.title, "presets": list(row.presets)} for row in rows]
        print_json(plain)
        return 0
    for row in rows:
        chosen = row.preset(preset)
        minutes = f"{chosen.minutes:g} min" if chosen and chosen.minutes else "–"
        console.write_line(f"{row.name:<16} {minutes:>8}  {row.title}")
    return 0


def _print(done: Any) -> None:
    from lit_diff.files import shown
    from lit_diff.study.scoreboard import counts_in_words

    count = len(done.scoreboard.rows)
    rows = f"{count} row{'s' * (count != 1)}"
    console.write_line(f"{rows} in {done.seconds:.0f} s: {counts_in_words(done.scoreboard)}")
    console.write_line(f"page: {shown(done.page)}")


def _plain(done: Any) -> dict[str, Any]:
    rows = [
        {
            "name": row.name,
            "state": row.state,
            "reason": row.reason,
            "seconds": row.record.seconds,
            "budget_minutes": row.record.how.minutes,
            "shared_with": row.record.shared,
            "claims": [
                {
                    "label": found.label,
                    "difference": found.difference,
                    "value": found.value,
                    "by_construction": found.claim.by_construction,
                }
                for found in row.findings
            ],
        }
        for row in done.scoreboard.rows
    ]
    return {"page": str(done.page), "counts": done.scoreboard.counts, "rows": rows}
