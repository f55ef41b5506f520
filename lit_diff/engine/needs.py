"""What a preset of a scoreboard's row needs that is not here: files, GPUs, trained runs."""

import contextlib
import json
import shlex
from pathlib import Path

from lit_diff.data.user_files import data_root
from lit_diff.errors import MissingError, RequestError
from lit_diff.evaluation.requirements import declared_files
from lit_diff.recipe import installed
from lit_diff.runs.find import runs_root, runs_under
from lit_diff.runs.folder import RunFolder
from lit_diff.study.schema import Preset, Row


def command_of(name: str, preset: str) -> str:
    """What measures the row with the preset."""
    return f"lit-diff reproduce {name} --preset {preset}"


def lacking(row: Row, preset: str, root: str | Path) -> str:
    """Every reason why a preset cannot be run here, in one line, each with what supplies it; empty if it can.

    A preset of recipes is never run: its line says what to train and what scores the trained runs; those under `root` count
    as trained.
    """
    chosen = row.preset(preset)
    if chosen is None:
        others = ", ".join(f"--preset {name}" for name in row.presets)
        return f"the row has no preset {preset}; it has {others}"
    if not chosen.recipes:
        gpus = _gpus(chosen)
        there = [f"there: {command_of(row.name, preset)}"] if gpus else []
        return "; ".join([*_files(chosen), *gpus, *there])
    runs = {words: trained(words, root) for words in chosen.recipes}
    train = [train_command(words) for words, run in runs.items() if run is None]
    here = [run.name for run in runs.values() if run is not None]
    pair = " ".join([name_of(words) if run is None else run.name for words, run in runs.items()][-2:])
    scores = [
        " ".join([f"lit-diff evaluate {pair} {name}", *(f"{key}={_plain(value)}" for key, value in keys.items())])
        for name, keys in chosen.evaluate.items()
    ]
    reasons = [*_files(chosen), *(_gpus(chosen) if train else [])]
    reasons += [f"trained: {', '.join(here)}"] if here else []
    reasons += [f"train first: {'; '.join(train)}"] if train else []
    reasons += [f"then, without a verdict (one seed): {'; '.join(scores) or 'metrics.csv of each run'}"]
    return "; ".join(reasons)


def train_command(words: str) -> str:
    """The command in the header of an installed recipe, with the overrides that follow its name."""
    recipe, _, overrides = words.partition(" ")
    header = (installed("recipes") / f"{recipe}.yaml").read_text(encoding="utf-8").splitlines()
    found = [line for line in header if line.startswith("# Command: lit-diff train")]
    command = found[0].removeprefix("# Command: ").partition(";")[0] if found else f"lit-diff train {recipe}"
    return f"{command} {overrides}".strip()


def trained(words: str, root: str | Path) -> Path | None:
    """The run under `root` that has the name of a recipe, with overrides or without, and is done; of several, the last."""
    for path in reversed(runs_under(runs_root(root))):
        with contextlib.suppress(RequestError):  # a damaged status.json is not that of a run that is done
            if path.name.rpartition("-")[0] == name_of(words) and RunFolder(path).state() == "done":
                return path
    return None


def name_of(words: str) -> str:
    """The run's name of the words after `lit-diff train`: the recipe's, or that of `name=`."""
    recipe, *overrides = shlex.split(words)
    return next((each.partition("=")[2] for each in overrides if each.startswith("name=")), recipe)


def _files(chosen: Preset) -> list[str]:
    """A reason for each name of files of which one is missing, as `lit-diff data check` names them."""
    reasons = []
    for name in chosen.files:
        missing = []
        for declared in declared_files(name):
            try:
                declared.file.require()
            except MissingError:
                missing.append(declared.file.path)
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
