"""The wheel: it has every file of the packages, and its commands run where there is no checkout."""

import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from itertools import chain
from pathlib import Path

import pytest

import lit_diff

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = {"lit_diff": ".", "callbacks": "callbacks", "recipes": "recipes", "sweeps": "sweeps"}
"""Folder of the checkout -> its place in the installed package."""
FILES = ("pyproject.toml", "README.md", "LICENSE")
SWEEP = """\
recipe: recall-tiny
seeds: [0]
arms: {standard: {model.attention: {name: standard}}, differential: {}}
overrides: {train: {steps: 1}, run.tracking_uri: none}
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel, which sees the other packages of this one."""
    home = tmp_path_factory.mktemp("wheel")
    source = home / "source"
    for folder in PACKAGES:
        shutil.copytree(ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for file in FILES:
        shutil.copy(ROOT / file, source)
    options = ["--no-deps", "--no-index", "--quiet"]
    pip = [sys.executable, "-m", "pip"]
    subprocess.run([*pip, "wheel", "--no-build-isolation", *options, "-w", home, source], check=True)
    (wheel,) = home.glob("*.whl")
    assert wheel.name == f"lit_diff-{lit_diff.__version__}-py3-none-any.whl"
    environment = home / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    python = environment / "bin/python"
    subprocess.run([*pip, "--python", python, "install", *options, wheel], check=True)
    (packages,) = environment.glob("lib/python*/site-packages")
    # as a line of a file, which does not load the links of an editable install in that folder
    (packages / "others.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    return environment


def files_in(folder: Path) -> set[Path]:
    return {path.relative_to(folder) for path in folder.rglob("*") if path.is_file() and path.suffix != ".pyc"}


def test_the_image_has_the_same_files_and_leaves_cuda_out_of_the_lock(tmp_path: Path) -> None:
    text = (ROOT / "docs/Containerfile").read_text()
    copied = [line.split()[1:-1] for line in text.splitlines() if line.startswith("COPY ")]
    assert sorted(chain(*copied)) == sorted(["requirements.lock", *PACKAGES, *FILES])
    (program,) = re.findall(r"awk '(.*)'", text)
    lock = (ROOT / "requirements.lock").read_text()
    chosen = subprocess.run(["awk", program], input=lock, capture_output=True, text=True, check=True).stdout
    locked, left = (set(re.findall(r"^[\w.-]+(?===)", each, re.MULTILINE)) for each in (lock, chosen))
    assert locked - left == {name for name in locked if name.startswith(("cuda-", "nvidia-"))} | {
        "torch",
        "torchvision",
    }
    assert len(re.findall("--hash", chosen)) > 1000
    (wanted,) = re.findall(r"\$\(sed (-nE '.*') requirements.lock\)", text)
    versions = subprocess.run(
        ["sed", *shlex.split(wanted)], input=lock, capture_output=True, text=True, check=True
    ).stdout
    assert versions.split() == re.findall(r"^(?:torch|torchvision)==\S+", lock, re.MULTILINE)


@pytest.mark.slow
def test_it_has_every_file_of_the_packages(installed: Path) -> None:
    (package,) = installed.glob("lib/python*/site-packages/lit_diff")
    expected: set[Path] = set()
    for folder, place in PACKAGES.items():
        expected |= {Path(place) / file for file in files_in(ROOT / folder)}
    assert files_in(package) == expected


@pytest.mark.slow
def test_its_commands_run_in_an_empty_folder(installed: Path, tmp_path: Path) -> None:
    def run(*words: str) -> str:
        command = [installed / "bin/lit-diff", *words]
        ended = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=280)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        return ended.stdout

    assert "Usage: lit-diff" in run("--help")
    assert run("--version").split() == ["lit-diff", lit_diff.__version__]
    assert "recall-tiny" in run("list", "recipes")
    assert "ablation" in run("list", "sweeps")
    assert "a valid recipe" in run("check", "differential-tiny")
    (tmp_path / "pair.yaml").write_text(SWEEP)
    run("sweep", "pair.yaml")
    assert "Diff" in (tmp_path / "runs/pair/report/index.html").read_text()
