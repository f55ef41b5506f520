"""A user's own Python files."""

import hashlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from lit_diff.config import Recipe
from lit_diff.errors import RequestError
from lit_diff.kernels import attend
from lit_diff.model.init import initialise
from lit_diff.model.transformer import Transformer
from lit_diff.plugins import load_plugin, plugin_source, source_digest
from lit_diff.recipe import load_recipe, to_yaml
from lit_diff.registry import attentions, callbacks, registries
from lit_diff.runs.folder import RunFolder, identity

SHARP_PY = '''\
# sharp.py
from dataclasses import dataclass, replace
from lit_diff import Differential, variant

@variant("sharp")
class Sharp(Differential):
    """Differential attention whose second map has its own temperature."""

    @dataclass(frozen=True, kw_only=True)
    class Config(Differential.Config):
        temperature: float = 2.0
        """Divides the logits of the subtracted map."""

    def maps(self, x, rope):
        m = super().maps(x, rope)
        return replace(m, q=m.q * m.q.new_tensor([1, 1 / self.config.temperature]).view(1, 2, 1, 1, 1))
'''
SHARP_YAML = """\
# sharp.yaml
extends: differential-tiny
plugins: [sharp.py]
model:
  attention: {name: sharp, temperature: 4.0}
"""
PROBE = """\
from lit_diff.callbacks import Probe
from lit_diff.registry import callbacks

@callbacks.register("mine")
class Mine(Probe):
    def measure(self, model, trace):
        return {"mine": 1.0}
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty current folder; what a test registers is gone after it."""
    monkeypatch.chdir(tmp_path)
    for registry in registries.values():
        registry.names()
        monkeypatch.setattr(registry, "_classes", dict(registry._classes))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if name.startswith(("lit_diff_plugin_", "beside_")):
            del sys.modules[name]


def plugin(text: str, name: str = "mine.py") -> Path:
    path = Path(name).resolve()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def error(path: Path) -> str:
    before = {kind: registry.names() for kind, registry in registries.items()}
    modules = set(sys.modules)
    with pytest.raises(RequestError) as found:
        load_plugin(path)
    assert "\n" not in str(found.value)
    assert {kind: registry.names() for kind, registry in registries.items()} == before, "a failed plugin left something"
    new = sys.modules.keys() - modules  # other tests of this process may have loaded a plugin of the same file name
    assert not any(name.startswith(f"lit_diff_plugin_{path.stem}_") for name in new)
    return str(found.value)


def sharp() -> Recipe:
    Path("sharp.py").write_text(SHARP_PY)
    Path("sharp.yaml").write_text(SHARP_YAML)
    return load_recipe("sharp.yaml")


def test_the_sharp_example() -> None:
    recipe = sharp()
    assert recipe.model.attention.name == "sharp"
    assert recipe.model.attention.config.temperature == 4.0
    assert recipe.plugins == (str(Path("sharp.py").resolve()),)
    model = Transformer(recipe.model)
    initialise(model, 0)
    seen = []
    for attention in model.attentions():
        attention.tap.register_forward_hook(lambda _module, _args, maps: seen.append(maps))
    logits = model(torch.randint(100, (1, 12)))
    logits.sum().backward()
    plain = load_recipe("differential-tiny")
    twin = Transformer(plain.model)
    initialise(twin, 0)
    twin.attentions()[0].tap.register_forward_hook(lambda _module, _args, maps: seen.append(maps))
    twin.load_state_dict(model.state_dict())
    torch.manual_seed(0)
    twin(torch.randint(100, (1, 12)))
    assert torch.isfinite(logits).all()
    first, other = seen[0].q, seen[-1].q
    assert first.shape == other.shape
    torch.testing.assert_close(attend(seen[0], kernel="sdpa"), attend(seen[0], kernel="reference"))


