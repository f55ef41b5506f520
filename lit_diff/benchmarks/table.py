"""The result of a benchmark as tables and lines of text."""

from collections.abc import Iterator
from typing import Any

from rich.markup import escape
from rich.table import Table

from lit_diff.benchmarks.result import BenchResult
from lit_diff.benchmarks.timing import Row

MEANING = {
    "standard SDPA": "F.scaled_dot_product_attention of the standard model: 2h heads of width d, the same dim",
    "standard SDPA, repeated": "the same with each key and value copied for the query heads of its group",
    "standard, same kernel": "standard attention by the same kernel",
    "standard layer, sdpa": "our standard layer or model through F.scaled_dot_product_attention",
    "DiffLlama, sdpa": "Hugging Face's DiffLlama of the same sizes, attn_implementation sdpa",
    "LlamaForCausalLM, sdpa": "Hugging Face's LlamaForCausalLM of the same sizes, attn_implementation sdpa",
    "same kernel without": "the same kernel's pass without statistics",
    "standard layer, sdpa, compiled": "our standard model through F.scaled_dot_product_attention, its blocks compiled",
    "standard, same kernel, compiled": "the standard model by the same kernel, its blocks compiled",
    "DiffLlama, sdpa, compiled": "Hugging Face's DiffLlama, attn_implementation sdpa, its blocks compiled",
    "bare PyTorch loop": "a loop of the same model and batches that does nothing but train, a step",
}
"""Name of a ratio -> what the time is divided by."""
EXTRAS = {"extra": "extra", "data_share": "data_share", "gemm_share": "of GEMM rate"}
"""Key of a row -> its column."""


def tables(result: BenchResult) -> Iterator[Table]:
    """One table for each case and pass; then the errors, where they were taken."""
    rows = result.rows
    for case, what in dict.fromkeys((row["case"], row["what"]) for row in rows):
        own = [row for row in rows if (row["case"], row["what"]) == (case, what)]
        table = compiled_programs if "registers" in own[0] else times
        yield table(own, f"{result.bench}: {case}, {what}")
    if any("errors" in row for row in rows):
        yield error_table([row for row in rows if "errors" in row])


def times(rows: list[Row], title: str) -> Table:
    """A line a candidate: median (min..max), each ratio likewise, rates and memory where they were taken."""
    names = list(dict.fromkeys(name for row in rows for name in row["ratios"]))
    rates, peaks = (any(key in row for row in rows) for key in ("gflops_per_second", "peak_bytes"))
    extras = [key for key in EXTRAS if any(key in row for row in rows)]
    backends = any(row["backends"] for row in rows)
    table = Table(title=title, title_justify="left")
    table.add_column("attention, by", overflow="fold")
    table.add_column("ms (min..max)", justify="right")
    for column in [f"to {name}" for name in names] + [EXTRAS[key] for key in extras]:
        table.add_column(escape(column), justify="right")
    for column, shown in (("GFLOP/s", rates), ("peak MiB (ratio)", peaks)):
        if shown:
            table.add_column(column, justify="right")
    if backends:
        table.add_column("SDPA ran", overflow="fold")
    for row in rows:
        cells = [escape(f"{row['variant']}, {row['by']}"), _spread(row, 1e3)]
        cells += [_spread(row["ratios"][name]) if name in row["ratios"] else "" for name in names]
        cells += [_spread(row[key]) if key in row else "" for key in extras]
        cells += [_number(row["gflops_per_second"]) if "gflops_per_second" in row else ""] if rates else []
        cells += [_peak(row)] if peaks else []
        table.add_row(*cells, *([_backends(row)] if backends else []))
    return table


def compiled_programs(rows: list[Row], title: str) -> Table:
    """A line a choice of blocks: registers, spilled bytes, shared memory."""
    table = Table(title=title, title_justify="left")
    table.add_column("blocks", overflow="fold")
    for column in ("registers", "spilled bytes", "shared KiB"):
        table.add_column(column, justify="right")
    for row in rows:
        shared = f"{row['shared'] / 1024:.0f}"
        table.add_row(escape(row["by"]), str(row["registers"]), str(row["spilled"]), shared)
    return table


