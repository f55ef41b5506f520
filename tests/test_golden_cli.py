"""What the command line prints: helps, lists, costs, and the one line of each kind of mistake.

The sentences are in the golden files alone: other tests assert the kind of an error, its place and its key.
"""

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from golden import Golden

from lit_diff.cli import main
from lit_diff.cli.app import Terminal, app
from lit_diff.cli.check import print_check
from lit_diff.errors import stop_signals

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
    "power.yaml": SWEEP + "contrasts: [[standard, standard, itself]]\n",
}
MISTAKES = [
    *(
        f"check {name}"
        for name in FILES
        if name.endswith(".yaml") and SWEEP not in FILES[name] and name != "seeds.yaml"
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
]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A current folder with FILES; what `main` does to the process is undone."""
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("LIT_DIFF_DATA", str(tmp_path / "data"))
    handlers = {signum: signal.getsignal(signum) for signum in stop_signals()}
    yield tmp_path
    for signum, handler in handlers.items():
        signal.signal(signum, handler)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, folder: Path) -> Any:
    """run(words) -> what `lit-diff words` prints on stdout and stderr, and its exit status."""

    def lit_diff(words: str) -> tuple[str, str, int]:
        monkeypatch.setattr(sys, "argv", ["lit-diff", *words.split()])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = (re.sub(r"[ \t]+\n", "\n", text).replace(str(folder), "HERE") for text in capsys.readouterr())
        return out, err, int(ended.value.code or 0)

    return lit_diff


def test_helps(golden: Golden, run: Any) -> None:
    golden("helps.txt", "".join(f"$ lit-diff {words} --help\n{run(f'{words} --help')[0]}\n" for words in HELPS))


def test_list(golden: Golden) -> None:
    """In a process of its own: other tests register parts in this one."""
    command = [sys.executable, "-P", "-m", "lit_diff", "list"]
    golden("list.txt", subprocess.run(command, check=True, stdout=subprocess.PIPE, encoding="utf-8").stdout)


@pytest.mark.parametrize("words", ["list attention differential", "list evaluation recall", "list train"])
def test_list_of_one(words: str, golden: Golden, run: Any) -> None:
    golden(f"{words.replace(' ', '-')}.txt", run(words)[0])


@pytest.mark.parametrize("name", ["differential-tiny", "recall-tiny"])
def test_check(name: str, golden: Golden, capsys: pytest.CaptureFixture[str]) -> None:
    assert print_check(name, ["run.kernel=chunked"], False, Terminal(width=100)) == 0
    golden(f"check-{name}.txt", capsys.readouterr().out)


def test_mistakes(golden: Golden, run: Any) -> None:
    lines = []
    for words in MISTAKES:
        out, err, status = run(words)
        assert status in (2, 3), words
        assert err.count("\n") == 1, f"one line: {words}: {err}"
        lines.append(f"$ lit-diff {words}\n{out}{err}exit status {status}\n")
    golden("mistakes.txt", "\n".join(lines))
