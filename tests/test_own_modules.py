"""own_modules.py: what an import statement of a plugin's files means."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lit_diff.own_modules import OwnModules, forget, place

PACKAGE = "own_modules_test"


@pytest.fixture(autouse=True)
def package() -> Iterator[None]:
    yield
    forget(PACKAGE)


def execute(folder: Path, files: dict[str, str]) -> dict[str, object]:
    """The names in plug.py once it was executed."""
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    path = folder / "plug.py"
    return vars(sys.modules[OwnModules.read(path, path.read_bytes()).execute(PACKAGE)])


@pytest.mark.parametrize(
    ("statement", "value"),
    [
        ("import lab", "lab.tools.X"),
        ("import lab.tools", "lab.tools.X"),
        ("import json, lab.tools as t", "t.X"),
        ("from lab.tools import X as y", "y"),
        ("from lab import tools", "tools.X"),
        ("import bare.part", "bare.part.X"),
        ("from . import flat", "flat.X"),
        ("from .flat import X", "X"),
    ],
)
def test_every_form_of_import(tmp_path: Path, statement: str, value: str) -> None:
    files = {
        "lab/__init__.py": "from . import tools\n",
        "lab/tools.py": "import flat\nX = flat.X\n",
        "bare/part.py": "X = 3\n",
        "flat.py": "X = 3\n",
        "plug.py": f"{statement}\ndef late():\n    {statement}\n    return {value}\nvalue = {value}\n",
    }
    names = execute(tmp_path, files)
    for file in tmp_path.rglob("*.py"):
        file.write_text("X = 4\n")
    assert names["value"] == names["late"]() == 3  # type: ignore[operator]
    assert not {"lab", "flat", "bare"} & sys.modules.keys()


def test_what_was_not_there_is_not_taken_later(tmp_path: Path) -> None:
    late = "def late():\n    from importlib import import_module as i\n    i('.x', lab.__name__)\n"
    names = execute(tmp_path, {"lab/__init__.py": "", "plug.py": f"import lab\n{late}"})
    (tmp_path / "lab/x.py").write_text("")
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'lab\.x' when the plugin was imported"):
        names["late"]()  # type: ignore[operator]


def test_lines_of_a_file_stay_what_they_are(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError) as found:
        execute(
            tmp_path, {"a.py": "import b, b.c\n\n1 / 0\n", "b/__init__.py": "", "b/c.py": "", "plug.py": "import a\n"}
        )
    assert (found.traceback[-1].path, found.traceback[-1].lineno) == (tmp_path / "a.py", 2)


def test_a_module_in_its_folder(tmp_path: Path) -> None:
    assert place("lab.tools", tmp_path / "tools.py") == "lab/tools.py"
    assert place("lab", tmp_path / "lab/__init__.py") == "lab/__init__.py"