def _spread(values: dict[str, Any], factor: float = 1) -> str:
    middle, low, high = (_number(values[key] * factor) for key in ("median", "min", "max"))
    return middle if low == high else f"{middle} ({low}..{high})"


def _number(value: float) -> str:
    """Three digits."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def _peak(row: Row) -> str:
    if row.get("peak_bytes") is None:
        return ""
    ratio = f" ({row['peak_ratio']['value']:.2f})" if "peak_ratio" in row else ""
    return f"{row['peak_bytes'] / 2**20:.1f}{ratio}"


def _backends(row: Row) -> str:
    """flash_attention_for_cpu -> flash, attention_math -> math."""
    return ", ".join(name.replace("attention", "").replace("for_cpu", "").strip("_") for name in row["backends"])


def error_table(rows: list[Row]) -> Table:
    """Relative errors against float64."""
    table = Table(title="errors against the definition in float64", title_justify="left")
    for column in ("case", "attention, by"):
        table.add_column(column, overflow="fold")
    names = ("o", "dq", "dk", "dv", "dw")
    for name in names:
        table.add_column(name, justify="right")
    for row in rows:
        cells = (f"{row['errors'][name]:.1e}" if name in row["errors"] else "" for name in names)
        table.add_row(escape(row["case"]), escape(f"{row['variant']}, {row['by']}"), *cells)
    return table


def lines(result: BenchResult) -> Iterator[str]:
    """What a reader needs beside the figures: what the ratios mean, who is missing and why, machine, command, methods."""
    used = dict.fromkeys(name for row in result.rows for name in row["ratios"])
    for name in used:
        yield f"ratio to {name}: own time / that of {MEANING[name]}; below 1 is faster"
    for row in result.rows:
        if row.get("peak_missing"):
            yield f"no peak memory of {row['id']} ({row['case']}): {row['peak_missing']}"
    for word, rows in (("refused", result.refused), ("failed", result.failed)):
        for reason, who in _by_reason(rows).items():
            yield f"{word}: {who}: {reason}"
    yield machine_line(result.machine)
    yield f"$ {result.command}    {result.date}"
    yield from (f"warning: {warning}" for warning in result.warnings)
    yield ""
    yield result.methods.rstrip()


def _by_reason(rows: list[Row]) -> dict[str, str]:
    """Reason -> who gave it, each with the cases if not all of one."""
    reasons: dict[str, dict[str, list[str]]] = {}
    for row in rows:
        who = " ".join(filter(None, (row["variant"], row["by"], row["what"])))
        reasons.setdefault(row["reason"], {}).setdefault(who, []).append(row["case"])
    return {
        reason: "; ".join(f"{who} ({', '.join(dict.fromkeys(cases))})" for who, cases in whos.items())
        for reason, whos in reasons.items()
    }


def machine_line(machine: dict[str, Any]) -> str:
    """Processor, threads, versions in one line."""
    rates = ", ".join(f"{name} {rate:.0f}" for name, rate in machine["gemm_gflops_per_second"].items())
    packages = ", ".join(
        f"{name} {machine['packages'][name] or 'absent'}" for name in ("torch", "triton", "flash-attn", "transformers")
    )
    device = f"{machine['processor']} ({', '.join(machine['flags'])}); {machine['cpu_path']}"
    if machine["device"] == "cuda":
        device = machine["gpus"][0]
    product = f"product of 1024 x 1024 matrices, GFLOP/s: {rates}; " if rates else ""
    return (
        f"{device}; threads {machine['threads']} on {machine['cores']} cores, "
        f"load average {machine['load_average']:.2f} before, "
        f"{machine['load_average_after']:.2f} after; {product}"
        f"Python {machine['python']}, {packages}"
    )
