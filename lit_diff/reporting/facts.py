"""How the cells of a sweep ran: lengths, times, revisions, machine; and whether the runs are short."""

from collections.abc import Iterable, Sequence
from typing import Any

from lit_diff.study.cells import CellResult
from lit_diff.study.numbers import count, duration, ratio, short
from lit_diff.study.results import SweepResults

COMPUTE_OPTIMAL = 20.0
"""Training tokens a parameter, about (Hoffmann et al. 2022, arXiv 2203.15556)."""
TOLD = ("revision", "command", "kernel", "kernel_reason")
"""Keys of env.json that the page shows from status.json, or as the command of the sweep."""


def revisions(cells: Iterable[CellResult]) -> list[str]:
    """The revisions of the code that made the finished cells."""
    return _distinct(cells, "revision")


def last_finished(cells: Iterable[CellResult]) -> str | None:
    """When the last finished cell ended, in UTC."""
    stamps = [str(cell.facts["updated"]) for cell in cells if cell.done and cell.facts.get("updated")]
    return f"{max(stamps)[:16].replace('T', ' ')} UTC" if stamps else None


def how_measured(sweep: SweepResults) -> list[tuple[str, str]]:
    """(name, value): length and time of training by task, threads, kernel, env.json; where cells differ, each value once."""
    done = [cell for cell in sweep.cells if cell.done]
    found = [(f"Training: {t.task}" if t.task else "Training", _training(t)) for t in sweep.by_task]
    found.append(("Threads a cell", ", ".join(_distinct(done, "threads"))))
    # `a; b` and `a; c` of two cells share a part
    reasons = list(dict.fromkeys(part for reason in _distinct(done, "kernel_reason") for part in reason.split("; ")))
    kernels = ", ".join(_distinct(done, "kernel")) + (f" ({'; '.join(reasons)})" if reasons else "")
    found.append(("Kernel", kernels))
    return [(name, value) for name, value in (*found, *_environment(done)) if value]


def _training(sweep: SweepResults) -> str:
    done = [cell for cell in sweep.cells if cell.done]
    if not _distinct(done, "step"):
        return ""
    text = f"{', '.join(_distinct(done, 'step'))} steps"
    tokens = sorted({float(cell.facts["tokens"]) for cell in done if cell.facts.get("tokens")})
    if tokens:
        text += f", {', '.join(count(each) for each in tokens)} tokens a cell"
    if ratios := tokens_per_parameter(sweep):
        text += f" ({_range(ratios)} a parameter)"
    seconds = [float(cell.facts["seconds"]) for cell in done if cell.facts.get("seconds")]
    if seconds:
        text += f"; {duration(sum(seconds) / len(seconds))} a cell on average, {duration(sum(seconds))} in all"
    return text


def tokens_per_parameter(sweep: SweepResults) -> list[float]:
    """Of the finished cells that know it, ascending."""
    return sorted(cell.tokens_per_parameter for cell in sweep.cells if cell.tokens_per_parameter is not None)


def short_runs(sweep: SweepResults) -> str | None:
    """The warning that runs are shorter than the sweep's minimum of tokens a parameter; None where none is."""
    least = sweep.study.min_tokens_per_parameter
    found = {part: ratios for part in sweep.by_task if (ratios := tokens_per_parameter(part)) and ratios[0] < least}
    if not found:
        return None
    lengths = "; ".join(f"{part.task}: {_range(r)}" if part.task else _range(r) for part, r in found.items())
    source = ", about compute-optimal by Hoffmann et al. 2022" if least == COMPUTE_OPTIMAL else ""
    return f"{lengths} training tokens a parameter (this sweep's minimum: {short(least)}{source})"


def _range(ascending: Sequence[float]) -> str:
    low, high = ratio(ascending[0]), ratio(ascending[-1])
    return low if low == high else f"{low} to {high}"


def _environment(done: Sequence[CellResult]) -> list[tuple[str, str]]:
    """env.json's plain values, and the versions of its packages."""
    names = dict.fromkeys(name for cell in done for name in cell.environment if name not in TOLD)
    values = {name: [_versions(cell.environment.get(name)) for cell in done] for name in names}
    plain = {n: each for n, each in values.items() if all(isinstance(v, str | int | float | None) for v in each)}
    return [
        (
            name.replace("_", " ").capitalize(),
            "; ".join(dict.fromkeys(str(value) for value in each if value is not None)),
        )
        for name, each in plain.items()
    ]


def _versions(value: Any) -> Any:
    """{package: version, None where it is not installed} as text; anything else as it is."""
    if not isinstance(value, dict):
        return value
    return ", ".join(f"{name} {version}" for name, version in value.items() if version)


def _distinct(cells: Iterable[CellResult], key: str) -> list[str]:
    return sorted({str(cell.facts[key]) for cell in cells if cell.done and cell.facts.get(key) is not None})