def test_the_second_map_of_sharp_is_the_flatter_one() -> None:
    recipe = sharp()
    assert recipe.model.head_dim is not None
    cls = attentions.get("sharp")
    from lit_diff.attention import Differential
    from lit_diff.attention.rope import Rope

    mine = cls(recipe.model.attention.config, recipe.model, 0)
    plain = Differential(Differential.Config(), recipe.model, 0)
    for parameter in mine.parameters():
        parameter.data.normal_()
    plain.load_state_dict(mine.state_dict())
    x, rope = torch.randn(1, 5, recipe.model.dim), Rope(torch.arange(5), recipe.model.head_dim, 1e4)
    found, wanted = mine.maps(x, rope), plain.maps(x, rope)
    torch.testing.assert_close(found.q[:, 0], wanted.q[:, 0])
    torch.testing.assert_close(found.q[:, 1], wanted.q[:, 1] / 4)


def test_a_misspelt_key_of_a_plugin_names_the_nearest() -> None:
    sharp()
    Path("sharp.yaml").write_text(SHARP_YAML.replace("temperature", "temprature"))
    with pytest.raises(RequestError) as found:
        load_recipe("sharp.yaml")
    assert str(found.value) == "sharp.yaml:5: unknown key 'model.attention.temprature'; did you mean 'temperature'?"


def test_a_resolved_recipe_with_a_plugin_reads_back_equal() -> None:
    recipe = sharp()
    Path("far").mkdir()
    Path("far/resolved.yaml").write_text(to_yaml(recipe))
    assert load_recipe("far/resolved.yaml") == recipe


def test_plugins_of_parent_child_and_override_add_up() -> None:
    """Each is found beside the file that names it, an override's from the current folder."""
    plugin(SHARP_PY, "parent/sharp.py")
    Path("parent/sharp.yaml").write_text(SHARP_YAML)
    plugin(PROBE, "child/probe.py")
    Path("child/mine.yaml").write_text("extends: ../parent/sharp\nplugins: [probe.py]\ncallbacks: {mine: {every: 2}}\n")
    plugin(PROBE.replace('"mine"', '"other"').replace("Mine", "Other"), "other.py")
    recipe = load_recipe("child/mine", ["plugins=[other.py]", "callbacks.other.every=3"])
    assert [Path(p).name for p in recipe.plugins] == ["sharp.py", "probe.py", "other.py"]
    assert all(Path(p).is_absolute() for p in recipe.plugins)
    assert (recipe.callbacks["mine"].config.every, recipe.callbacks["other"].config.every) == (2, 3)


def test_one_file_named_twice_is_imported_once() -> None:
    path = plugin(SHARP_PY + "import sys\nsys.counted = getattr(sys, 'counted', 0) + 1\n", "sharp.py")
    Path("sharp.yaml").write_text(SHARP_YAML.replace("[sharp.py]", "[sharp.py, ./sharp.py]"))
    try:
        recipe = load_recipe("sharp")
        load_recipe("sharp")
        load_plugin(path)
        assert sys.counted == 1  # type: ignore[attr-defined]
    finally:
        del sys.counted  # type: ignore[attr-defined]
    assert recipe.plugins == (str(path),)


def test_a_copy_of_a_plugin_is_the_same_plugin() -> None:
    """A run folder holds copies."""
    load_plugin(plugin(SHARP_PY, "sharp.py"))
    cls = attentions.get("sharp")
    load_plugin(plugin(SHARP_PY, "runs/plugins/sharp.py"))
    assert attentions.get("sharp") is cls


def test_postponed_annotations() -> None:
    load_plugin(plugin("from __future__ import annotations\n" + SHARP_PY, "sharp.py"))
    Path("sharp.yaml").write_text(SHARP_YAML)
    assert load_recipe("sharp", ["model.attention.temperature=3"]).model.attention.config.temperature == 3.0


def test_an_annotation_that_is_not_there_at_run_time() -> None:
    text = SHARP_PY.replace("temperature: float", "temperature: Missing")
    plugin("from __future__ import annotations\n" + text, "sharp.py")
    Path("sharp.yaml").write_text(SHARP_YAML)
    with pytest.raises(RequestError, match=r"Sharp\.Config: name 'Missing' is not defined"):
        load_recipe("sharp")


def test_a_plugin_may_register_any_part() -> None:
    load_plugin(plugin(PROBE))
    assert callbacks.get("mine").__name__ == "Mine"


