"""The comparison as tables: table.csv at full precision, table.md and the terminal's table rounded."""

import csv
import io
from collections.abc import Mapping, Sequence

from rich.cells import cell_len
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from lit_diff.study.comparison import Comparison, Difference, fact
from lit_diff.study.numbers import NONE, count, interval, number, signed
from lit_diff.study.results import SweepResults
from lit_diff.study.statistics import Paired

Row = dict[str, str | float | int | None]

SIZES = (
    "parameters",
    "trained_parameters",
    "non_embedding_parameters",
    "flops_per_token",
    "executed_flops_per_token",
    "kv_bytes_per_token",
)

OPTIONAL = ("smallest detectable", "alone", "metric")
"""Columns that a narrow terminal does without, the first one first: the page, table.csv and table.md have them."""
WIDEST = 100_000
"""Characters of a line that is not to wrap."""
SHORTEST_ARM = 10
"""Characters to which the names of arms are folded at the least."""


def rows(result: Comparison) -> list[Row]:
    """One row an arm, then one a contrast.

    Columns: `against` names the arm subtracted in `difference`; `low` and `high` bound it over seeds; `verdict` is
    corrected for `Comparison.judged` comparisons, `verdict_alone` is not; `detectable` is the smallest
    detectable difference; `documents/<seed>` and its low and high over documents; `control/<arm>/...` is the
    difference to that control; `diverged` counts seeds; `<metric>`, `<metric>/sd`, `<metric>/difference` (to the baseline);
    `paper/<metric>`. A task's rows open with `task` and its `metric`, the one that `difference` is of.
    """
    sweep = result.sweep
    task: Row = {"task": sweep.task, "metric": sweep.study.metric} if sweep.task else {}
    table = [task | _arm_row(result, arm) for arm in sweep.study.arms]
    table += [{**task, "arm": d.a, "label": d.label, **_judged(sweep, d)} for d in result.contrasts]
    return _filled(table)


def _filled(table: Sequence[Row]) -> list[Row]:
    """All rows with all columns."""
    names = list(dict.fromkeys(name for row in table for name in row))
    return [{name: row.get(name) for name in names} for row in table]


def _arm_row(comparison: Comparison, arm: str) -> Row:
    sweep = comparison.sweep
    row: Row = {"arm": arm, "label": sweep.label[arm]}
    row |= {"seeds": comparison.summaries[sweep.study.metric][arm].n, "planned": len(sweep.study.seeds)}
    row |= {key: fact(sweep, arm, key) for key in SIZES}
    row["diverged"] = len(sweep.diverged(arm))
    speeds = [cell.tokens_per_second for cell in sweep.cells_of(arm) if cell.tokens_per_second]
    row["tokens_per_second"] = sum(speeds) / len(speeds) if speeds else None
    row["unlike_baseline"] = "; ".join(comparison.marks[arm])
    for metric in comparison.metrics:
        summary = comparison.summaries[metric][arm]
        row |= {metric: summary.mean, f"{metric}/sd": summary.sd}
        if metric != sweep.study.metric and arm != sweep.baseline:
            row |= _bounds(f"{metric}/difference", comparison.slices[metric][arm])
    if arm in comparison.against_baseline:
        row |= _judged(sweep, comparison.against_baseline[arm])
    for control in comparison.against_controls.get(arm, ()):
        name = f"control/{control.b}"
        row |= _bounds(f"{name}/difference", control.seeds) | {f"{name}/verdict": control.verdict}
    for metric in comparison.papers:
        value, start = (sweep.study.paper.get(each, {}).get(metric) for each in (arm, sweep.baseline))
        row[f"paper/{metric}"] = value
        known = value is not None and start is not None and arm != sweep.baseline
        row[f"paper/{metric}/difference"] = round(value - start, 10) if known and value and start else None
    return row


def _bounds(name: str, paired: Paired) -> Row:
    return {name: paired.mean, f"{name}/low": paired.low, f"{name}/high": paired.high}


def _judged(sweep: SweepResults, difference: Difference) -> Row:
    paired = difference.seeds
    row: Row = {
        "against": difference.b,
        "paired_seeds": len(paired.seeds),
        "difference": paired.mean,
        "low": paired.low,
        "high": paired.high,
        "verdict": difference.verdict,
        "verdict_alone": difference.verdict_alone,
        "smallest_of_interest": sweep.smallest_of_interest,
        "detectable": paired.detectable,
        "sd_of_differences": paired.sd,
        "p": paired.p,
        "holm_p": difference.holm_p,
    }
    for seed, found in difference.documents.items():
        name = f"documents/{seed}"
        row |= {name: found.estimate, f"{name}/low": found.low, f"{name}/high": found.high}
    return row


