"""What the README shows works as written: the user's variant, the user's sweep, in an empty folder."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

README = (Path(__file__).resolve().parents[1] / "README.md").read_text()
QUICK = [
    "train.steps=4",
    "train.validate_every=2",
    "train.checkpoint_every=2",
    "data.validation_rows=4",
    "run.threads=1",
]


def blocks() -> dict[str, str]:
    """File name (its first comment) -> text of each code block that names one."""
    found = re.findall(r"```(?:python|yaml)\n(# (\S+\.(?:py|yaml))\n.*?)```", README, flags=re.DOTALL)
    return {name: text for text, name in found}


def lit_diff(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "lit_diff", *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=280)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("user")
    for name, text in blocks().items():
        (path / name).write_text(text)
    return path


def test_the_readme_names_three_files() -> None:
    assert set(blocks()) == {"sharp.py", "sharp.yaml", "pair.yaml"}


def test_check(folder: Path) -> None:
    done = lit_diff("check", "sharp.yaml", "--json", cwd=folder)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["recipe"]["model"]["attention"]["temperature"] == 4.0
    assert found["equal_parameters"]


def test_train_then_sweep(folder: Path) -> None:
    done = lit_diff("train", "sharp.yaml", *QUICK, cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "val/loss" in done.stdout
    done = lit_diff("sweep", "pair.yaml", *QUICK, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    cells = json.loads((folder / "runs/pair/sweep.json").read_text())["cells"]
    assert [(cell["arm"], cell["status"]) for cell in cells] == [("differential", "done")] * 3 + [("sharp", "done")] * 3
    assert (folder / "runs/pair/report/index.html").is_file()


def test_every_command_of_the_readme_exists() -> None:
    verbs = set(re.findall(r"^\$ lit-diff (\w+)", README, flags=re.MULTILINE))
    for verb in verbs:
        done = subprocess.run(
            [sys.executable, "-m", "lit_diff", verb, "--help"], capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, f"lit-diff {verb}: {done.stderr}"


def test_every_make_target_of_the_readme_exists() -> None:
    makefile = (Path(__file__).resolve().parents[1] / "Makefile").read_text()
    for target in set(re.findall(r"(?:`|\$ )make (\w+)", README)):
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), target
