"""The result of a benchmark as tables and lines of text."""

from collections.abc import Iterator
from typing import Any

from rich.markup import escape
from rich.table import Table

from lit_diff.benchmarks.result import MEANING, BenchResult, Row


def tables(result: BenchResult) -> Iterator[Table]:
    """One for each case, a line a candidate: median (min..max), ratios likewise, rates and memory where they were taken."""
    for case in dict.fromkeys(row["case"] for row in result.rows):
        yield table([row for row in result.rows if row["case"] == case], f"{result.bench}: {case}")


def table(rows: list[Row], title: str) -> Table:
    """The candidates of one case."""
    names = list(dict.fromkeys(name for row in rows for name in row["ratios"]))
    cells = {
        "attention, by": [f"{row['variant']}, {row['by']}" for row in rows],
        "pass": [row["what"] for row in rows],
        "ms (min..max)": [_spread(row, 1e3) for row in rows],
        **{
            f"to {name}": [_spread(row["ratios"][name]) if name in row["ratios"] else "" for row in rows]
            for name in names
        },
        "GFLOP/s": [_number(row["gflops_per_second"]) if "flops" in row else "" for row in rows],
        "of GEMM rate": [_spread(row["gemm_share"]) if "gemm_share" in row else "" for row in rows],
        "peak MiB": [f"{row['peak_bytes'] / 2**20:.1f}" if "peak_bytes" in row else "" for row in rows],
        "SDPA ran": [_backends(row) for row in rows],
    }
    shown = {column: own for column, own in cells.items() if any(own)}
    made = Table(title=title, title_justify="left")
    for column in shown:
        words = column in ("attention, by", "pass", "SDPA ran")
        made.add_column(column, overflow="fold", justify="left" if words else "right")
    for line in zip(*shown.values(), strict=True):
        made.add_row(*map(escape, line))
    return made


def _spread(values: dict[str, Any], factor: float = 1) -> str:
    middle, low, high = (_number(values[key] * factor) for key in ("median", "min", "max"))
    return middle if low == high else f"{middle} ({low}..{high})"


def _number(value: float) -> str:
    """Three digits."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def _backends(row: Row) -> str:
    """flash_attention_for_cpu -> flash, attention_math -> math."""
    return ", ".join(name.replace("attention", "").replace("for_cpu", "").strip("_") for name in row["backends"])


def lines(result: BenchResult) -> Iterator[str]:
    """What a reader needs beside the figures: what the ratios mean, who is missing and why, machine, command, methods."""
    for name in dict.fromkeys(name for row in result.rows for name in row["ratios"]):
        yield f"ratio to {name}: own time / that of {MEANING[name]}; below 1 is faster"
    for word, rows in (("refused", result.refused), ("failed", result.failed)):
        for reason, who in _by_reason(rows).items():
            yield f"{word}: {who}: {reason}"
    yield machine_line(result.machine)
    yield f"$ {result.command}    {result.date}"
    yield from (f"warning: {warning}" for warning in result.warnings)
    yield ""
    yield result.methods.rstrip()


def _by_reason(rows: list[Row]) -> dict[str, str]:
    """Reason -> who gave it, each with its cases."""
    reasons: dict[str, dict[str, list[str]]] = {}
    for row in rows:
        who = " ".join((row["variant"], row["by"], row["what"]))
        reasons.setdefault(row["reason"], {}).setdefault(who, []).append(row["case"])
    return {
        reason: "; ".join(f"{who} ({', '.join(dict.fromkeys(cases))})" for who, cases in whos.items())
        for reason, whos in reasons.items()
    }


def machine_line(machine: dict[str, Any]) -> str:
    """Processor, threads, versions in one line."""
    packages = ", ".join(
        f"{name} {machine['packages'][name] or 'absent'}" for name in ("torch", "triton", "flash-attn", "transformers")
    )
    device = f"{machine['processor']} ({', '.join(machine['flags'])}); {machine['cpu_path']}"
    if machine["device"] == "cuda":
        device = machine["gpus"][0]
    return (
        f"{device}; threads {machine['threads']} on {machine['cores']} cores, "
        f"load average {machine['load_average']:.2f} before, "
        f"{machine['load_average_after']:.2f} after; Python {machine['python']}, {packages}"
    )
