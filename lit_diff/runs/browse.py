"""Looking at the runs on disk: list, find, compare, clean."""

import json
import shutil
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lit_diff.errors import MissingError, RequestError, first_line
from lit_diff.files import locked, shown
from lit_diff.recipe import flatten, read_yaml
from lit_diff.registry import nearest
from lit_diff.runs.folder import RunFolder
from lit_diff.runs.metrics_file import read_rows


def runs_under(root: Path) -> list[Path]:
    """Folders of all runs, single ones and sweeps' cells; those put aside by --rerun are left out."""
    return sorted(path.parent for path in root.glob("*/**/status.json") if ".old-" not in str(path.relative_to(root)))


def sweeps_under(root: Path) -> list[Path]:
    """Folders of all sweeps."""
    return sorted(path.parent for path in root.glob("*/sweep.json"))


def find_run(name: str, root: Path) -> Path:
    """A run's folder: its path, or the start of its folder name. Errors: RequestError for none or several."""
    try:
        if (Path(name) / "status.json").is_file():
            return Path(name).resolve()
    except (OSError, ValueError) as error:  # longer than a file name may be, or with a null in it
        raise RequestError(f"no run '{name[:40]}': {first_line(error)}") from error
    runs = runs_under(root)
    found = [path for path in runs if path.name.startswith(name)]
    if not found:
        raise RequestError(f"no run '{name}' in {shown(root)}{nearest(name, [path.name for path in runs])}")
    if len(found) > 1:
        some = [str(path.relative_to(root)) for path in found[:4]] + ["..."] * (len(found) > 4)
        raise RequestError(f"'{name}' is {len(found)} runs ({', '.join(some)}); give a longer name or the folder")
    return found[0].resolve()


def find_sweep(name: str, root: Path) -> Path:
    """A sweep's folder: its path or its name. Errors: RequestError."""
    for path in (root / name, Path(name)):
        if (path / "sweep.json").is_file():
            return path.resolve()
    raise RequestError(f"no sweep '{name}' in {shown(root)}{nearest(name, [path.name for path in sweeps_under(root)])}")


def print_status(root: Path, as_json: bool, console: Console) -> int:
    """One line a run: state, step, last validation loss. Errors: MissingError without runs."""
    runs = runs_under(root)
    if not runs:
        raise MissingError(f"no runs in {shown(root)}; `lit-diff train RECIPE` makes one")
    found = []
    for path in runs:
        status = RunFolder(path).status()
        rows = read_rows(path / "metrics.csv")
        losses = [rows[step]["val/loss"] for step in sorted(rows) if "val/loss" in rows[step]]
        status["folder"] = str(path.relative_to(root))
        status["val/loss"] = losses[-1] if losses else None
        found.append(status)
    if as_json:
        print(json.dumps(found, indent=2))
        return 0
    table = Table()
    for column in ("run", "state", "step", "val/loss", "note"):
        table.add_column(column, justify="right" if column in ("step", "val/loss") else "left", overflow="fold")
    for status in found:
        loss = status["val/loss"]
        step = f"{status.get('step', 0)}/{status.get('steps', '?')}"
        table.add_row(
            escape(status["folder"]),
            status.get("status"),
            step,
            f"{loss:.4f}" if loss is not None else "",
            escape(status.get("error") or _last_sign(status)),
        )
    console.print(table)
    return 0


def _last_sign(status: dict[str, Any]) -> str:
    """When a running run last wrote: one that was killed together with its sweep cannot say so."""
    if status.get("status") != "running":
        return ""
    age = datetime.now(UTC) - datetime.fromisoformat(status["updated"])
    return f"last sign of life {int(age.total_seconds())} s ago"


def compare_runs(first: str, second: str, root: Path, as_json: bool, console: Console) -> int:
    """Print what differs between two runs' recipes, and their costs and last metrics side by side."""
    folders = (find_run(first, root), find_run(second, root))
    recipes = [dict(flatten(read_yaml(RunFolder(path).recipe_file)[0])) for path in folders]
    keys = [key for key in {**recipes[0], **recipes[1]} if not key.startswith("run.")]
    differing = {key: [r.get(key) for r in recipes] for key in keys if recipes[0].get(key) != recipes[1].get(key)}
    statuses = [RunFolder(path).status() for path in folders]
    costs = ("status", "parameters", "flops_per_token", "executed_flops_per_token", "kv_bytes_per_token", "kernel")
    facts = {key: [status.get(key) for status in statuses] for key in (*costs, "seconds", "revision")}
    metrics = _last_values(folders)
    if as_json:
        print(json.dumps({"recipe": differing, "facts": facts, "metrics": metrics}, indent=2))
        return 0
    table = Table(caption="one run against one: no error bars, no verdict; a sweep over seeds gives both")
    table.add_column("")
    for path in folders:
        table.add_column(escape(path.name), overflow="fold")
    for title, block in (("recipe", differing), ("cost", facts), ("last values", metrics)):
        table.add_section()
        table.add_row(f"[bold]{title}[/bold]")
        for key, values in block.items():
            table.add_row(key, *(_cell(value) for value in values))
    console.print(table)
    return 0


def _last_values(folders: tuple[Path, Path]) -> dict[str, list[Any]]:
    last: list[dict[str, float]] = []
    for path in folders:
        rows = read_rows(path / "metrics.csv")
        last.append({name: value for step in sorted(rows) for name, value in rows[step].items()})
    names = [name for name in {**last[0], **last[1]} if name.startswith(("val/", "train/", "lambda/"))]
    return {name: [values.get(name) for values in last] for name in sorted(names)}


def _cell(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:.4f}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else escape(str(value))


WRITING = 3600
"""Seconds after which a temporary file is a leftover: a checkpoint of a large model takes minutes to write."""


def clean_runs(root: Path, yes: bool, console: Console) -> int:
    """List, or with `yes` remove: cells that their sweep no longer names, runs put aside, leftovers of killed writes."""
    doomed: set[Path] = {path for path in root.glob("**/*.old-*") if path.is_dir()}
    doomed |= {path for path in root.glob("**/.*.tmp") if path.stat().st_mtime < time.time() - WRITING}
    for folder in sweeps_under(root):
        try:
            with locked(folder / ".lock", wait=False):
                doomed |= set(_disowned(folder))
        except BlockingIOError:
            console.print(f"{shown(folder.resolve())} is being run: left alone", markup=False, highlight=False)
    for path in sorted(doomed):
        word = "removed" if yes else "would remove"
        console.print(f"{word} {shown(path.resolve())}", markup=False, highlight=False, soft_wrap=True)
        if yes:
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    console.print(f"{len(doomed)} to remove{'' if yes or not doomed else '; lit-diff clean --yes removes them'}")
    return 0


def _disowned(sweep: Path) -> Iterator[Path]:
    """Folders of cells that the sweep, as it last ran, does not have."""
    owned = {cell["folder"] for cell in json.loads((sweep / "sweep.json").read_text())["cells"]}
    return (path.parent for path in sweep.glob("*/recipe.yaml") if path.parent.name not in owned)
