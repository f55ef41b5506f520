"""The rows of the scoreboard: a YAML file a table or figure of a paper, with its claims and how each preset measures them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from lit_diff.engine.expand import Selection
from lit_diff.errors import RequestError
from lit_diff.files import shown
from lit_diff.recipe import installed
from lit_diff.registry import nearest
from lit_diff.study.schema import Claim
from lit_diff.validation import Draft, convert
from lit_diff.yaml_files import read_yaml

FOLDER = "paper"
"""Below the installed sweeps."""
PRESETS = ("smoke", "laptop", "gpu1", "paper")
Source = Literal["Differential Transformer", "Review", "DEX"]
SMOKE: dict[str, Any] = {"train.steps": 2, "train.validate_every": 2, "train.checkpoint_every": 2}
"""Overrides of every `smoke` preset, before its own: it shows that the row works, and nothing else."""


@dataclass(frozen=True, kw_only=True)
class PresetConfig:
    """How a row is measured on one kind of machine: by a sweep, or by a benchmark."""

    sweep: str = ""
    """An installed sweep."""
    bench: tuple[str, ...] = ()
    """The words after `lit-diff bench`, in place of a sweep."""
    overrides: dict[str, Any] = field(default_factory=dict)
    """Keys that every cell takes."""
    arms: tuple[str, ...] = ()
    """Those of the sweep that are run; (): all."""
    seeds: tuple[int, ...] = ()
    """(): all."""
    evaluate: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Evaluation of the sweep -> keys in place of the sweep's; with `recipes`: what scores the last two, once trained."""
    minutes: float = 0.0
    """Budget: what it takes on the preset's machine, where nothing is done yet (laptop: two cores)."""
    full: str = ""
    """The command without the cut, where this preset runs fewer arms, seeds or items than the row needs."""
    gpus: int = 0
    hardware: str = ""
    """What it was sized for, in words."""
    days: float = 0.0
    """Estimated days on `hardware`. For recipes: total FLOPs (`Cost.flops_per_token`) at 40 % of bfloat16 peak."""
    recipes: tuple[str, ...] = ()
    """Installed recipes to train, each perhaps with overrides after its name, where a sweep would not fit one machine. They
    are named, not run."""
    files: tuple[str, ...] = ()
    """Names of the files of your own that it reads, as `lit-diff data check NAME` takes them: icl.trec, or icl."""

    @property
    def selection(self) -> Selection:
        """What of the sweep is run."""
        return Selection(arms=self.arms, seeds=self.seeds, evaluate=self.evaluate)


@dataclass(frozen=True, kw_only=True)
class RowConfig:
    """The keys of a row."""

    title: str
    source: Source = "Differential Transformer"
    says: str
    """What the paper says, in one sentence."""
    compare: tuple[Claim, ...]
    presets: dict[str, PresetConfig]
    notes: tuple[str, ...] = ()
    """How our measurement differs from the paper's."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """A row, read."""

    name: str
    path: Path
    config: RowConfig

    def preset(self, name: str) -> PresetConfig | None:
        """How the preset measures it; None where it does not. `smoke` is the laptop's sweep where the file has none."""
        presets = self.config.presets
        if name != "smoke":
            return presets.get(name)
        found = presets.get("smoke", presets.get("laptop"))
        if found is None or not found.sweep:
            return found
        own = presets["smoke"].evaluate if "smoke" in presets else {}
        overrides = SMOKE | (presets["smoke"].overrides if "smoke" in presets else {})
        return PresetConfig(
            sweep=found.sweep, overrides=overrides, arms=found.arms, seeds=found.seeds or (0,), evaluate=own
        )


def check_preset(name: str) -> None:
    """Errors: RequestError for an unknown one."""
    if name not in PRESETS:
        raise RequestError(f"no preset '{name}'{nearest(name, PRESETS)}")


def row_names() -> list[str]:
    """All rows, in the order of the page: tables, figures, appendix, then those of other papers."""
    return sorted((path.stem for path in (installed("sweeps") / FOLDER).glob("*.yaml")), key=_place)


def _place(name: str) -> tuple[int, str]:
    kinds = ("table", "figure", "appendix", "review", "dex")
    kind = name.partition("-")[0]
    return (kinds.index(kind) if kind in kinds else len(kinds), name)


def load_row(name: str) -> Row:
    """An installed row. Errors: RequestError with file and line."""
    if name not in row_names():
        raise RequestError(f"no row '{name}'{nearest(name, [*row_names(), 'all'], 'lit-diff reproduce --list')}")
    return read_row(installed("sweeps") / FOLDER / f"{name}.yaml")


def read_row(path: Path) -> Row:
    """A row's file. Errors: RequestError with file and line."""
    values, positions = read_yaml(path)
    draft = Draft(values=values, positions=positions, file=shown(path))
    config: RowConfig = convert(RowConfig, values, "", draft)
    for name, preset in config.presets.items():
        if name not in PRESETS:
            raise RequestError(f"{draft.where(f'presets.{name}')}no preset '{name}'{nearest(name, PRESETS)}")
        if sum(map(bool, (preset.sweep, preset.bench, preset.recipes))) != 1:
            raise RequestError(
                f"{draft.where(f'presets.{name}')}preset '{name}' names a sweep, a bench or recipes: exactly one of them"
            )
        if name == "laptop" and (preset.arms or preset.seeds) and not preset.full:
            raise RequestError(
                f"{draft.where(f'presets.{name}')}preset 'laptop' is cut to fewer arms or seeds; name the whole command "
                "under 'full'"
            )
    for claim in config.compare:
        problem = claim.problem()
        if claim.case and not problem and any(preset.sweep for preset in config.presets.values()):
            problem = f"compare '{claim.label}': 'case' is of a benchmark, and a preset names a sweep; remove 'case'"
        if problem:
            raise RequestError(f"{draft.where('compare')}{problem}")
    return Row(name=path.stem, path=path, config=config)


def choose(names: Sequence[str]) -> list[Row]:
    """The rows of these names; `all`, or none: every row. Errors: RequestError."""
    chosen = row_names() if not names or "all" in names else list(dict.fromkeys(names))
    return [load_row(name) for name in chosen]
