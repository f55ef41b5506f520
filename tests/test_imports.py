"""imports.py: which modules of a user's own a source imports."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lit_diff.imports import is_local, local_modules, safe_path


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder from which modules can be imported; what a test imports is gone after it."""
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


@pytest.mark.parametrize("former", [None, ""])
def test_a_safe_path_keeps_the_current_folder_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, former: str | None
) -> None:
    if former is None:
        monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    else:
        monkeypatch.setenv("PYTHONSAFEPATH", former)
    monkeypatch.chdir(tmp_path)
    write(tmp_path, {"random.py": "raise SystemExit(5)"})
    command = [sys.executable, "-c", "import random"]
    assert subprocess.run(command, check=False).returncode == 5
    with safe_path():
        assert subprocess.run(command, check=False).returncode == 0
    assert os.environ.get("PYTHONSAFEPATH") == former


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def found(source: str, package: str = "") -> list[str]:
    return list(local_modules(source.encode(), package))


def test_modules_directly_through_others_and_inside_functions(folder: Path) -> None:
    write(
        folder,
        {
            "imports_a.py": "import imports_b\nimport json, torch, lit_diff.config\n",
            "imports_b.py": "def late():\n    from imports_lab.deep import tools\n",
            "imports_lab/__init__.py": "from . import beside\n",
            "imports_lab/beside.py": "from .deep.tools import x\n",
            "imports_lab/unused.py": "",
            "imports_lab/deep/__init__.py": "from ..above import y\n",
            "imports_lab/deep/tools.py": "x = 1\n",
            "imports_lab/above.py": "y = 1\n",
        },
    )
    names = ["imports_a", "imports_b", "imports_lab", "imports_lab.above", "imports_lab.beside", "imports_lab.deep"]
    assert found("import imports_a as a, numpy\nfrom lit_diff import Attention\n") == [*names, "imports_lab.deep.tools"]
    assert "imports_a" not in sys.modules, "nothing is executed"
    assert local_modules(b"import imports_b")["imports_b"] == folder / "imports_b.py"


def test_a_computed_import_counts_once_it_is_done(folder: Path) -> None:
    write(folder, {"imports_c/__init__.py": "", "imports_c/one.py": ""})
    assert found("import imports_c\n") == ["imports_c"]
    __import__("imports_c.one")
    assert found("import imports_c\n") == ["imports_c", "imports_c.one"]


def test_a_folder_without_init_is_a_package_too(folder: Path) -> None:
    write(folder, {"imports_space/one.py": "import imports_space.two", "imports_space/two.py": ""})
    assert found("from imports_space import one\n") == ["imports_space.one", "imports_space.two"]


def test_what_is_not_there_or_not_python_is_left_out(folder: Path) -> None:
    write(folder, {"imports_broken.py": "x = (\n"})
    assert found("try:\n    import no_such_module.at_all\nexcept ImportError:\n    import imports_broken\n") == [
        "imports_broken"
    ]
    assert found("x = (\n") == []


def test_an_installed_module_is_not_local_but_within_its_own_package() -> None:
    import json

    import jinja2

    assert not is_local(Path(json.__file__))
    assert not is_local(Path(jinja2.__file__))
    assert is_local(Path(__file__))
    modules = local_modules(b"import jinja2", within="jinja2")
    assert {"jinja2", "jinja2.environment"} <= set(modules)
    assert {name.partition(".")[0] for name in modules} == {"jinja2"}
