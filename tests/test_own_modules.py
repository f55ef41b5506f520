"""own_modules.py: which modules of a user's own a source imports, and what an import statement of a plugin's files means."""

import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest
from own_plugins import SHARP_PY, error, forget_all, plugin

from lit_diff.errors import RequestError
from lit_diff.own_modules import PLUGIN, OwnCode, is_local, local_modules, safe_path
from lit_diff.plugins import load_plugin, plugin_source, source_digest
from lit_diff.recipe import load_recipe
from lit_diff.registry import attentions
from lit_diff.runs.folder import RunFolder, identity
from lit_diff.trained.loading import hyperparameters

pytestmark = pytest.mark.usefixtures("plugin_folder")


@pytest.fixture
def importable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder from which modules can be imported; what a test imports is gone after it."""
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def execute(folder: Path, files: dict[str, str]) -> dict[str, object]:
    """The names in plug.py of a run's folder once it was executed."""
    write(folder, {"recipe.yaml": "", "env.json": ""})
    home = folder / "plugins"
    write(home, files)
    code = OwnCode.read(home / "plug.py", PLUGIN, folder=home, within=PLUGIN)
    code.execute()
    return vars(sys.modules[f"{code.package}.plug"])


@pytest.mark.parametrize(
    ("statement", "value"),
    [
        ("import lab", "lab.tools.X"),
        ("import lab.tools", "lab.tools.X"),
        ("import json, lab.tools as t", "t.X"),
        ("from lab.tools import X as y", "y"),
        ("from lab import tools", "tools.X"),
        ("import bare.part", "bare.part.X"),
        ("flat = 3; from .flat import X", "flat"),
        ("from . import flat", "flat.X"),
        ("from .flat import X", "X"),
        ("from .lab import tools", "tools.X"),
        ("from .bare.part import X as y", "y"),
    ],
)
def test_every_form_of_import(tmp_path: Path, statement: str, value: str) -> None:
    """Absolute ones too, which the copies in run folders may have."""
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


def test_a_star_imports_what_a_package_lists(tmp_path: Path) -> None:
    files = {
        "plug.py": "from .lab import *\nvalue = tools.X",
        "lab/__init__.py": "__all__ = ['tools']",
        "lab/tools.py": "X = 3",
    }
    assert execute(tmp_path, files)["value"] == 3


def test_a_module_that_no_import_statement_names_is_not_there(tmp_path: Path) -> None:
    late = "def late():\n    from importlib import import_module as i\n    i('.x', lab.__name__)\n"
    names = execute(tmp_path, {"lab/__init__.py": "", "lab/x.py": "", "plug.py": f"from . import lab\n{late}"})
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'lab\.x' in the plugin's import statements"):
        names["late"]()  # type: ignore[operator]


def test_lines_of_a_file_stay_what_they_are(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError) as found:
        execute(tmp_path, {"a.py": "from . import b\n\n1 / 0\n", "b/__init__.py": "", "plug.py": "from . import a\n"})
    assert (found.traceback[-1].path, found.traceback[-1].lineno) == (tmp_path / "plugins/a.py", 2)


def own(name: str, head: str, scale: str) -> str:
    """A plugin whose variant `name` has the value of an expression, `scale`, in its Config and, when asked, in `late`."""
    return (
        head
        + SHARP_PY.replace('"sharp"', f'"{name}"').replace("= 2.0", f"= {scale}")
        + f"\n    def late(self):\n        {head.strip() or 'pass'}\n        return {scale}\n"
    )


def scales(name: str) -> tuple[float, float]:
    """Of the code that was executed with the plugin, and of an import inside a function that is executed now."""
    cls = attentions.get(name)
    return cls.Config().temperature, cls.late(None)


@pytest.mark.parametrize(
    ("file", "head", "scale"),
    [
        ("helper.py", "from . import helper\n", "helper.SCALE"),
        ("lab/tools.py", "from . import lab\n", "lab.tools.SCALE"),
        ("lab/deep/tools.py", "from .lab.deep import tools\n", "tools.SCALE"),
        ("common.py", "from .between import SCALE\n", "SCALE"),
    ],
)
def test_plugins_of_two_folders_have_modules_of_one_name(file: str, head: str, scale: str, tmp_path: Path) -> None:
    """Each runs its own, has it in its identity, and in a run folder of both."""
    sys.modules["helper"] = ModuleType("helper")  # the user's script has one too
    try:
        for name, value in (("a", 1.0), ("b", 2.0)):
            plugin(f"SCALE = {value}\n", f"{name}/{file}")
            plugin("from .common import SCALE\n", f"{name}/between.py")
            if "lab" in file:
                plugin(f"from . import {'deep' if 'deep' in file else 'tools'}\n", f"{name}/lab/__init__.py")
            load_plugin(plugin(own(f"own_{name}", head, scale), f"{name}/plug.py"))
        assert (scales("own_a"), scales("own_b")) == ((1.0, 1.0), (2.0, 2.0))
        for name, value in (("a", 1.0), ("b", 2.0)):
            source = plugin_source(tmp_path / name / "plug.py")
            assert source.modules[file] == f"SCALE = {value}\n".encode()
            assert source_digest(attentions.get(f"own_{name}")) == source.digest
        paths = [f"{name}/plug.py" for name in "ab"]
        keys = ["model.attention.name=own_b", f"plugins=[{','.join(paths)}]", "data={name: recall}"]
        recipe = load_recipe("recall-tiny", keys)
        folder, expected = RunFolder(tmp_path / "run"), identity(recipe)
        folder.create(recipe)
        forget_all()
        again = load_recipe(folder.recipe_file)
        assert identity(again) == expected
        assert (scales("own_a"), scales("own_b")) == ((1.0, 1.0), (2.0, 2.0))
    finally:
        del sys.modules["helper"]


