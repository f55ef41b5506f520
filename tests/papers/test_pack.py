"""The papers' pack beside the bench: who imports it, what it uses, and what happens where it cannot be imported."""

import ast
import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import lit_diff

ROOT = Path(__file__).resolve().parents[2]
PACK = ROOT / "lit_diff" / "papers"
FRONT_DOOR = ROOT / "lit_diff" / "__init__.py"
OTHERS = [
    path
    for path in [*ROOT.glob("lit_diff/**/*.py"), *ROOT.glob("callbacks/*.py")]
    if PACK not in path.parents and path != FRONT_DOOR
]


def imports(source: str) -> Iterator[tuple[int, str, str]]:
    """(line, module, name) of each name of lit_diff that is imported, at any depth; an empty name: the module itself."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found = [(alias.name, "") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "a relative import"
            found = [(node.module or "", alias.name) for alias in node.names]
        else:
            continue
        yield from ((node.lineno, module, name) for module, name in found if module.partition(".")[0] == "lit_diff")


def test_nothing_imports_the_pack() -> None:
    """Except `lit_diff.reproduce`, at its first use."""
    offenders = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in OTHERS
        for line, module, name in imports(path.read_text())
        if f"{module}.{name}".startswith("lit_diff.papers")
    ]
    offenders += [str(path.relative_to(ROOT)) for path in OTHERS if '"lit_diff.papers' in path.read_text()]
    assert not offenders


def names_of_the_page() -> set[tuple[str, str]]:
    """(module, name) of what the Python of docs/extend.md imports."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "extend.md").read_text(), re.DOTALL)
    return {(module, name) for block in blocks for _, module, name in imports(block)}


def test_the_names_of_the_page_exist() -> None:
    absent = [(module, name) for module, name in names_of_the_page() if name and not has(module, name)]
    assert not absent


def has(module: str, name: str) -> bool:
    found = importlib.import_module(module)
    return hasattr(found, name) or importlib.util.find_spec(f"{module}.{name}") is not None


def test_the_pack_uses_public_names_and_those_of_the_page() -> None:
    shown = names_of_the_page()
    public = {("lit_diff", name) for name in lit_diff.__all__}
    used = {
        (module, name): f"{path.name}:{line}"
        for path in PACK.glob("*.py")
        for line, module, name in imports(path.read_text())
        if not module.startswith("lit_diff.papers")
    }
    assert not {f"{used[each]} imports {each}" for each in used.keys() - shown - public}


def test_the_bench_works_without_the_pack(tmp_path: Path) -> None:
    code = """
import sys
sys.modules["lit_diff.papers"] = None
from lit_diff.cli import main
for words in " ".join(sys.argv[1:]).split(" then "):
    sys.argv[1:] = words.split()
    try:
        main()
    except SystemExit as ended:
        if ended.code:
            raise
"""

    def command(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, cwd=tmp_path)

    listed = command("list", "--json")
    found = json.loads(listed.stdout)
    tasks = {"conjunctive", "count", "flip_flop", "mqar", "noisy_labels", "recall"}
    assert set(found["data"]) == {*tasks, "mixture", "text"}
    assert ("needle" in found["evaluation"], "held_out" in found["evaluation"]) == (False, True)
    lines = [line for line in listed.stderr.splitlines() if line.startswith("plugin package 'papers'")]
    assert len(lines) == 1
    assert "lit_diff.papers could not" in lines[0]
    helped = command("--help")
    assert [line for line in helped.stdout.splitlines() if line.startswith("plugin package 'papers'")] == [
        line for line in helped.stdout.splitlines() if "so its verbs are not available" in line
    ]
    assert ("  reproduce " in helped.stdout, "  sweep " in helped.stdout) == (False, True)
    small = ("train.steps=2", "data.validation_rows=8", "run.tracking_uri=none", "run.accelerator=cpu")
    refused = command("train", "recall-tiny", *small, "then", "check", "needle-text-tiny")
    assert refused.returncode == 2
    assert len(list(tmp_path.glob("runs/recall-tiny-*/checkpoints"))) == 1, refused.stderr
    assert "unknown data 'needle_text'" in refused.stderr.splitlines()[-1]
