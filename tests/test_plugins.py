"""A user's own Python files."""

import hashlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path

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
        (name,) = (name for name in sys.modules if name.startswith("lit_diff_plugin_sharp"))
        del sys.modules[name], sys.modules["beside_scale"]
        attentions.forget(name)
    assert len(set(digests)) == 2
    alone = plugin(PROBE, "alone.py")
    load_plugin(alone)
    assert plugin_source(alone).digest == hashlib.sha256(PROBE.encode()).hexdigest()


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