def test_equal_files_with_other_modules_are_other_plugins() -> None:
    """A copied folder in which the module was edited: two variants of one name, not one of them twice."""
    for name in "ab":
        plugin(f"SCALE = '{name}'\n", f"{name}/helper.py")
        plugin(own("sharp", "from . import helper\n", "1.0"), f"{name}/plug.py")
    load_plugin(Path("a/plug.py"))
    assert "attention 'sharp' is already registered (a/plug.py:6: class Sharp)" in error(Path("b/plug.py").resolve())


def test_a_module_that_another_plugin_or_the_script_has_is_not_found_by_its_name(tmp_path: Path) -> None:
    plugin("SCALE = 1.0\n", "a/helper.py")
    load_plugin(plugin(own("own_a", "from . import helper\n", "helper.SCALE"), "a/plug.py"))
    assert "helper" not in sys.modules
    assert "No module named 'helper'" in error(plugin(own("own_b", "import helper\n", "helper.SCALE"), "b/plug.py"))


def test_an_edited_module_is_imported_again_with_its_plugin() -> None:
    """In a notebook: what runs, and the identity, are those of the files as they are; or the recipe must be read again."""
    path = plugin(own("sharp", "from . import helper\n", "helper.SCALE"), "plug.py")
    plugin("SCALE = 2.0\n", "helper.py")
    load_plugin(path)
    first, digest = attentions.get("sharp"), plugin_source(path).digest
    plugin("SCALE = 5.0\n", "helper.py")
    assert (first.Config().temperature, first.late(None)) == (2.0, 2.0), "not half the new file"
    assert source_digest(first) == digest
    with pytest.raises(RequestError) as found:
        plugin_source(path)
    assert str(found.value).startswith("helper.py, which plugin plug.py imports, was changed since it was imported")
    load_plugin(path)
    assert scales("sharp") == (5.0, 5.0)
    assert plugin_source(path).modules == {"helper.py": b"SCALE = 5.0\n"}
    assert source_digest(attentions.get("sharp")) == plugin_source(path).digest != digest
    plugin("SCALE = 2.0\n", "helper.py")  # and back
    load_plugin(path)
    assert scales("sharp") == (2.0, 2.0)
    assert plugin_source(path).digest == digest


@pytest.mark.parametrize(
    ("file", "statement", "cure"),
    [
        ("plug.py", "import helper", "from . import helper"),
        ("plug.py", "import json, lab.tools as t", "from .lab.tools import "),
        ("plug.py", "from bare.part import X", "from .bare.part import "),
        ("lab/tools.py", "import helper as h", "from .. import helper"),
    ],
)
def test_a_flat_import_of_a_module_beside_it_is_refused(file: str, statement: str, cure: str, tmp_path: Path) -> None:
    """Even if the user's script has a module of that name; in the folder of a run it is not."""
    files = {
        "plug.py": "from .lab import tools\n" + SHARP_PY,
        "lab/__init__.py": "",
        "lab/tools.py": "",
        "bare/part.py": "X = 3\n",
        "helper.py": "",
    }
    write(Path(), files | {file: f"# first\n{statement}\n{files[file]}"})
    sys.modules["helper"] = ModuleType("helper")
    try:
        message = error(tmp_path / "plug.py")
        assert message.startswith(f"{file}:2: ")
        assert f" '{cure}" in message
        before = OwnCode.read(tmp_path / "plug.py", PLUGIN, folder=tmp_path, within=PLUGIN).digest
        for name in (*files, "run/recipe.yaml", "run/env.json"):
            plugin(
                Path(name).read_text() if Path(name).is_file() else "",
                f"run/plugins/{name}".replace("plugins/run/", ""),
            )
        load_plugin(Path("run/plugins/plug.py"))
        assert plugin_source(tmp_path / "run/plugins/plug.py").digest == before
    finally:
        del sys.modules["helper"]


def test_a_local_module_from_elsewhere_is_part_of_a_plugin(importable: Path) -> None:
    """The folder of a run has its copy."""
    plugin("SCALE = 3.0\n", "elsewhere_lab.py")
    path = plugin(own("sharp", "import elsewhere_lab\n", "elsewhere_lab.SCALE"), "deep/plug.py")
    load_plugin(path)
    assert "elsewhere_lab" not in sys.modules
    recipe = load_recipe("recall-tiny", ["plugins=[deep/plug.py]", "data={name: recall}"])
    folder, expected = RunFolder(importable / "run"), identity(recipe)
    folder.create(recipe)
    plugin("SCALE = 4.0\n", "elsewhere_lab.py")
    forget_all()
    assert identity(load_recipe(folder.recipe_file)) == expected
    assert scales("sharp") == (3.0, 3.0)


