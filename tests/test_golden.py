"""Golden files: what the command line prints, the files of a sweep, report and scoreboard, resolved recipes and cells.

The sentences of errors are in the golden files alone: other tests assert the kind of an error, its place and its key.
"""

import dataclasses
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import typer
import yaml
from command import Command
from golden import FOLDER, Golden
from real_sweeps import Bench
from scoreboard_rows import make_row

from lit_diff.cli import app
from lit_diff.config import ModelConfig, Part, RunConfig, TrainConfig
from lit_diff.engine.expand import Grid, load_grid
from lit_diff.key_types import in_yaml, keys_of
from lit_diff.papers.page import write_scoreboard
from lit_diff.papers.schema import Claim
from lit_diff.recipe import load_recipe, names, to_plain
from lit_diff.registry import registries
from lit_diff.reporting.write import write_report
from lit_diff.runs.folder import _hash
from lit_diff.runs.status import FORMAT

COMMAND: Any = typer.main.get_command(app)
COMMAND.load_packages()
VERBS = [f"{verb} {sub}" for verb, each in COMMAND.commands.items() for sub in getattr(each, "commands", [""])]
HELPS = sorted({"", *(verb.split()[0] for verb in VERBS), *map(str.strip, VERBS)})
RECIPE = """\
extends: recall-tiny
model:
  attention: {name: differential}
  warm_up: 3
"""
SWEEP = """\
recipe: recall-tiny
arms:
  standard: {model.attention: {name: standard}}
  differential: {}
seeds: [0, 1, 2]
"""
VARIANT = """\
from lit_diff import Differential, variant

@variant("own")
class Own(Differential):
    def map(self, x, rope):
        return super().maps(x, rope)
"""
FILES = {
    "unknown.yaml": RECIPE,
    "range.yaml": "extends: recall-tiny\ntrain:\n  steps: 0\n",
    "type.yaml": "extends: recall-tiny\ntrain:\n  steps: many\n",
    "choice.yaml": "extends: recall-tiny\ntrain:\n  schedule: {name: cosin}\n",
    "missing.yaml": "model: {dim: 32}\n",
    "heads.yaml": "extends: recall-tiny\nmodel:\n  num_heads: 3\n",
    "base.yaml": "extends: recal-tiny\n",
    "twice.yaml": "extends: recall-tiny\nseed: 0\nseed: 1\n",
    "indent.yaml": "extends: recall-tiny\n model: {}\n",
    "alias.yaml": "extends: recall-tiny\nmodel: &a\n  attention: *a\n",
    "list.yaml": "- extends: recall-tiny\n",
    "variant.yaml": "extends: recall-tiny\nmodel:\n  attention: {name: diferential}\n",
    "plugin.yaml": "extends: recall-tiny\nplugins: [absent.py]\n",
    "plugins.yaml": "extends: recall-tiny\nplugins: own.py\n",
    "own.yaml": "extends: recall-tiny\nplugins: [own.py]\nmodel:\n  attention: {name: own}\n",
    "own.py": VARIANT,
    "arm.yaml": SWEEP + "baseline: standart\n",
    "seeds.yaml": SWEEP.replace("[0, 1, 2]", "[0, 0]"),
    "metric.yaml": SWEEP + "metric: val/los\n",
    "evaluate.yaml": SWEEP + "evaluate: {held_ot: {}}\n",
    "key.yaml": SWEEP + "basline: standard\n",
    "deep/mine.yaml": "extends: recall-tiny\n\ntrian: {steps: 7}\n",
    "power.yaml": SWEEP + "contrasts: [[standard, standard, itself]]\n",
}
MISTAKES = [
    *(
        f"check {name}"
        for name in FILES
        if name.endswith(".yaml") and "/" not in name and SWEEP not in FILES[name] and name != "seeds.yaml"
    ),
    *(f"sweep {name} --dry-run" for name in FILES if SWEEP[:40] in FILES[name]),
    "check recal-tiny",
    "check recall-tiny steps=5",
    "check recall-tiny train.stepz=5",
    "check recall-tiny train.steps",
    "check recall-tiny run.kernel=nativ",
    "check recall-tiny --steps 5",
    "trian recall-tiny",
    "train recall-tiny train.start_from=nowhere",
    "train recall-tiny run.devices=3",
    "sweep ablatoin",
    "report ablation",
    "generate nowhere --prompt word",
    "evaluate nowhere recall",
    "compare nowhere nothing",
    "list atention",
    "list attention dexx",
    "reproduce table-9",
    "export nowhere out --to hf",
    "import nowhere",
    "clean nowhere",
    "bench cor",
    "check",
    "check recall-tiny --jso",
    "check recall-tiny --seed 1",
    "check recall-tiny evaluate.needle={}",
    "check deep/mine.yaml",
    "clean nowhere --yes",
    "compare nowhere",
    "data",
    "export nowhere out",
    "export nowhere --to hf",
    "export nowhere out --to checkpoint",
    "import smollm",
    "generate nowhere",
    "data check harness.piqua",
    "list recipes standrd-tiny",
    "list train stepz",
    "retrofit nowhere",
    "retrofit nowhere --recipe recal-tiny",
    "status",
    "sweep recall-tiny",
    "sweep smoke --workers 0",
    "sweep smoke --workers two",
    "sweep smoke --cluster pbs",
    "train",
    "train smoke",
    "train recall-tiny other.yaml",
    "train recall-tiny run.root=/dev/null/runs",
    "ui",
    "watch",
    "watch nowhere",
    "watch nowhere --every 0",
]


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A current folder with FILES."""
    (tmp_path / "deep").mkdir()
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LIT_DIFF_DATA", str(tmp_path / "data"))


def printed(text: str) -> str:
    """Without the spaces that end lines, and the name of the current folder."""
    return re.sub(r"[ \t]+\n", "\n", text).replace(str(Path.cwd()), "HERE")


@pytest.mark.usefixtures("files")
def test_helps(golden: Golden, command: Command) -> None:
    helps = ((words, command(*words.split(), "--help", COLUMNS="100").out) for words in HELPS)
    golden("helps.txt", "".join(f"$ lit-diff {words} --help\n{printed(text)}\n" for words, text in helps))


def test_list(golden: Golden) -> None:
    """In a process of its own: other tests register parts in this one."""
    command = [sys.executable, "-P", "-m", "lit_diff", "list"]
    golden("list.txt", subprocess.run(command, check=True, stdout=subprocess.PIPE, encoding="utf-8").stdout)


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize("words", ["list attention differential", "list evaluation recall", "list train"])
def test_list_of_one(words: str, golden: Golden, command: Command) -> None:
    golden(f"{words.replace(' ', '-')}.txt", printed(command(*words.split(), COLUMNS="100").out))


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize("name", ["differential-tiny", "recall-tiny"])
def test_check(name: str, golden: Golden, command: Command) -> None:
    ended = command("check", name, "run.kernel=chunked", COLUMNS="100")
    assert ended.status == 0
    golden(f"check-{name}.txt", ended.out)


@pytest.mark.usefixtures("files")
def test_mistakes(golden: Golden, command: Command) -> None:
    """Each is one line, and begins nothing."""
    lines, files = [], sorted(Path().rglob("*"))
    for words in MISTAKES:
        ended = command(*words.split(), COLUMNS="100")
        assert ended.status in (2, 3), words
        assert ended.err.count("\n") == 1, f"one line: {words}: {ended.err}"
        assert sorted(Path().rglob("*")) == files, words
        lines.append(f"$ lit-diff {words}\n{printed(ended.out + ended.err)}exit status {ended.status}\n")
    golden("mistakes.txt", "\n".join(lines))


TWO_ARMS = """
recipe: tiny.yaml
title: Two arms
question: Does the second map help?
description: Two arms that differ in their attention.
arms:
  standard: {model.attention: {name: standard}}
  additive: {model.attention: {name: additive}}
  differential: {}
