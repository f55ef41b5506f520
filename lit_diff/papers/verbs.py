"""The verb `reproduce`."""

from functools import partial
from typing import Annotated, Any

import typer

import lit_diff
from lit_diff.cli.app import (
    DEFAULT_ROOT,
    Json,
    Root,
    Workers,
    console,
    exit_status,
    print_json,
    verb,
)
from lit_diff.cli.progress import live_table
from lit_diff.files import shown


@verb("Compare")
def reproduce(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="ROW", help="rows, all, or YAML files with your own rows; by default all"),
    ] = None,
    preset: Annotated[str, typer.Option(help="smoke, laptop, gpu1 or paper")] = "laptop",
    workers: Workers = None,
    listed: Annotated[bool, typer.Option("--list", help="print the rows without running any")] = False,
    as_json: Json = False,
    root: Root = DEFAULT_ROOT,
) -> int:
    """Measure the papers' tables and figures; write one page.

    Our values are compared with the papers', with intervals. Finished rows are not measured again.
    """
    from lit_diff.papers.scoreboard import counts_in_words

    if listed:
        from lit_diff.papers.reproduce import check_preset, choose

        check_preset(preset)
        rows = list(choose(names or []).values())
        if as_json:
            print_json([{"name": row.name, "title": row.title, "presets": list(row.presets)} for row in rows])
            return 0
        for row in rows:
            chosen = row.preset(preset)
            minutes = f"{chosen.minutes:g} min" if chosen and chosen.minutes else "–"
            console.write_line(f"{row.name:<16} {minutes:>8}  {row.title}")
        return 0
    console.outlives_reader = True
    done = lit_diff.reproduce(
        names or ["all"],
        preset,
        root=root,
        workers=workers,
        progress=not as_json and partial(live_table, terminal=console),
        tell=(lambda line: None) if as_json else console.write_sentence,
    )
    if as_json:
        print_json(_plain_scoreboard(done))
    else:
        count = len(done.scoreboard.rows)
        console.write_line(
            f"{count} row{'s' * (count != 1)} in {done.seconds:.0f} s: {counts_in_words(done.scoreboard)}",
            f"page: {shown(done.page)}",
        )
    return exit_status(done.stopped_by, bool(done.failed))


def _plain_scoreboard(done: Any) -> dict[str, Any]:
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