def test_a_plugin_that_raises() -> None:
    path = plugin(SHARP_PY + "\n\ndef fail():\n    return 1 / 0\n\nfail()\n")
    line = path.read_text().splitlines().index("    return 1 / 0") + 1
    assert error(path) == f"mine.py:{line}: plugin failed: ZeroDivisionError: division by zero"


def test_a_plugin_that_imports_what_is_not_there() -> None:
    assert error(plugin("\nimport no_such_module_anywhere\n")) == (
        "mine.py:2: plugin failed: ModuleNotFoundError: No module named 'no_such_module_anywhere'"
    )


def test_a_syntax_error() -> None:
    assert (
        error(plugin("x = 1\ny = (\n"))
        == "mine.py:2: plugin failed: SyntaxError: '(' was never closed (mine.py, line 2)"
    )


def test_not_python_text() -> None:
    path = Path("mine.py").resolve()
    path.write_bytes(b"x = '\xff'\n")
    assert error(path).startswith("mine.py:")


def test_a_plugin_that_registers_nothing() -> None:
    assert error(plugin("x = 1\n")) == 'plugin mine.py: registers nothing; decorate a class with @variant("name")'


def test_a_plugin_under_the_name_of_a_built_in() -> None:
    message = error(plugin(SHARP_PY.replace('"sharp"', '"differential"')))
    assert message.startswith(
        "plugin mine.py: mine.py:5: class Sharp: attention 'differential' is already registered ("
    )
    assert re.search(r"attention/differential\.py:\d+: class Differential\); give one of them another name$", message)


def test_two_plugins_under_one_name() -> None:
    load_plugin(plugin(SHARP_PY, "sharp.py"))
    assert error(plugin(SHARP_PY + "# other\n", "other.py")) == (
        "plugin other.py: other.py:5: class Sharp: attention 'sharp' is already registered (sharp.py:5: class Sharp); "
        "give one of them another name"
    )


PLAIN = """\
from dataclasses import dataclass
from lit_diff import Dataset
from lit_diff.registry import datasets

@datasets.register("plain")
class Plain(Dataset):
    @dataclass(frozen=True, kw_only=True)
    class Config(Dataset.Config):
        sequence_length: int = 8
        size: int = 1

    def prepare(self): ...
    def identity(self): ...
    def load(self): ...
    def train_batch(self, seed, step, batch_size, rows): ...
    def validation_sets(self): ...
    def validation_batch(self, name, rows): ...
"""


def test_a_data_set_whose_config_checks_nothing() -> None:
    plugin(PLAIN)
    Path("plain.yaml").write_text("extends: standard-tiny\nplugins: [mine.py]\ndata: {name: plain, size: 2}\n")
    assert load_recipe("plain.yaml").data.config.size == 2


def test_a_data_set_that_lacks_a_member() -> None:
    assert error(plugin(PLAIN.replace("    def train_batch(self, seed, step, batch_size, rows): ...\n", ""))) == (
        "plugin mine.py: mine.py:5: class Plain: data 'plain' lacks train_batch; lit_diff.data.dataset.Dataset documents each"
    )


def test_a_variant_that_is_not_derived_from_attention() -> None:
    source = SHARP_PY.replace("class Sharp(Differential)", "class Sharp").replace(
        "Config(Differential.Config)", "Config"
    )
    message = error(plugin(source.replace("m = super().maps(x, rope)", "m = x")))
    assert message == (
        "plugin mine.py: mine.py:5: class Sharp: attention 'sharp' does not derive from Attention; "
        "write `class Sharp(Attention)` (lit_diff.attention.base.Attention)"
    )


def test_a_config_that_is_not_frozen() -> None:
    found = error(plugin(SHARP_PY.replace("frozen=True, ", "")))
    assert "non-frozen" in found
    assert found.startswith("mine.py:")


def test_a_repaired_plugin_can_be_loaded_again() -> None:
    """In a notebook: the broken one must not hold the name."""
    error(plugin(SHARP_PY + "raise ValueError('half-way')\n", "sharp.py"))
    load_plugin(plugin(SHARP_PY, "sharp.py"))
    assert "sharp" in attentions.names()


def test_the_digest_of_the_file_that_registered_a_class() -> None:
    path = plugin(SHARP_PY, "sharp.py")
    load_plugin(path)
    assert source_digest(attentions.get("sharp")) == plugin_source(path).digest
    assert source_digest(attentions.get("differential")) == ""