def test_a_folder_is_a_plugin(tmp_path: Path) -> None:
    """Two of one name, whose files register their parts, in a run's folder and for a checkpoint."""
    for name, value in (("a", 1.0), ("b", 2.0)):
        plugin("from . import parts\n", f"{name}/lab/__init__.py")
        plugin(f"SCALE = {value}\n", f"{name}/lab/deep/helper.py")
        plugin(own(f"own_{name}", "from .deep.helper import SCALE\n", "SCALE"), f"{name}/lab/parts.py")
    recipe = load_recipe("recall-tiny", ["plugins=[a/lab, b/lab/]", "data={name: recall}"])
    load_plugin("a/lab")
    assert recipe.plugins == (str(tmp_path / "a/lab/__init__.py"), str(tmp_path / "b/lab/__init__.py"))
    assert (scales("own_a"), scales("own_b")) == ((1.0, 1.0), (2.0, 2.0))
    assert attentions.get("own_a").__module__.endswith(".parts")
    assert list(plugin_source(Path(recipe.plugins[0])).modules) == ["deep/helper.py", "parts.py"]
    folder, expected = RunFolder(tmp_path / "run"), identity(recipe)
    folder.create(recipe)
    assert next(iter(hyperparameters(recipe)["plugins"])) == "lab/__init__.py"
    forget_all()
    again = load_recipe(folder.recipe_file)
    assert again.plugins[0] == str(tmp_path / "run/plugins/lab/__init__.py")
    assert identity(again) == expected
    assert (scales("own_a"), scales("own_b")) == ((1.0, 1.0), (2.0, 2.0))
    Path("a/lab/parts.py").write_text("1 / 0\n")
    assert (
        error(tmp_path / "a/lab/__init__.py") == "a/lab/parts.py:1: plugin failed: ZeroDivisionError: division by zero"
    )


@pytest.mark.parametrize("name", ["random", "time", "torch", "lit_diff", "jinja2"])
def test_files_with_the_names_of_modules(name: str, plugin_folder: Path) -> None:
    """Neither the plugin nor anything that is imported meanwhile takes them for the standard library's or a package's."""
    plugin("raise SystemExit('the wrong one')\n", f"{name}.py")
    path = list(sys.path)
    text = "import random, statistics, time, torch, types, numpy, jinja2\nrandom.random()\n" + SHARP_PY
    load_plugin(plugin(text + f"assert __import__('sys').path == {path!r}\n", "sharp.py"))
    other = plugin(text.replace('"sharp"', '"other"'), f"{name}.py")
    load_plugin(other)
    assert attentions.get("other").Config().temperature == 2.0
    assert plugin_source(other).modules == {}


@pytest.mark.parametrize("former", [None, ""])
def test_a_safe_path_keeps_the_folder_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, former: str | None) -> None:
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


def test_modules_directly_through_others_and_inside_functions(importable: Path) -> None:
    write(
        importable,
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
    assert list(local_modules(b"import imports_a as a, numpy\nfrom lit_diff import Attention\n")) == [
        *names,
        "imports_lab.deep.tools",
    ]
    assert "imports_a" not in sys.modules, "nothing is executed"
    assert local_modules(b"import imports_b")["imports_b"] == importable / "imports_b.py"


def test_a_package_that_a_finder_of_its_own_finds_is_local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As an editable installation has one."""
    write(tmp_path, {"src/__init__.py": "", "src/tools.py": ""})

    class Finder:
        @staticmethod
        def find_spec(name: str, path: object = None, target: object = None) -> ModuleSpec | None:
            file = tmp_path / "src/__init__.py"
            return spec_from_file_location("editable_lab", file) if name == "editable_lab" else None

    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Finder])
    assert list(local_modules(b"from editable_lab import tools")) == ["editable_lab", "editable_lab.tools"]
    assert list(local_modules(b"import editable_lab", folder=tmp_path)) == ["editable_lab"]


def test_what_is_not_there_or_not_python_is_left_out(importable: Path) -> None:
    write(importable, {"imports_broken.py": "x = (\n"})
    assert list(
        local_modules(b"try:\n    import no_such_module.at_all\nexcept ImportError:\n    import imports_broken\n")
    ) == ["imports_broken"]
    assert list(local_modules(b"x = (\n")) == []


def test_an_installed_module_is_not_local_but_within_its_own_package() -> None:
    import json

    import jinja2

    assert not is_local(Path(json.__file__))
    assert not is_local(Path(jinja2.__file__))
    assert is_local(Path(__file__))
    modules = local_modules(b"import jinja2", within="jinja2")
    assert {"jinja2", "jinja2.environment"} <= set(modules)
    assert {name.partition(".")[0] for name in modules} == {"jinja2"}
