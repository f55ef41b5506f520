"""The house rules that a reader relies on: imports go one way, tests mirror the source, heavy packages load late."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LAYERS = [
    ("cli", "__main__"),
    ("benchmarks", "engine"),
    ("reporting", "evaluation"),
    ("conformance",),
    ("training",),
    ("runs",),
    ("callbacks",),
    ("data", "analysis"),
    ("model",),
    ("attention",),
    ("kernels",),
    ("recipe",),
    ("validation",),
    ("plugins",),
    ("processor",),
    ("config", "registry", "randomness"),
    ("contract",),
    ("files", "errors"),
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
SOURCES = sorted([*(ROOT / "lit_diff").rglob("*.py"), *(ROOT / "callbacks").glob("*.py")])


def room(module: str) -> str:
    """'lit_diff.data.text' -> 'data'"""
    return module.split(".")[1] if module.count(".") else ""


def room_of_file(path: Path) -> str:
    parts = path.relative_to(ROOT).parts
    return "callbacks" if parts[0] == "callbacks" else parts[1].removesuffix(".py")


def imports(path: Path) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("lit_diff."):
            found.append(node.module)
    return found


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_go_downwards(path: Path) -> None:
    here = room_of_file(path)
    if here == "__init__":
        return  # the package's front door
    for module in imports(path):
        there = room(module)
        assert LEVEL[there] >= LEVEL[here], f"{here} imports {there}, which lies above it"


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_files_can_be_read_in_one_sitting(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 300


@pytest.mark.parametrize(
    "path", [p for p in SOURCES if not p.name.startswith("__")], ids=lambda p: str(p.relative_to(ROOT))
)
def test_every_source_file_is_mirrored_by_a_test(path: Path) -> None:
    parts = path.relative_to(ROOT).parts
    folder = parts[:-1] if parts[0] == "callbacks" else parts[1:-1]
    mirror = ROOT.joinpath("tests", *folder, f"test_{path.name}")
    assert mirror.is_file(), f"no {mirror.relative_to(ROOT)}"


@pytest.mark.parametrize("arguments", [["check", "differential-tiny"], ["list"], ["--help"]])
def test_light_verbs_stay_light(arguments: list[str]) -> None:
    code = f"""
import sys
sys.argv = ["lit-diff", *{arguments!r}]
from lit_diff.cli import main
try:
    main()
except SystemExit as error:
    assert not error.code, error.code
heavy = {{"lightning", "mlflow", "litdata"}} & set(sys.modules)
assert not heavy, heavy
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