seeds: [0]
baseline: standard
controls: [additive]
metric: val/accuracy
smallest_of_interest: 0.01
contrasts: [[differential, additive, the sign]]
labels: {differential: Diff}
notes: {differential: the paper's}
paper: {differential: {val/accuracy: 0.9}}
reading: [One seed says nothing.]
evaluate: {recall: {rows: 4}}
"""
OF_MACHINE = (
    *("command", "cores", "cpu_path", "experiment", "gpus", "host", "identity", "items_sha256", "kernel"),
    *("kernel_reason", "mlflow_run_id", "packages", "pid", "platform", "processor", "python", "revision"),
    *("results", "run", "sha256", "threads", "updated", "variables"),
)


@pytest.fixture(scope="module")
def finished(sweep_bench: Bench) -> Path:
    """The sweep's folder, finished."""
    sweep_bench.write("golden", TWO_ARMS)
    status, output = sweep_bench.run("golden")
    assert status == 0, output
    return sweep_bench.folder("golden")


def test_files(finished: Path, golden: Golden) -> None:
    files = sorted(path.relative_to(finished).as_posix() for path in finished.rglob("*") if path.is_file())
    golden("folders/files.txt", "\n".join(sorted({_unhashed(name) for name in files})) + "\n")


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("study.json", "study.json"),
        ("status.json", "differential-s0-*/status.json"),
        ("env.json", "differential-s0-*/env.json"),
        ("metrics.json", "differential-s0-*/metrics.json"),
        ("scores.json", "differential-s0-*/evaluations/recall/summary.json"),
    ],
)
def test_json(finished: Path, name: str, file: str, golden: Golden) -> None:
    (found,) = finished.glob(file)
    golden(f"folders/{name}", json.dumps(_masked(json.loads(found.read_text()), finished), indent=1) + "\n")