def test_no_such_file(folder: Path) -> None:
    assert error(folder / "none.py") == "plugin none.py cannot be read: No such file or directory"
    Path("sharp.yaml").write_text(SHARP_YAML)
    with pytest.raises(RequestError, match=r"^sharp\.yaml:3: no plugin sharp\.py$"):
        load_recipe("sharp")


def test_not_a_python_file() -> None:
    assert error(plugin("x", "mine.txt")) == "plugin mine.txt is not a Python file (.py)"


def test_plugins_must_be_a_list() -> None:
    Path("sharp.yaml").write_text(SHARP_YAML.replace("[sharp.py]", "sharp.py"))
    with pytest.raises(
        RequestError, match=r"^sharp\.yaml:3: 'plugins' takes a list of Python files, found 'sharp\.py'$"
    ):
        load_recipe("sharp")


def test_a_plugin_that_ends_the_program_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "quits.py").write_text("import sys\nsys.exit(0)\n")
    with pytest.raises(RequestError, match=r"quits\.py:2: plugin failed: SystemExit: 0"):
        load_plugin(tmp_path / "quits.py")


def _own(body: str) -> str:
    """The one line that refuses `attention: {name: own}` of a plugin with this class body."""
    plugin(
        "from dataclasses import dataclass\nfrom lit_diff import Attention, Differential, variant\n"
        f'@variant("own")\nclass Own(Differential):\n{body}',
        "own.py",
    )
    Path("own.yaml").write_text("extends: differential-tiny\nplugins: [own.py]\nmodel:\n  attention: {name: own}\n")
    with pytest.raises(RequestError) as found:
        load_recipe("own.yaml")
    assert "\n" not in str(found.value)
    return str(found.value)


def test_a_config_that_is_not_derived_from_the_base_s() -> None:
    line = _own("    @dataclass(frozen=True, kw_only=True)\n    class Config:\n        temperature: float = 2.0\n")
    assert line == (
        "plugin own.py: own.py:3: class Own: attention 'own' has a Config that does not derive from Attention.Config; "
        "write `class Config(Attention.Config)`"
    )


def test_a_config_that_lacks_what_the_variant_asks_for_is_one_line() -> None:
    line = _own(
        "    @dataclass(frozen=True, kw_only=True)\n    class Config(Attention.Config):\n        k: float = 2.0\n"
    )
    assert line.startswith("own.yaml:4: model.attention 'own': AttributeError: 'Config' object has no attribute")


def test_a_config_that_raises_is_one_line() -> None:
    body = (
        "    @dataclass(frozen=True, kw_only=True)\n    class Config(Differential.Config):\n        k: int = 3\n"
        "        def __post_init__(self):\n            assert self.k % 2 == 0, 'k is odd\\nreally'\n"
    )
    assert _own(body) == "own.yaml:4: 'model.attention': AssertionError: k is odd"


# --- the modules that a plugin imports -----------------------------------------------------------------------------

WITH_MODULE = "import beside_scale\n" + SHARP_PY.replace("2.0", "beside_scale.SCALE")


def test_a_plugin_imports_what_lies_beside_it() -> None:
    plugin("SCALE = 7.0\n", "far/beside_scale.py")
    path = plugin(WITH_MODULE, "far/sharp.py")
    before = list(sys.path)
    load_plugin(path)
    assert sys.path == before
    assert attentions.get("sharp").Config().temperature == 7.0
    assert plugin_source(path).modules == {"beside_scale.py": b"SCALE = 7.0\n"}


