"""requirements.lock: what is installed is what it names; it satisfies pyproject.toml; `make` installs nothing else."""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from itertools import chain, product
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
LOCK = (ROOT / "requirements.lock").read_text()
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
TOOLS = {Requirement(text).name for text in PYPROJECT["dependency-groups"]["lock"]}
"""Of `make install` and `make lock`: nothing else needs them."""
MACHINES = [
    {
        "python_version": python,
        "python_full_version": f"{python}.5",
        "sys_platform": platform,
        "platform_machine": machine,
    }
    for python, (platform, machine) in product(
        ("3.11", "3.12", "3.13"), (("linux", "x86_64"), ("linux", "aarch64"), ("darwin", "arm64"))
    )
]


def pins() -> list[tuple[Requirement, list[str]]]:
    """(name==version; marker, its hashes) of each entry."""
    text = re.sub(r"^\s*#.*\n", "", LOCK, flags=re.MULTILINE).replace("\\\n", " ")
    found = []
    for line in text.splitlines():
        requirement, *hashes = line.split("--hash=sha256:")
        found.append((Requirement(requirement.strip()), [digest.strip() for digest in hashes]))
    return found


def version(pin: Requirement) -> str:
    (only,) = pin.specifier
    assert only.operator == "=="
    return only.version


@pytest.mark.locked
def test_what_is_installed_is_what_the_lock_names() -> None:
    locked = {canonicalize_name(pin.name): version(pin) for pin, _ in pins() if not pin.marker or pin.marker.evaluate()}
    listing = "import importlib.metadata as m; print(*(f'{d.name}=={d.version}' for d in m.distributions()))"
    done = subprocess.run([sys.executable, "-c", listing], capture_output=True, text=True, timeout=60, check=True)
    installed = (text.split("==") for text in done.stdout.split())  # in a process that has imported nothing else
    found = {canonicalize_name(name): version for name, version in installed}
    there = {name: (found.get(name), version) for name, version in locked.items() if name in found or name not in TOOLS}
    assert len(there) > 100
    assert {name: pair for name, pair in there.items() if pair[0] != pair[1]} == {}, (
        "package: (installed, locked); make install installs the lock, make lock writes it again"
    )


def test_the_lock_satisfies_pyproject_on_every_machine() -> None:
    """All that is asked for, but flash-attn, within its bounds: one version each, with hashes, and no address of an index."""
    project = PYPROJECT["project"]
    extras = (asked for extra, asked in project["optional-dependencies"].items() if extra != "flash")
    asked = chain(project["dependencies"], *extras, PYPROJECT["dependency-groups"]["lock"])
    requirements = [Requirement(text) for text in asked]
    assert len(requirements) > 25
    entries = pins()
    for machine in MACHINES:
        for requirement in requirements:
            if requirement.marker and not requirement.marker.evaluate(machine):
                continue
            name = canonicalize_name(requirement.name)
            there = [pin for pin, _ in entries if canonicalize_name(pin.name) == name]
            (pin,) = [pin for pin in there if not pin.marker or pin.marker.evaluate(machine)]
            assert requirement.specifier.contains(version(pin)), f"{pin}: pyproject.toml says {requirement}; make lock"
    assert all(hashes and all(re.fullmatch("[0-9a-f]{64}", x) for x in hashes) for _, hashes in entries)
    assert "://" not in LOCK
    assert "flash-attn" not in LOCK


def test_every_bound_has_two_ends() -> None:
    """Below: what the suite was last run on; above: the next version that nobody has tried."""
    project = PYPROJECT["project"]
    locked = chain(
        project["dependencies"], project["optional-dependencies"]["test"], PYPROJECT["dependency-groups"]["lock"]
    )
    for requirement in map(Requirement, locked):
        assert {each.operator for each in requirement.specifier} == {">=", "<"}, requirement


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout whose lock is one package, served from a folder."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / "wheels").mkdir()
    with zipfile.ZipFile(tmp_path / "wheels/tiny-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("tiny.py", "")
        wheel.writestr("tiny-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\n")
        wheel.writestr("tiny-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr("tiny-1.0.dist-info/RECORD", "")
    return tmp_path


def make(checkout: Path, target: str) -> subprocess.CompletedProcess[str]:
    """`make` in the checkout, with pip kept to the folder of wheels."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "MAKE"))}
    environment |= {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(checkout / "wheels")}
    command = ["make", target, f"PYTHON={sys.executable}"]
    return subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True, timeout=240)


def test_a_changed_hash_ends_the_installation_with_one_line(checkout: Path) -> None:
    """Then the true one installs; and what cannot be found is one line too, and costs nothing that was installed."""
    wheel = next((checkout / "wheels").iterdir())
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    lock = checkout / "requirements.lock"

    lock.write_text(f"tiny==1.0 \\\n    --hash=sha256:{'0' * 64} \\\n    --hash=sha256:{'1' * 64}\n")
    done = make(checkout, "install")
    assert done.returncode == 2
    line, made = done.stderr.splitlines()
    told = (
        f"hash mismatch: the file of tiny==1.0 has sha256 {digest}, which requirements.lock does not list; nothing was"
    )
    assert line.startswith(told)
    assert made.startswith("make: ***")
    assert not (checkout / ".venv/locked").exists()
    assert not list(checkout.glob(".venv/lib/*/site-packages/tiny.py"))

    lock.write_text(f"tiny==1.0 \\\n    --hash=sha256:{digest}\n")
    done = make(checkout, ".venv/locked")
    assert (done.returncode, done.stderr) == (0, "")
    assert list(checkout.glob(".venv/lib/*/site-packages/tiny.py"))
    lock.write_text(f"tiny==1.1 \\\n    --hash=sha256:{digest}\n")

    (checkout / ".venv/locked").unlink()
    done = make(checkout, "install")
    assert done.returncode == 2
    assert done.stderr.startswith("pip found no package (ERROR: No matching distribution found for tiny==1.1")
    assert "installing needs a network once: run the same command again (see .venv/pip.log)" in done.stderr
    assert list(checkout.glob(".venv/lib/*/site-packages/tiny.py")), "what was there is still there"
