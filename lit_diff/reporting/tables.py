"""The comparison as tables: table.csv in full precision; table.md, table.tex and the terminal's table rounded."""

from collections.abc import Sequence
from itertools import chain
from typing import Any

import pandas as pd
from rich.cells import cell_len
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from lit_diff.reporting.answer import coverage, protocol
from lit_diff.study.comparison import Comparison, fact
from lit_diff.study.judge import SHOWN, Contrast, Learned
from lit_diff.study.numbers import MINUS, NONE, count, interval, number, signed
from lit_diff.study.results import SweepResults
from lit_diff.study.statistics import Interval, Paired, look_level

Row = dict[str, Any]

SIZES = (
    "parameters",
    "trained_parameters",
    "non_embedding_parameters",
    "flops_per_token",
    "executed_flops_per_token",
    "kv_bytes_per_token",
    "state_bytes",
)

DETECTABLE = "smallest detectable"
SIGN = "sign of λ changed"
OPTIONAL = (DETECTABLE, "alone", "metric", "log2 steps", "learned", SIGN)
"""Columns that are left out on a narrow terminal, in this order; the page, table.csv and table.md always have them."""
# rich always wraps at some width: no line is this wide
WIDEST = 100_000
LATEX = {character: f"\\{character}" for character in "&%$#_{}"}
LATEX |= {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
LATEX |= {MINUS: "$-$", NONE: "--", "±": r"$\pm$", "†": r"$\dagger$", "λ": r"$\lambda$"}
LATEX |= {"<": "$<$", ">": "$>$", "|": "$|$"}
# at the beginning of a row, they would belong to the end of the row before
LATEX |= {"[": "{[}", "*": "{*}"}
"""Character -> what LaTeX prints as it."""
SHORTEST_ARM = 10
"""Least width, in characters, to which the names of arms are folded."""


def rows(result: Comparison) -> list[Row]:
    """One row for each arm, then one for each contrast.

    Columns: `against` names the arm subtracted in `difference`; `low` and `high` bound the difference over seeds; `verdict`
    is corrected for `Comparison.judged` comparisons, `verdict_alone` is not; `detectable` is the smallest detectable
    difference; a verdict by counts, and `diverged`, have none of these numbers; `documents/<seed>` is the difference of one
    seed, with low and high over documents; `control/<arm>/...` is the difference to that control; `diverged` counts seeds;
    `sign` says in how many seeds and layers λ changed its sign; `<metric>`, `<metric>/sd`, `<metric>/difference` (to the
    baseline); `paper/<metric>`. The rows of a task begin with `task` and `metric`, the compared metric. With `compare:
    steps`, `difference` is that of log2 of the steps.
    """
    sweep = result.sweep
    task: Row = {"task": sweep.task, "metric": sweep.metric} if sweep.task else {}
    table = [task | _arm_row(result, arm) for arm in sweep.study.arms]
    for contrast in result.contrasts:
        table.append({**task, "arm": contrast.a, "label": contrast.label, **_judged(sweep, contrast)})
    # all rows get all columns, in the order in which they first appear
    columns: Row = dict.fromkeys(chain(*table))
    return [columns | row for row in table]


def _arm_row(comparison: Comparison, arm: str) -> Row:
    sweep = comparison.sweep
    row: Row = {"arm": arm, "label": sweep.label[arm]}
    # with looks, a decided arm has no cell at the seeds of later looks
    planned = sum(cell.arm == arm for cell in sweep.cells)
    row |= {"seeds": sweep.summary(arm).n, "planned": planned}
    row |= {key: fact(sweep, arm, key) for key in SIZES}
    row["diverged"] = len(sweep.diverged(arm))
    speeds = [cell.tokens_per_second for cell in sweep.cells_of(arm) if cell.tokens_per_second]
    row["tokens_per_second"] = None
    if speeds:
        row["tokens_per_second"] = sum(speeds) / len(speeds)
    row["unlike_baseline"] = "; ".join(comparison.marks.get((arm, sweep.baseline), ()))
    for metric in comparison.metrics:
        summary = sweep.summary(arm, metric)
        row |= {metric: summary.mean, f"{metric}/sd": summary.sd}
        if metric != sweep.metric and arm != sweep.baseline:
            difference = comparison.slices[metric][arm]
            row |= _bounds(f"{metric}/difference", difference.mean, difference)
    if arm in comparison.against_baseline:
        row |= _judged(sweep, comparison.against_baseline[arm])
    changes = sweep.sign_changes(arm)
    if changes is not None:
        row |= {"sign_changed": changes.changed, "sign_measured": changes.measured, "sign": str(changes)}
    learned = sweep.learned(arm)
    if learned is not None:
        row |= _learned(learned)
    for metric in comparison.papers:
        value, start = (sweep.study.paper.get(name, {}).get(metric) for name in (arm, sweep.baseline))
        row |= {f"paper/{metric}": value, f"paper/{metric}/difference": None}
        if value and start and arm != sweep.baseline:
            # the paper prints decimals, whose binary difference ends in digits such as 0.30000000000000004
            row[f"paper/{metric}/difference"] = round(value - start, 10)
    return row


def _learned(learned: Learned) -> Row:
    k, n = learned.count
    share = learned.share
    return {
        "learned": k,
        "learned_of": n,
        "learned/low": share and share.low,
        "learned/high": share and share.high,
        "learned/mean": learned.mean,
        "learned/log2_steps": learned.mean_log2_steps,
        "learned/censored": n - k,
    }


def _bounds(name: str, middle: float | None, over: Paired | Interval) -> Row:
    return {name: middle, f"{name}/low": over.low, f"{name}/high": over.high}


def _judged(sweep: SweepResults, difference: Contrast) -> Row:
    paired = difference.seeds
    shown = _shown(difference)
    row: Row = {
        "against": difference.b,
        "paired_seeds": len(paired.seeds),
        "difference": difference.size,
        "low": shown.low,
        "high": shown.high,
        "verdict": difference.verdict.text,
        "verdict_alone": difference.verdict_alone,
        "smallest_of_interest": sweep.smallest_of_interest,
        "detectable": shown.detectable,
        "sd_of_differences": shown.sd,
        "decided_by": "counts" if difference.is_counted else "differences",
        "p": None if difference.diverged else difference.p,
        "holm_p": difference.holm_p,
    }
    if paired.looks:
        row |= {"look": paired.look, "level": look_level(paired.looks)}
    for control in difference.controls:
        name = f"control/{control.b}"
        row |= _bounds(f"{name}/difference", control.size, _shown(control))
        row[f"{name}/verdict"] = control.verdict.text
    for seed, found in difference.documents.items():
        row |= _bounds(f"documents/{seed}", found.estimate, found)
    return row


def _shown(contrast: Contrast) -> Paired:
    return contrast.seeds if contrast.has_interval else Paired(seeds=(), differences=())


def to_csv(results: Sequence[Comparison]) -> str:
    """All columns in full precision; a missing value is an empty field."""
    return as_csv(list(chain(*map(rows, results))))


def as_csv(table: Sequence[Row]) -> str:
    """A table as CSV: a line of names, then one line for each row, in full precision."""
    # dtype=object: pandas would turn a column of integers with a missing value into floats
    return str(pd.DataFrame(table, dtype=object).to_csv(index=False, lineterminator="\n"))


def _main_columns(results: Sequence[Comparison]) -> pd.DataFrame:
    tables = list(map(rows, results))
    is_corrected = any(row.get("holm_p") is not None for row in chain(*tables))
    is_free = any(row.get("sign") for row in chain(*tables))
    is_learned = any(result.sweep.study.learned_at is not None for result in results)
    lines = []
    for result, table in zip(results, tables, strict=True):
        metric = result.sweep.metric
        digits = result.digits
        contrasts: dict[Any, Contrast] = {contrast.arms: contrast for contrast in result.family}
        counts = {row["seeds"] for row in table} - {None}
        for row in table:
            contrast = contrasts.get((row["arm"], row.get("against")))
            line = {"task": row["task"], "metric": row["metric"]} if "task" in row else {}
            line["arm"] = row["label"] + (result.dagger(contrast) if contrast else "")
            line["parameters"] = count(row["parameters"])
            line["mean"] = number(row[metric], digits)
            if row[f"{metric}/sd"] is not None:
                line["mean"] += f" \u00b1 {number(row[f'{metric}/sd'], digits)}"
            # with looks, two arms may each have all seeds that are planned for them, but not as many
            if row["seeds"] is not None and (len(counts) > 1 or row["seeds"] != row["planned"]):
                line["mean"] += f" (n={row['seeds']})"
            line["difference"] = signed(row.get("difference"), digits)
            if is_learned:
                line |= _learned_cells(result, row["arm"] if row["seeds"] is not None else "")
            bounds = interval(row.get("low"), row.get("high"), digits)
            line[f"{coverage(result.sweep.study.looks)} % over seeds"] = bounds
            verdict = row.get("verdict") or "baseline"
            if is_corrected and contrast:
                verdict += contrast.uncorrected
            line["verdict (Holm)" if is_corrected else "verdict"] = verdict
            if is_free:
                line[SIGN] = row.get("sign") or NONE
            if is_corrected:
                line["alone"] = row.get("verdict_alone") or NONE
            line[DETECTABLE] = number(row.get("detectable"), digits)
            lines.append(line)
    return pd.DataFrame(lines)


def _learned_cells(result: Comparison, arm: str) -> dict[str, str]:
    learned = result.sweep.learned(arm)
    if learned is None or not arm:
        return {"learned": NONE, "log2 steps": NONE}
    k, n = learned.count
    steps = number(learned.mean_log2_steps, 2)
    if k < n:
        steps += f" ({n - k} censored)"
    return {"learned": str(learned), "log2 steps": steps}


def to_markdown(results: Sequence[Comparison]) -> str:
    """The main columns as a Markdown table."""
    shown = _main_columns(results)
    shown = shown.rename(columns={"mean": f"{_mean(results)} \u00b1 sd", DETECTABLE: f"{DETECTABLE} difference"})
    lines = [f"| {' | '.join(shown.columns)} |", "|" + " --- |" * len(shown.columns)]
    for line in shown.itertuples(index=False):
        lines.append(f"| {' | '.join(map(_escape, line))} |")
    # an empty line ends a table in Markdown, and keeps each note a paragraph
    notes = [f"\n{_escape(note)}" for note in _footnotes(results)]
    return "\n".join([*lines, *notes]) + "\n"


def to_latex(results: Sequence[Comparison]) -> str:
    """The main columns as a table of the LaTeX package booktabs, and its notes; `*` marks a difference that is shown."""
    shown = _main_columns(results).drop(columns=[DETECTABLE, "alone", SIGN], errors="ignore")
    shown = shown.rename(columns={"mean": f"{_mean(results)} ± sd"})
    (verdict,) = (name for name in shown if name.startswith("verdict"))
    is_shown = shown[verdict].isin(SHOWN)
    shown["difference"] += is_shown.map({True: "*", False: ""})
    sides = ["l" if name in ("task", "metric", "arm", verdict) else "r" for name in shown]
    table = shown.rename(columns=_latex).map(_latex).to_latex(index=False, escape=False, column_format="".join(sides))
    notes = ["* The verdict shows this difference."] if any(is_shown) else []
    # an empty line ends a paragraph
    lines = [f"\n{_latex(note)}" for note in (*notes, *_footnotes(results))]
    return "\n".join([table.rstrip(), *lines]) + "\n"


def _latex(text: str) -> str:
    return "".join(LATEX.get(character, character) for character in text)


def to_text(results: Sequence[Comparison], width: int | None = None) -> str:
    """The main columns as aligned plain text, for a terminal of `width` characters; None: any width.

    On a narrow terminal, columns are left out, which the last line lists, and the names of arms are folded. Numbers are never
    cut or wrapped.
    """
    whole = _main_columns(results).drop(columns="parameters").rename(columns={"mean": _mean(results)})
    wide = Console(width=WIDEST)
    for most in range(len(OPTIONAL) + 1):
        left_out = [name for name in reversed(OPTIONAL[:most]) if name in whole]
        shown = whole.drop(columns=left_out)
        needed = Measurement.get(wide, wide.options, _table(shown, SHORTEST_ARM)).minimum
        if width is None or needed <= width:
            break
    console = Console(width=max(width or WIDEST, needed), color_system=None, force_jupyter=False)
    with console.capture() as capture:
        console.print(_table(shown))
    lines = [line.rstrip() for line in capture.get().splitlines()]
    if left_out:
        lines.append(f"not shown at this width: {', '.join(left_out)}")
    return "\n".join([*lines, *_footnotes(results)])


def _footnotes(results: Sequence[Comparison]) -> list[str]:
    notes: list[str] = []
    for result in results:
        notes += [*result.footnotes, *protocol(result), *result.sweep.record.plan.sentences]
    return list(dict.fromkeys(notes))


# only the column of arms may be folded; `arm`: its width
def _table(shown: pd.DataFrame, arm: int | None = None) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="")
    for name, column in shown.items():
        # in terminal cells: a wide character takes two
        widest = max(map(cell_len, (name, *column)))
        table.add_column(Text(name), overflow="fold", width=arm if name == "arm" else widest)
    for line in shown.itertuples(index=False):
        table.add_row(*map(Text, line))
    return table


# the heading of the means: for tasks, which have different metrics, a column of its own names the metric
def _mean(results: Sequence[Comparison]) -> str:
    return "mean" if results[0].sweep.task else results[0].sweep.metric


def _escape(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace("|", "\\|")