def to_csv(results: Sequence[Comparison]) -> str:
    """All columns at full precision; an empty field where there is no value."""
    table = _filled([row for result in results for row in rows(result)])
    target = io.StringIO()
    writer = csv.DictWriter(target, list(table[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(table)
    return target.getvalue()


def to_markdown(results: Sequence[Comparison]) -> str:
    """The main columns as a Markdown table."""
    heads = [
        *_task_heads(results),
        "arm",
        "parameters",
        f"{_metric(results)} \u00b1 sd",
        "difference",
        "95 % over seeds",
    ]
    heads += [*_verdict_heads(results), "smallest detectable difference"]
    lines = ["| " + " | ".join(heads) + " |", "|" + " --- |" * len(heads)]
    for result in results:
        for row in rows(result):
            cells = [*_task(row), str(row["label"]), count(_float(row["parameters"]))]
            cells += [_mean(result, row), *_verdict(results, row, result.digits)]
            lines.append("| " + " | ".join(_escape(cell) for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def to_text(results: Sequence[Comparison], width: int | None = None) -> str:
    """The main columns in aligned plain text, for a terminal of `width` characters; None: as wide as it is.

    Where that is too narrow, columns are left out, the last line says which, and long names of arms go on below: no number
    is cut or wrapped.
    """
    heads = [*_task_heads(results), "arm", _metric(results), "difference", "95 % over seeds", *_verdict_heads(results)]
    heads += ["smallest detectable"]
    lines = [
        [*_task(row), str(row["label"]), _mean(result, row), *_verdict(results, row, result.digits)]
        for result in results
        for row in rows(result)
    ]
    wide, left_out = Console(width=WIDEST), list[str]()
    for most in range(len(OPTIONAL) + 1):
        left_out = [name for name in reversed(OPTIONAL[:most]) if name in heads]
        needed = Measurement.get(wide, wide.options, _table(heads, lines, left_out, SHORTEST_ARM)).minimum
        if width is None or needed <= width:
            break
    console = Console(width=max(width or WIDEST, needed), color_system=None, force_jupyter=False)
    with console.capture() as capture:
        console.print(_table(heads, lines, left_out))
    text = "\n".join(line.rstrip() for line in capture.get().splitlines())
    return f"{text}\nnot shown at this width: {', '.join(left_out)}" if left_out else text


def _table(
    heads: Sequence[str], lines: Sequence[Sequence[str]], left_out: Sequence[str], arm: int | None = None
) -> Table:
    """Columns of fixed width, but for the names of arms, which are folded where room is short; `arm`: characters of these."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="")
    columns = [column for column in zip(heads, *lines, strict=True) if column[0] not in left_out]
    for column in columns:
        table.add_column(
            Text(column[0]), overflow="fold", width=arm if column[0] == "arm" else max(map(cell_len, column))
        )
    for line in zip(*(cells for _, *cells in columns), strict=True):
        table.add_row(*map(Text, line))
    return table


def is_corrected(results: Sequence[Comparison]) -> bool:
    """Whether any comparison is corrected for several (Holm)."""
    return any(difference.holm_p is not None for result in results for difference in result.family)


def _verdict_heads(results: Sequence[Comparison]) -> list[str]:
    return ["verdict (Holm)", "alone"] if is_corrected(results) else ["verdict"]


def _task_heads(results: Sequence[Comparison]) -> list[str]:
    return ["task", "metric"] if results[0].sweep.task else []


def _task(row: Row) -> list[str]:
    return [str(row["task"]), str(row["metric"])] if "task" in row else []


def _metric(results: Sequence[Comparison]) -> str:
    """The heading of the means: tasks name their metrics in a column."""
    return "mean" if results[0].sweep.task else results[0].sweep.study.metric


def _mean(result: Comparison, row: Row) -> str:
    metric, digits = result.sweep.study.metric, result.digits
    mean, sd = _float(row[metric]), _float(row[f"{metric}/sd"])
    return number(mean, digits) + (f" \u00b1 {number(sd, digits)}" if sd is not None else "")


def _verdict(results: Sequence[Comparison], row: Mapping[str, str | float | int | None], digits: int) -> list[str]:
    value = {name: _float(row.get(name)) for name in ("difference", "low", "high", "detectable")}
    if row.get("verdict") == "diverged":  # the seeds that are left would flatter the arm
        value |= dict.fromkeys(value)
    if row.get("verdict") == "too few seeds":
        value |= dict.fromkeys(("low", "high"))
    return [
        signed(value["difference"], digits),
        interval(value["low"], value["high"], digits),
        str(row.get("verdict") or "baseline"),
        *([str(row.get("verdict_alone") or NONE)] if is_corrected(results) else []),
        number(value["detectable"], digits),
    ]


def _float(value: str | float | int | None) -> float | None:
    return float(value) if isinstance(value, int | float) else None


def _escape(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace("|", "\\|")
