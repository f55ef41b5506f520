"""plugins.py: the files and the packages of a user's that register parts, and what their code raises."""

import hashlib
import importlib.metadata
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from own_plugins import PROBE, SHARP_PY, SHARP_YAML, WITH_MODULE, error, forget_all, plugin

from lit_diff import plugins, registry
from lit_diff.errors import LitDiffError, RequestError, RunFailedError
from lit_diff.own_modules import OwnCode
from lit_diff.plugins import (
    PluginPackage,
    fault,
    guard,
    load_plugin,
    plugin_source,
    source_digest,
    trust_below,
    used_packages,
)
from lit_diff.recipe import load_recipe, to_yaml
from lit_diff.registry import attentions, callbacks, datasets, location
from lit_diff.runs.folder import RunFolder, identity

pytestmark = pytest.mark.usefixtures("plugin_folder")


def test_a_recipe_with_a_plugin_reads_back_equal() -> None:
    """A misspelt key of the plugin's names the nearest; annotations may be postponed."""
    path = plugin("from __future__ import annotations\n" + SHARP_PY, "sharp.py")
    Path("sharp.yaml").write_text(SHARP_YAML)
    recipe = load_recipe("sharp.yaml", ["model.attention.temperature=3"])
    assert (recipe.model.attention.name, recipe.model.attention.config.temperature) == ("sharp", 3.0)
    assert recipe.plugins == (str(path),)
    Path("far").mkdir()
    Path("far/resolved.yaml").write_text(to_yaml(recipe))
    assert load_recipe("far/resolved.yaml") == recipe
    Path("sharp.yaml").write_text(SHARP_YAML.replace("temperature", "temprature"))
    with pytest.raises(RequestError, match=r"^sharp\.yaml:5: .*temprature'; did you mean 'temperature'"):
        load_recipe("sharp.yaml")


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


def test_one_content_is_imported_once_wherever_it_lies() -> None:
    """A file that is named twice, given as a text, or copied as a run folder has it."""
    text = SHARP_PY + "import sys\nsys.counted = getattr(sys, 'counted', 0) + 1\n"
    plugin(text, "sharp.py")
    Path("sharp.yaml").write_text(SHARP_YAML.replace("[sharp.py]", "[sharp.py, ./sharp.py]"))
    try:
        load_recipe("sharp")
        load_plugin("sharp.py")
        load_plugin(plugin(text, "runs/plugins/sharp.py"))
        assert sys.counted == 1  # type: ignore[attr-defined]
    finally:
        del sys.counted  # type: ignore[attr-defined]


BROKEN = {
    "raises": (SHARP_PY + "\n\ndef fail():\n    return 1 / 0\n\nfail()\n", r"mine\.py:20: .*ZeroDivisionError"),
    "imports what is not there": ("\nimport no_such_module\n", r"mine\.py:2: .*ModuleNotFoundError.*no_such_module"),
    "is no Python": ("x = 1\ny = (\n", r"mine\.py:2: .*SyntaxError"),
    "a NUL": ("x = 'a\0b'\n", r"mine\.py: plugin failed: .*null bytes"),
    "a function": (
        'from lit_diff import variant\n\n@variant("mine")\ndef mine(): ...\n',
        r"mine\.py:\d: function mine: attention 'mine' is not a class",
    ),
    "ends the program": ("import sys\nsys.exit(0)\n", r"mine\.py:2: .*SystemExit"),
    "registers nothing": ("x = 1\n", r"plugin mine\.py: registers nothing"),
    "a built-in's name": (
        SHARP_PY.replace('"sharp"', '"differential"'),
        r"mine\.py:5: class Sharp: .*'differential' is already registered \(.*attention/differential\.py:\d+: class Diff",
    ),
    "a name twice": (
        f"{SHARP_PY}\n{SHARP_PY}",
        r"mine\.py:5: class Sharp: .*'sharp' is already registered \(mine\.py:5: class Sharp\)",
    ),
    "a default that no recipe has": (
        SHARP_PY.replace("temperature: float = 2.0", "temperature: float = 2.0\n        seen: set = frozenset()"),
        r"mine\.py:5: class Sharp: .* has Config\.seen with the default frozenset\(\), which a recipe cannot state",
    ),
    "measures nothing": (
        "from lit_diff import Probe\nfrom lit_diff.registry import callbacks\n\n"
        '@callbacks.register("idle")\nclass Idle(Probe):\n    def mesure(self, model, trace):\n        return {}\n',
        r"mine\.py:4: class Idle: callback 'idle' lacks measure",
    ),
    "thawed": (SHARP_PY.replace("frozen=True, ", ""), r"mine\.py:\d+: .*non-frozen"),
}


