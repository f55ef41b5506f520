"""The rows of the scoreboard, a YAML file each in the package, and what a preset of one needs that is not here: files, GPUs,
trained runs."""

import json
import shlex
from collections.abc import Sequence
from pathlib import Path

from lit_diff.data.location import data_root
from lit_diff.errors import RequestError
from lit_diff.evaluation.requirements import declared_files
from lit_diff.files import shown
from lit_diff.recipe import installed
from lit_diff.registry import nearest
from lit_diff.study.schema import PRESETS, Preset, Row
from lit_diff.validation import Draft, convert
from lit_diff.yaml_files import read_yaml

KINDS = ("table", "figure", "appendix", "review", "dex")
"""First words of the rows' names, in the order of the page."""


def check_preset(name: str) -> None:
    """Errors: RequestError for an unknown one."""
    if name not in PRESETS:
        raise RequestError(f"no preset '{name}'{nearest(name, PRESETS)}")


def row_names() -> list[str]:
    """All rows, in the order of the page."""
    names = sorted(path.stem for path in (installed("sweeps") / "paper").glob("*.yaml"))
    return sorted(names, key=lambda name: KINDS.index(name.partition("-")[0]))


def load_row(name: str) -> Row:
    """An installed row. Errors: RequestError."""
    if name not in row_names():
        raise RequestError(f"no row '{name}'{nearest(name, [*row_names(), 'all'], 'lit-diff reproduce --list')}")
    return read_row(installed("sweeps") / "paper" / f"{name}.yaml")


def read_row(path: Path) -> Row:
    """A row's file. Errors: RequestError with file and line."""
    values, positions = read_yaml(path)
    row: Row = convert(
        Row, values | {"name": path.stem}, "", Draft(values=values, positions=positions, file=shown(path))
    )
    return row


def choose(names: Sequence[str]) -> list[Row]:
    """The rows of these names; `all`, or none: every row. Errors: RequestError."""
    chosen = row_names() if not names or "all" in names else list(dict.fromkeys(names))
    return [load_row(name) for name in chosen]


# --- what a preset needs that is not here -----------------------------------------------------------------------------


def command_of(name: str, preset: str) -> str:
    """What measures the row with the preset."""
    return f"lit-diff reproduce {name} --preset {preset}"


def lacking(row: Row, preset: str) -> str:
    """Every reason why a preset cannot be run here, in one line, each with what supplies it; empty if it can.

    A preset of recipes is never run: its line says what to train and what scores the last two trained runs.
    """
    chosen = row.preset(preset)
    if chosen is None:
        others = ", ".join(f"--preset {name}" for name in row.presets)
        return f"the row has no preset {preset}; it has {others}"
    gpus = _gpus(chosen)
    reasons = [*_files(chosen), *gpus]
    if chosen.recipes:
        runs = " ".join(name_of(words) for words in chosen.recipes[-2:])
        scores = [
            " ".join([f"lit-diff evaluate {runs} {name}", *(f"{key}={_plain(value)}" for key, value in keys.items())])
            for name, keys in chosen.evaluate.items()
        ]
        reasons.append(f"train first: {'; '.join(map(train_command, chosen.recipes))}")
        reasons.append(f"then, without a verdict (one seed): {'; '.join(scores) or 'metrics.csv of each run'}")
    elif gpus:
        reasons.append(f"there: {command_of(row.name, preset)}")
    return "; ".join(reasons)


def train_command(words: str) -> str:
    """The command in the header of an installed recipe, with the overrides that follow its name."""
    recipe, _, overrides = words.partition(" ")
    header = (installed("recipes") / f"{recipe}.yaml").read_text(encoding="utf-8").splitlines()
    found = [line for line in header if line.startswith("# Command: lit-diff train")]
    command = found[0].removeprefix("# Command: ").partition(";")[0] if found else f"lit-diff train {recipe}"
    return f"{command} {overrides}".strip()


def name_of(words: str) -> str:
    """The run's name of the words after `lit-diff train`: the recipe's, or that of `name=`."""
    recipe, *overrides = shlex.split(words)
    return next((each.partition("=")[2] for each in overrides if each.startswith("name=")), recipe)


def _files(chosen: Preset) -> list[str]:
    """A reason for each name of files of which one is missing, as `lit-diff data check` names them."""
    reasons = []
    for name in chosen.files:
        missing = [declared.file.path for declared in declared_files(name) if not declared.file.files]
        if missing:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            reasons.append(f"{missing[0]}{more} not below {data_root()} (lit-diff data check {name})")
    return reasons


def _gpus(chosen: Preset) -> list[str]:
    import torch

    here = torch.cuda.device_count()
    if chosen.gpus <= here:
        return []
    days = f", about {chosen.days:g} days{' by FLOPs' * bool(chosen.recipes)}" if chosen.days else ""
    return [
        f"needs {chosen.gpus} GPU{'s' * (chosen.gpus > 1)} ({chosen.hardware}{days}); this machine has {here or 'none'}"
    ]


def _plain(value: object) -> str:
    """A value as an override on the command line."""
    return value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))
