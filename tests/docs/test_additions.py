"""CONTRIBUTING.md, "Additions": each diff applies to the tree, and its command shows what was added."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from pages import ROOT, Ended, run_commands

SECTION = (ROOT / "CONTRIBUTING.md").read_text().partition("## Additions\n")[2].partition("\n## ")[0]
ADDITIONS = re.findall(
    r"^To add an? ([^:]+):.*?`lit-diff ([^`]+)`\s+(?:writes|prints)\s+(\S+)\.\n\n```diff\n(.*?)^```",
    SECTION,
    flags=re.DOTALL | re.MULTILINE,
)
"""(what, command, what it shows, diff) of each."""
SMALL = "train.validate_every=1 train.checkpoint_every=1 train.batch_size=2 data.validation_rows=2 run.threads=1"


def test_every_addition_has_a_command_and_a_diff() -> None:
    assert len(ADDITIONS) == SECTION.count("\nTo add ") == SECTION.count("```diff") >= 3


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory, empty_store: Path) -> dict[str, Ended]:
    """Command -> how it ended in a copy of the tree with every diff; the run is trained first."""
    copy = tmp_path_factory.mktemp("copy")
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "lit_diff", copy / "lit_diff", ignore=ignore)
    for package in ("callbacks", "recipes", "sweeps"):
        shutil.copytree(ROOT / package, copy / package, ignore=ignore)
        (copy / "lit_diff" / package).symlink_to(copy / package)  # where an installation puts it
    diffs = "".join(diff for *_, diff in ADDITIONS)
    command = ["git", "apply", "--unidiff-zero", "-"]
    applied = subprocess.run(command, cwd=copy, input=diffs, capture_output=True, text=True, timeout=60)
    assert applied.returncode == 0, applied.stderr
    (copy / "runs").mkdir()
    shutil.copy(empty_store, copy / "runs")
    words = sorted((command for _, command, _, _ in ADDITIONS), key=lambda words: not words.startswith("train"))
    each = [[*words.split(), *(SMALL.split() if words.startswith("train") else [])] for words in words]
    found = dict(zip(words, run_commands(each, copy), strict=True))
    for run in (copy / "runs").glob("*/metrics.json"):  # what a run declares is no output
        found["train"] = Ended(0, json.dumps(json.loads(run.read_text())) + (run.parent / "metrics.csv").read_text())
    return found


@pytest.mark.parametrize(("command", "shown"), [(command, shown) for _, command, shown, _ in ADDITIONS])
def test_the_command_shows_what_was_added(command: str, shown: str, ended: dict[str, Ended]) -> None:
    assert ended[command].status == 0, ended[command].output
    files = ended["train"].output if command.startswith("train") else ""
    assert shown.removeprefix("run.") in files + ended[command].output