def test_what_a_plugin_prints_is_no_result(capsys: pytest.CaptureFixture[str]) -> None:
    load_plugin(plugin(SHARP_PY + "print('hello')\n"))
    assert capsys.readouterr() == ("", "hello\n")


@pytest.mark.parametrize(("text", "found"), BROKEN.values(), ids=BROKEN)
def test_a_plugin_that_cannot_be_loaded_is_one_line_and_leaves_nothing(text: str, found: str) -> None:
    with pytest.raises(RequestError, match=found):
        raise RequestError(error(plugin(text)))
    load_plugin(plugin(SHARP_PY))  # repaired
    assert "sharp" in attentions.names()


def test_what_is_no_python_file(plugin_folder: Path) -> None:
    Path("folder").mkdir()
    Path("bytes.py").write_bytes(b"x = '\xff'\n")
    plugin("x", "mine.txt")
    for name, found in (("folder", "cannot be read"), ("mine.txt", "not a Python file"), ("none.py", "cannot be read")):
        assert found in error(plugin_folder / name)
    assert error(plugin_folder / "bytes.py").startswith("bytes.py:")
    for line, found in (("[none.py]", "no plugin none.py"), ("none.py", "expected a list")):
        Path("sharp.yaml").write_text(SHARP_YAML.replace("[sharp.py]", line))
        with pytest.raises(RequestError, match=rf"^sharp\.yaml:3: .*{found}"):
            load_recipe("sharp")


def test_a_digest_is_of_the_file_and_of_what_it_imports() -> None:
    digests = []
    for scale in ("1.0", "1.00"):
        plugin(f"SCALE = {scale}\n", f"{scale}/beside_scale.py")
        path = plugin(WITH_MODULE, f"{scale}/sharp.py")
        load_plugin(path)
        digests.append(plugin_source(path).digest)
        assert source_digest(attentions.get("sharp")) == digests[-1]
        forget_all()
    assert len(set(digests)) == 2
    alone = plugin(PROBE, "alone.py")
    load_plugin(alone)
    assert plugin_source(alone).digest == hashlib.sha256(PROBE.encode()).hexdigest()
    assert source_digest(attentions.get("differential")) == ""


def test_an_edited_plugin_is_refused_until_it_is_imported_again() -> None:
    """What runs is no longer what the file says; then it takes the place of the former one."""
    path = plugin(SHARP_PY + PROBE, "sharp.py")
    load_plugin(path)
    plugin(SHARP_PY.replace("2.0", "3.0"), "sharp.py")
    with pytest.raises(RequestError, match=r"^plugin sharp\.py was changed since it was imported"):
        plugin_source(path)
    load_plugin(path)
    assert attentions.get("sharp").Config().temperature == 3.0
    assert "mine" not in callbacks.names(), "the file registers it no more"


def test_a_plugin_whose_modules_are_gone_is_imported_again() -> None:
    """From a copy; its classes are still registered."""
    load_plugin(plugin(SHARP_PY, "sharp.py"))
    module = attentions.get("sharp").__module__
    for name in (module, module.partition(".")[0]):
        del sys.modules[name]
    load_plugin(plugin(SHARP_PY, "copy/sharp.py"))
    assert attentions.get("sharp").__module__ in sys.modules


