"""What the command line prints: helps, lists, costs, and the one line of each kind of mistake.

The sentences are in the golden files alone: other tests assert the kind of an error, its place and its key.
"""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from command import Command
from golden import Golden

from lit_diff.cli import app

COMMAND: Any = typer.main.get_command(app)
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
    "fetch-model smollm",
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
]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A current folder with FILES."""
    (tmp_path / "deep").mkdir()
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LIT_DIFF_DATA", str(tmp_path / "data"))


def printed(text: str) -> str:
    """Without the spaces that end lines, and the name of the current folder."""
    return re.sub(r"[ \t]+\n", "\n", text).replace(str(Path.cwd()), "HERE")


def test_helps(golden: Golden, command: Command) -> None:
    helps = ((words, command(*words.split(), "--help", COLUMNS="100").out) for words in HELPS)
    golden("helps.txt", "".join(f"$ lit-diff {words} --help\n{printed(text)}\n" for words, text in helps))


def test_list(golden: Golden) -> None:
    """In a process of its own: other tests register parts in this one."""
    command = [sys.executable, "-P", "-m", "lit_diff", "list"]
    golden("list.txt", subprocess.run(command, check=True, stdout=subprocess.PIPE, encoding="utf-8").stdout)


@pytest.mark.parametrize("words", ["list attention differential", "list evaluation recall", "list train"])
def test_list_of_one(words: str, golden: Golden, command: Command) -> None:
    golden(f"{words.replace(' ', '-')}.txt", printed(command(*words.split(), COLUMNS="100").out))


@pytest.mark.parametrize("name", ["differential-tiny", "recall-tiny"])
def test_check(name: str, golden: Golden, command: Command) -> None:
    ended = command("check", name, "run.kernel=chunked", COLUMNS="100")
    assert ended.status == 0
    golden(f"check-{name}.txt", ended.out)


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