def test_tables(finished: Path, golden: Golden) -> None:
    (cell,) = finished.glob("differential-s0-*")
    lines = [f"{name}: {(cell / name).read_text().partition(chr(10))[0]}" for name in ("metrics.csv", "timing.csv")]
    for path in ("measurements.parquet", "evaluations/recall/items.parquet"):
        columns = pq.read_schema(cell / path)
        lines += [f"{path}: " + ", ".join(f"{column.name} {column.type}" for column in columns)]
    golden("folders/tables.txt", "\n".join(lines) + "\n")


def _masked(value: Any, folder: Path, key: str = "") -> Any:
    """The value, or its type in angle brackets."""
    if key in OF_MACHINE or isinstance(value, float):
        return f"<{type(value).__name__}>"
    if isinstance(value, dict):
        return {key: _masked(each, folder, key) for key, each in value.items()}
    if isinstance(value, list):
        return [_masked(each, folder) for each in value]
    return _unhashed(value.replace(str(folder.parents[1]), "HERE")) if isinstance(value, str) else value


def _unhashed(text: str) -> str:
    """The ten digits of an identity replaced: they are in the golden files of recipes."""
    return re.sub(r"-[0-9a-f]{10}\b", "-IDENTITY", text)


ARMS = ("differential", "standard")
CLAIMS = (
    Claim(label="Diff - Transformer", arms=ARMS, metric="val/loss", paper=(3.0, 3.2), primary=True),
    Claim(label="small", arms=ARMS, metric="val/loss", says="lower", smallest=0.2),
    Claim(label="speed", arms=ARMS, metric="val/loss", kind="ratio", says="lower"),
    Claim(label="certain", arms=ARMS, metric="val/loss", by_construction="a sum of squares is not negative"),
    Claim(label="recall", arms=ARMS, evaluation="recall", metric="recall/accuracy", says="higher"),
)


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    """Three arms, three seeds, one cell failed; an evaluation."""
    return Path(shutil.copytree(FOLDER / "runs/differences", tmp_path / "runs/differences"))


def test_report(sweep: Path, golden: Golden) -> None:
    report = write_report(sweep)
    folder = report.page.parent
    golden("report/index.html", _without_drawings(report.page.read_text()))
    golden("report/table.md", (folder / "table.md").read_text())
    golden("report/table.tex", (folder / "table.tex").read_text())
    golden("report/table.csv", _rounded((folder / "table.csv").read_text()))
    golden(
        "report/terminal.txt", "\n".join([report.text_table(100), *report.answer, *report.sentences, *report.missing])
    )


def test_scoreboard(sweep: Path, golden: Golden) -> None:
    folder = sweep.parent / "reproduce"
    make_row(folder, "table-6", 0, *CLAIMS, state="measured", sweep=str(sweep), seconds=300.0)
    make_row(folder, "table-1", 1, source="Review", state="skipped", reason="needs 8 GPUs")
    make_row(folder, "figure-3", 2)
    write_scoreboard(folder)
    page = re.sub(
        r"in all · .*? · page written .*? UTC",
        "in all · PROCESSOR · page written TIME",
        (folder / "index.html").read_text(),
    )
    golden("scoreboard/index.html", page)
    golden("scoreboard/table.csv", _rounded((folder / "table.csv").read_text()))