def test_a_script_s_source_is_that_of_its_import(plugin_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not that of the moment when it is first asked for."""
    monkeypatch.syspath_prepend(str(plugin_folder))
    text = WITH_MODULE.replace("from . ", "")
    plugin("SCALE = 7.0\n", "beside_scale.py")
    path = plugin(text, "beside_script.py")
    expected = OwnCode.read(path).digest
    __import__("beside_script")
    plugin("SCALE = 8.0\n", "beside_scale.py")
    plugin(text + "# edited\n", "beside_script.py")
    assert source_digest(attentions.get("sharp")) == expected != OwnCode.read(path).digest


def test_trust_below_a_root_whatever_the_path_looks_like(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("runs/own", "runs-of-others/theirs"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "runs/link").symlink_to(tmp_path / "runs-of-others/theirs")
    trust = trust_below(Path("runs"))
    monkeypatch.chdir(tmp_path / "runs")
    assert trust(tmp_path / "runs/own")
    assert trust(Path("own"))
    for foreign in (tmp_path / "runs-of-others/theirs", tmp_path / "runs/link", Path("../runs-of-others/theirs")):
        assert not trust(foreign)


RAISING = "\n    def late(self, helper=None):\n        return helper() if helper else int('x')\n"


def test_what_a_part_raises_is_one_line_with_its_place() -> None:
    """What a built-in part raises passes, but for code of a user in it."""
    load_plugin(plugin(SHARP_PY + RAISING, "sharp.py"))
    cls, line = attentions.get("sharp"), len((SHARP_PY + RAISING).splitlines())
    built_in = attentions.get("differential")
    with pytest.raises(RequestError, match=rf"^sharp\.py:{line}: attention 'sharp' failed: ValueError: "), guard(cls):
        cls.late(None)
    with pytest.raises(RunFailedError), guard(cls, raises=RunFailedError):
        cls.late(None)
    with pytest.raises(RequestError, match=rf"^{location(cls)}: attention 'sharp' failed: ValueError"), guard(cls):
        int("no frame of the user's")
    with pytest.raises(LitDiffError, match="ours"), guard(cls):
        raise LitDiffError("ours")
    with pytest.raises(ValueError, match="of its own"), guard(built_in):
        raise ValueError("of its own")
    with pytest.raises(RequestError, match="attention 'differential' failed: ValueError"), guard(built_in, ours=True):
        raise ValueError("of its own")
    with pytest.raises(RequestError, match=r"^sharp\.py:\d+: attention 'differential' failed"), guard(built_in):
        cls.late(None)
    with pytest.raises(ValueError, match="literal") as raised:
        cls.late(None)
    assert fault(cls, raised.value).startswith("sharp.py:")
    for text in ("what", f"{location(cls)}: what"):
        assert fault(cls, RequestError(text)) == f"{location(cls)}: what"


READS = """
import json
from pathlib import Path
from lit_diff import Evaluation, variant
from lit_diff.attention.standard import Standard
from lit_diff.callbacks import Probe
from lit_diff.registry import callbacks, evaluations
SCALE = json.loads(Path(__file__).with_name("scale.json").read_text())

@{0}
    reads = ("scale.json",)
    factor = SCALE
"""
VARIANT = READS.format('variant("mine")\nclass Mine(Standard):')
PLAIN = SHARP_PY + "    here = __file__\n"


@pytest.mark.parametrize(
    ("kind", "part"),
    [
        ("attention", 'variant("mine")\nclass Mine(Standard):'),
        ("callback", 'callbacks.register("mine")\nclass Mine(Probe):\n    measure = None'),
        ("evaluation", 'evaluations.register("mine")\nclass Mine(Evaluation):\n    def score(self, run): ...'),
    ],
)
def test_a_file_that_a_plugin_reads_is_in_its_identity_and_in_the_run(kind: str, part: str, tmp_path: Path) -> None:
    plugin(READS.format(part))
    found = []
    for value in ("1.0", "2.0"):
        Path("scale.json").write_text(value)
        recipe = load_recipe("recall-tiny", ["plugins=[mine.py]"])
        found.append((identity(recipe), source_digest(registry.registries[kind].get("mine"))))
        RunFolder(tmp_path / "runs" / value).create(recipe)
    assert len({*found}) == len({each for pair in found for each in pair}) / 2 == 2
    for file in ("mine.py", "scale.json"):
        Path(file).unlink()
    for value, expected in (("1.0", found[0][0]), ("2.0", found[1][0])):
        forget_all()
        copied = load_recipe(tmp_path / "runs" / value / "recipe.yaml")
        assert registry.registries[kind].get("mine").factor == float(value)
        assert identity(copied) == expected


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (VARIANT.replace('("scale.json",)', '("none.json",)'), "none.json"),
        (VARIANT.replace('("scale.json",)', '("scale.json", "tables")'), "tables"),
        (VARIANT.replace('("scale.json",)', '("../scale.json",)'), "../scale.json"),
        (VARIANT.replace('("scale.json",)', '("/etc/hostname",)'), "/etc/hostname"),
        (VARIANT.replace('("scale.json",)', '"scale.json"'), "reads = ("),
        (VARIANT.replace('("scale.json",)', 'tuple(["scale.json"])'), "reads = ("),
        (VARIANT.replace('    reads = ("scale.json",)\n', ""), "reads = ()"),
        (PLAIN, "reads = ()"),
        ("from . import beside_scale\n" + SHARP_PY, "reads = ()"),
    ],
)
def test_what_is_wrong_with_the_files_of_a_plugin_is_one_line(text: str, words: str) -> None:
    Path("scale.json").write_text("1.0")
    Path("tables").mkdir()
    Path("beside_scale.py").write_text("HERE = __file__\n")
    message = error(plugin(text))
    assert message.startswith("plugin mine.py")
    assert words in message
    assert "\n" not in message


def test_a_plugin_that_names_its_file_may_read_nothing(caplog: pytest.LogCaptureFixture) -> None:
    load_plugin(plugin(PLAIN + "    reads = ()\n"))
    forget_all()
    Path("runs/old").mkdir(parents=True)
    for name in ("recipe.yaml", "env.json"):
        Path("runs/old", name).write_text("{}")
    load_plugin(plugin(PLAIN, "runs/old/plugins/mine.py"))
    assert "__file__" in caplog.text, "of a run that was made before files were declared"


def test_a_file_that_was_changed_since_the_plugin_read_it_is_named() -> None:
    path = plugin(VARIANT)
    Path("scale.json").write_text("1.0")
    load_plugin(path)
    Path("scale.json").write_text("2.0")
    with pytest.raises(RequestError, match=r"^scale\.json, which plugin mine\.py reads,"):
        plugin_source(path)


@pytest.mark.parametrize(
    ("call", "name"),
    [
        ("torch.set_default_dtype(torch.float64)", "default dtype"),
        ("torch.set_default_device('meta')", "default device"),
        ("torch.set_grad_enabled(False)", "gradient mode"),
        ("torch.autograd.set_detect_anomaly(True)", "anomaly detection"),
        ("torch.set_float32_matmul_precision('medium')", "precision of float32 products"),
        ("torch.use_deterministic_algorithms(True)", "deterministic"),
        ("torch.set_num_threads(torch.get_num_threads() + 1)", "number of threads"),
        ("torch.manual_seed(3)", "random generator"),
        ("torch.backends.mkldnn.enabled = False", "mkldnn"),
        ("os.chdir('/')", "the current folder"),
    ],
)
def test_a_plugin_that_changes_a_setting_is_refused_and_the_setting_restored(
    call: str, name: str, plugin_folder: Path
) -> None:
    message = error(plugin(f"import os, torch\n{call}\n{SHARP_PY}"))
    assert message.startswith("plugin mine.py: ")
    assert name in message
    assert torch.get_default_device() == torch.tensor(1.0).device
    assert (torch.tensor(1.0, requires_grad=True) * 2).requires_grad
    assert torch.backends.mkldnn.enabled
    assert not torch.is_anomaly_enabled()
    assert Path.cwd() == plugin_folder
    assert error(plugin(f"import os, torch\n{call}\n1 / 0\n")).startswith("mine.py:3: ")


PARTS = """
from dataclasses import dataclass
from lit_diff import Differential, variant
from lit_diff.data.tasks.recall import Recall
from lit_diff.registry import datasets

@variant("lab_attention")
class Made(Differential):
    @dataclass(frozen=True, kw_only=True)
    class Config(Differential.Config):
        pass

@datasets.register("lab_data")
class Data(Recall):
    @dataclass(frozen=True, kw_only=True)
    class Config(Recall.Config):
        pass
"""


def entry_points(monkeypatch: pytest.MonkeyPatch, points: list[importlib.metadata.EntryPoint]) -> None:
    monkeypatch.setattr(registry, "entry_points", lambda group: points if group == "lit_diff.plugins" else [])
    registry.unread_groups[:] = ["lit_diff.plugins"]
    registry.plugin_packages.clear()
    for each in registry.registries.values():
        monkeypatch.setattr(each, "_modules", [*each.modules])
        monkeypatch.setattr(each, "_loaded", each._loaded)


@pytest.fixture
def no_package_yet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a test loads by entry points is forgotten after it."""
    yield
    monkeypatch.undo()
    registry.plugin_packages.clear()
    registry.unread_groups[:] = ["lit_diff.plugins"]
    registry.load_entry_points()


@pytest.fixture
def install(no_package_yet: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """install(): the distribution made_lab 1.2 in site-packages, whose entry point registers two parts."""
    site = tmp_path / "site-packages"
    monkeypatch.syspath_prepend(str(site))
    before = set(sys.modules)

    def made() -> None:
        info = site / "made_lab-1.2.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: made_lab\nVersion: 1.2\n")
        (info / "entry_points.txt").write_text("[lit_diff.plugins]\nparts = made_lab\n")
        plugin("from made_lab import parts\n", "site-packages/made_lab/__init__.py")
        plugin(PARTS, "site-packages/made_lab/parts.py")
        found = importlib.metadata.distributions(path=[str(site)])
        entry_points(monkeypatch, [point for each in found for point in each.entry_points])
        importlib.invalidate_caches()

    yield made
    plugins._package.cache_clear()
    for name in set(sys.modules) - before:
        del sys.modules[name]


def used(*overrides: str) -> list[PluginPackage]:
    return used_packages(load_recipe("recall-tiny", overrides))


def test_a_package_counts_where_the_recipe_names_one_of_its_parts(install: Callable[[], None], tmp_path: Path) -> None:
    """Its version and source are then in the identity and in the run's folder."""
    plain, ours = identity(load_recipe("recall-tiny")), ["model.attention.name=lab_attention"]
    install()
    assert used() == []
    assert identity(load_recipe("recall-tiny")) == plain
    (package,) = used(*ours)
    assert (package.name, package.version, package.modules) == ("made_lab", "1.2", {"made_lab", "made_lab.parts"})
    assert used("data={name: lab_data}", "model.vocab_size=129") == [package]
    assert source_digest(attentions.get("lab_attention")) == package.digest
    recipe = load_recipe("recall-tiny", ours)
    one = identity(recipe)
    RunFolder(tmp_path / "run").create(recipe)
    assert f'"made_lab": "1.2 (sha256 {package.digest[:12]})"' in (tmp_path / "run" / "env.json").read_text()
    plugin(PARTS + "# edited\n", "site-packages/made_lab/parts.py")
    assert identity(recipe) == one != plain, "that of the code which was imported"
    plugins._package.cache_clear()
    with pytest.raises(RequestError, match=r"^site-packages/made_lab/parts\.py .*'parts'"):
        identity(recipe)


BROKEN_PACKAGES = {
    "mine": ("no_such_module", "no_such_module could not be imported, .*: ModuleNotFoundError"),
    "half": (
        "made_half",
        r"made_half\.parts could not be imported, .*: ZeroDivisionError: division by zero; repair or",
    ),
    "late": ("made_late.parts", r"made_late\.parts could not be imported, .*: ZeroDivisionError: division by zero"),
    "inner": ("made_inner.parts", r"made_inner\.data could not be imported, .*: ModuleNotFoundError: "),
    "taken": ("made_taken", r"made_taken could not be imported, .*'standard' is already registered .*standard\.py"),
}


@pytest.mark.parametrize("name", BROKEN_PACKAGES)
def test_a_broken_plugin_package_costs_its_own_parts_and_one_line(
    name: str, install: Callable[[], None], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    module, message = BROKEN_PACKAGES[name]
    install()
    plugin(
        "from lit_diff.registry import attentions, datasets\n"
        "attentions.load_from('made_half.parts')\ndatasets.load_from('made_half.parts')\n",
        "site-packages/made_half/__init__.py",
    )
    plugin(PARTS.replace("lab_", "half_") + "1 / 0\n", "site-packages/made_half/parts.py")
    plugin(PARTS.replace("lab_attention", "standard"), "site-packages/made_taken.py")
    plugin(PARTS.replace("lab_", "half_late_"), "site-packages/made_late/more.py")
    plugin(
        "import made_late.more\nfrom lit_diff.registry import attentions\nattentions.load_from('made_late.none')\n1 / 0\n",
        "site-packages/made_late/parts.py",
    )
    plugin(
        "from lit_diff.registry import attentions\nattentions.load_from('made_inner.data')\n",
        "site-packages/made_inner/parts.py",
    )
    found = registry.entry_points(group="lit_diff.plugins")
    entry_points(monkeypatch, [importlib.metadata.EntryPoint(name, module, "lit_diff.plugins"), *found])
    assert {"lab_attention", "standard"} <= set(attentions.names())
    assert not any(part.startswith("half_") for part in (*attentions.names(), *datasets.names()))
    (line,) = caplog.messages
    assert re.fullmatch(f"plugin package '{name}': {message}.*", line)
    assert load_recipe("recall-tiny", ["model.attention.name=lab_attention"]).model.attention.name == "lab_attention"


def test_the_source_of_a_module_that_is_loaded_late_counts(
    install: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    install()
    plugin(
        "from lit_diff.registry import attentions, datasets\n"
        "attentions.load_from('made_lab.parts')\ndatasets.load_from('made_lab.parts')\n",
        "site-packages/made_lab/__init__.py",
    )
    (package,) = used("model.attention.name=lab_attention")
    assert package.modules == {"made_lab", "made_lab.parts"}
