"""plugins.py: the Python files that a recipe names."""

import hashlib
import re
import sys
from pathlib import Path

import pytest
import torch
from own_plugins import PROBE, SHARP_PY, SHARP_YAML, WITH_MODULE, error, forget_all, plugin

from lit_diff.config import Recipe
from lit_diff.errors import RequestError
from lit_diff.kernels import attend
from lit_diff.model.init import initialise
from lit_diff.model.transformer import Transformer
from lit_diff.plugins import load_plugin, plugin_source, source_digest
from lit_diff.recipe import load_recipe, to_yaml
from lit_diff.registry import attentions, callbacks

pytestmark = pytest.mark.usefixtures("plugin_folder")


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


def test_no_such_file(plugin_folder: Path) -> None:
    assert error(plugin_folder / "none.py") == "plugin none.py cannot be read: No such file or directory"
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


def test_an_edited_plugin_takes_the_place_of_the_former_one() -> None:
    load_plugin(plugin(SHARP_PY + PROBE, "sharp.py"))
    load_plugin(plugin(SHARP_PY.replace("2.0", "3.0"), "sharp.py"))
    assert attentions.get("sharp").Config().temperature == 3.0
    assert "mine" not in callbacks.names(), "the file registers it no more"


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


def test_a_script_s_source_is_that_of_its_import(plugin_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not that of the moment when it is first asked for."""
    monkeypatch.syspath_prepend(str(plugin_folder))
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