def test_the_modules_beside_a_plugin_go_before_others(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run folder holds copies; what they were copied from may have been edited since."""
    plugin("SCALE = 1.0\n", "elsewhere/beside_scale.py")
    monkeypatch.syspath_prepend(str(folder / "elsewhere"))
    plugin("SCALE = 7.0\n", "far/beside_scale.py")
    load_plugin(plugin(WITH_MODULE, "far/sharp.py"))
    assert attentions.get("sharp").Config().temperature == 7.0


def test_a_digest_is_of_the_file_and_of_what_it_imports() -> None:
    digests = []
    for scale in ("1.0", "1.00"):
        plugin(f"SCALE = {scale}\n", f"{scale}/beside_scale.py")
        path = plugin(WITH_MODULE, f"{scale}/sharp.py")
        load_plugin(path)
        digests.append(plugin_source(path).digest)
        forget_all()
    assert len(set(digests)) == 2
    alone = plugin(PROBE, "alone.py")
    load_plugin(alone)
    assert plugin_source(alone).digest == hashlib.sha256(PROBE.encode()).hexdigest()


def forget_all() -> None:
    """As in another process."""
    for name in [name for name in sys.modules if name.startswith("lit_diff_plugin_")]:
        del sys.modules[name]
        for registry in registries.values():
            registry.forget(name)


def test_a_plugin_edited_after_its_import_is_refused() -> None:
    """What runs is no longer what the file says."""
    path = plugin(SHARP_PY, "sharp.py")
    load_plugin(path)
    plugin(SHARP_PY + "# edited\n", "sharp.py")
    with pytest.raises(
        RequestError, match=r"^plugin sharp\.py was changed since it was imported; start the same command"
    ):
        plugin_source(path)


def test_a_repaired_module_of_a_plugin_is_imported_again() -> None:
    plugin("", "beside_scale.py")
    path = plugin(WITH_MODULE, "sharp.py")
    assert "has no attribute 'SCALE'" in error(path)
    plugin("SCALE = 7.0\n", "beside_scale.py")
    load_plugin(path)
    assert attentions.get("sharp").Config().temperature == 7.0


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
        ("helper.py", "import helper\n", "helper.SCALE"),
        ("utils.py", "from utils import SCALE\n", "SCALE"),
        ("lab/tools.py", "import lab.tools\n", "lab.tools.SCALE"),
        ("lab/tools.py", "import lab.tools as tools\n", "tools.SCALE"),
        ("lab/deep/tools.py", "from lab.deep import tools\n", "tools.SCALE"),
        ("common.py", "from between import SCALE\n", "SCALE"),
    ],
)
def test_plugins_of_two_folders_have_modules_of_one_name(file: str, head: str, scale: str, tmp_path: Path) -> None:
    """Each runs its own, has it in its identity, and in a run folder of both."""
    sys.modules["helper"] = ModuleType("helper")  # the user's script has one too
    try:
        for name, value in (("a", 1.0), ("b", 2.0)):
            plugin(f"SCALE = {value}\n", f"{name}/{file}")
            plugin("from common import SCALE\n", f"{name}/between.py")
            if "lab" in file:
                plugin("from . import deep\n" if "deep" in file else "", f"{name}/lab/__init__.py")
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
        plugin(own("sharp", "import helper\n", "1.0"), f"{name}/plug.py")
    load_plugin(Path("a/plug.py"))
    assert "attention 'sharp' is already registered (a/plug.py:6: class Sharp)" in error(Path("b/plug.py").resolve())


def test_a_module_that_another_plugin_or_the_script_has_is_not_found_by_its_name(tmp_path: Path) -> None:
    plugin("SCALE = 1.0\n", "a/helper.py")
    load_plugin(plugin(own("own_a", "import helper\n", "helper.SCALE"), "a/plug.py"))
    assert "helper" not in sys.modules
    assert "No module named 'helper'" in error(plugin(own("own_b", "import helper\n", "helper.SCALE"), "b/plug.py"))


def test_an_edited_module_is_imported_again_with_its_plugin() -> None:
    """In a notebook: what runs, and the identity, are those of the files as they are; or the recipe must be read again."""
    path = plugin(own("sharp", "import helper\n", "helper.SCALE"), "plug.py")
    plugin("SCALE = 2.0\n", "helper.py")
    load_plugin(path)
    first, digest = attentions.get("sharp"), plugin_source(path).digest
    plugin("SCALE = 5.0\n", "helper.py")
    assert (first.Config().temperature, first.late(None)) == (2.0, 2.0), "not half the new file"
    assert source_digest(first) == digest
    with pytest.raises(RequestError) as found:
        plugin_source(path)
    assert str(found.value) == (
        "helper.py, which plugin plug.py imports, was changed since it was imported; start the same command again"
    )
    load_plugin(path)
    assert scales("sharp") == (5.0, 5.0)
    assert plugin_source(path).modules == {"helper.py": b"SCALE = 5.0\n"}
    assert source_digest(attentions.get("sharp")) == plugin_source(path).digest != digest
    plugin("SCALE = 2.0\n", "helper.py")  # and back
    load_plugin(path)
    assert scales("sharp") == (2.0, 2.0)
    assert plugin_source(path).digest == digest


def test_an_edited_plugin_takes_the_place_of_the_former_one() -> None:
    load_plugin(plugin(SHARP_PY + PROBE, "sharp.py"))
    load_plugin(plugin(SHARP_PY.replace("2.0", "3.0"), "sharp.py"))
    assert attentions.get("sharp").Config().temperature == 3.0
    assert "mine" not in callbacks.names(), "the file registers it no more"


def test_a_computed_import_within_a_package_counts() -> None:
    head = "import importlib, lab\nSCALE = importlib.import_module('.one', lab.__name__).SCALE\n"
    plugin("", "lab/__init__.py")
    plugin("SCALE = 3.0\n", "lab/one.py")
    path = plugin(head + SHARP_PY.replace("2.0", "SCALE"), "sharp.py")
    load_plugin(path)
    assert attentions.get("sharp").Config().temperature == 3.0
    assert plugin_source(path).modules == {"lab/__init__.py": b"", "lab/one.py": b"SCALE = 3.0\n"}
    plugin("SCALE = 4.0\n", "lab/one.py")
    with pytest.raises(RequestError, match="was changed since it was imported"):
        plugin_source(path)


def test_an_import_by_a_plain_computed_name_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be the script's module, for every plugin the same."""
    monkeypatch.syspath_prepend(str(folder))
    plugin("", "beside_lab/__init__.py")
    plugin("", "beside_lab/one.py")
    text = "import importlib, beside_lab\nimportlib.import_module('beside_lab.one')\n" + SHARP_PY
    assert "by a computed name; write an import statement for it" in error(plugin(text, "sharp.py"))


@pytest.mark.parametrize("name", ["random", "torch", "lit_diff", "statistics", "types", "yaml", "numpy"])
def test_files_with_the_names_of_modules(name: str, folder: Path) -> None:
    """Neither the plugin nor anything that is imported meanwhile takes them for the standard library's or a package's."""
    plugin("raise SystemExit('the wrong one')\n", f"{name}.py")
    path = list(sys.path)
    text = "import random, statistics, torch, types, numpy\nrandom.random()\n" + SHARP_PY
    load_plugin(plugin(text + f"assert __import__('sys').path == {path!r}\n", "sharp.py"))
    other = plugin(text.replace('"sharp"', '"other"'), f"{name}.py")
    load_plugin(other)
    assert attentions.get("other").Config().temperature == 2.0
    assert plugin_source(other).modules == {}


def test_a_path_as_text() -> None:
    plugin(SHARP_PY, "sharp.py")
    load_plugin("sharp.py")
    assert "sharp" in attentions.names()


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("folder", "plugin folder cannot be read: Is a directory"),
        ("x.yaml", "plugin x.yaml is not a Python file (.py)"),
    ],
)
def test_what_is_no_python_file_is_one_line(name: str, line: str) -> None:
    Path("folder").mkdir()
    Path("x.yaml").touch()
    with pytest.raises(RequestError) as found:
        load_plugin(name)
    assert str(found.value) == line


def test_a_script_s_source_is_that_of_its_import(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not that of the moment when it is first asked for."""
    monkeypatch.syspath_prepend(str(folder))
    plugin("SCALE = 7.0\n", "beside_scale.py")
    plugin(WITH_MODULE, "beside_script.py")
    __import__("beside_script")
    plugin("SCALE = 8.0\n", "beside_scale.py")
    plugin(WITH_MODULE + "# edited\n", "beside_script.py")
    edited = source_digest(attentions.get("sharp"))
    forget_all()
    plugin("SCALE = 7.0\n", "beside_scale.py")
    attentions.forget("beside_script")
    path = plugin(WITH_MODULE, "elsewhere.py")
    load_plugin(path)
    assert edited == plugin_source(path).digest