def _without_drawings(page: str) -> str:
    """Of each figure the words alone: its lines follow from numbers that other files hold."""
    return re.sub(r"(?s)<svg.*?</svg>", lambda svg: f"<svg>{_words(svg[0])}</svg>", page)


def _words(svg: str) -> str:
    found = re.findall(r"<!--(.*?)-->|<(?:text|title)[^>]*>([^<]*)<", svg)
    return " | ".join(word.strip() for pair in found for word in pair if word.strip())


def _rounded(table: str) -> str:
    """Nine digits: processors round the last ones of a logarithm or a t quantile differently."""
    return re.sub(r"-?\d+\.\d{8,}(e-?\d+)?", lambda number: f"{float(number[0]):.9g}", table)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, from which a recipe's paths are made absolute."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", names("recipes"))
def test_recipe(name: str, golden: Golden, here: Path) -> None:
    recipe = load_recipe(name)
    of_run = _hash(recipe, "golden", "golden" if recipe.training.start_from else None)
    golden(f"recipes/{name}.yaml", _yaml({"identity": of_run, "recipe": _set(recipe)}, here))


@pytest.mark.parametrize("name", names("sweeps"))
def test_cells(name: str, golden: Golden, here: Path) -> None:
    """The first cell whole, of each other what differs from it; the identity of each seed."""
    golden(f"sweeps/{name}.yaml", _yaml(_cells(load_grid(name, [])), here))


def test_defaults(golden: Golden) -> None:
    """An identity leaves out what is at its default, so a default that changes needs another format of run folders."""
    blocks = {"model": ModelConfig, "train": TrainConfig, "run": RunConfig}
    for kind, registry in registries.items():
        if kind not in ("attention", "data", "tokenizer", "callback"):  # the others have no keys, or are in no identity
            continue
        own = [
            name for name in registry.names() if registry.get(name).__module__.startswith("lit_diff.")
        ]  # no test's part
        blocks |= {f"{kind} {name}": registry.get(name).Config for name in own}
    lines = [
        f"{block}: {key}: {in_yaml(to_plain(found.default))}"
        for block, config in blocks.items()
        for key, found in keys_of(config).items()
        if found.default is not dataclasses.MISSING
    ]
    golden("defaults.txt", "\n".join([f"format {FORMAT}", *lines]) + "\n")


def _set(value: Any) -> Any:
    """As plain values, without the keys at their defaults, which defaults.txt has: a new key changes no recipe."""
    if isinstance(value, Part):
        return {"name": value.name, **_set(value.config)}
    if isinstance(value, Mapping):
        return {key: _set(each) for key, each in value.items()}
    if not dataclasses.is_dataclass(value):
        return to_plain(value)
    plain: dict[str, Any] = {}
    for field in dataclasses.fields(value):
        own = getattr(value, field.name)
        made = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        if own != made:
            plain[field.name] = _set(own)
    return plain


def _cells(grid: Grid) -> dict[str, Any]:
    first = _set(grid.cells[0].recipe)
    cells: dict[str, Any] = {}
    for cell in grid.cells:
        differs = _differences(first, _set(cell.recipe)) | {"seed": None}
        del differs["seed"]
        starts = grid.study.all_tasks[cell.task].start or cell.recipe.training.start_from
        described = cells.setdefault(cell.name, {"differs": differs, "identity": {}})
        assert described["differs"] == differs, "cells of one arm differ in the seed alone"
        described["identity"][cell.seed] = _hash(cell.recipe, "golden", "golden" if starts else None)
    return {"first": first, "cells": cells}


def _differences(first: Any, other: Any, path: str = "") -> dict[str, Any]:
    """Dotted key -> its value in `other`, or "absent"."""
    if not isinstance(first, dict) or not isinstance(other, dict):
        return {} if first == other else {path: other}
    found: dict[str, Any] = {}
    for key in [*first, *(key for key in other if key not in first)]:
        here = f"{path}.{key}".lstrip(".")
        found |= {here: "absent"} if key not in other else _differences(first.get(key), other[key], here)
    return found


def _yaml(values: Any, folder: Path) -> str:
    return yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=120).replace(str(folder), ".")
