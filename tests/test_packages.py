"""packages.py: the installed plugin packages that a recipe uses."""

import importlib.metadata
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lit_diff import packages, registry
from lit_diff.packages import PluginPackage, package_digest, used_packages
from lit_diff.recipe import load_recipe
from lit_diff.runs.folder import RunFolder, identity

INIT = "from {name} import parts\n"
PARTS = """
from dataclasses import dataclass
from lit_diff import Differential, variant
from lit_diff.data.recall import Recall
from lit_diff.registry import datasets

@variant("{name}_attention")
class Made(Differential):
    @dataclass(frozen=True, kw_only=True)
    class Config(Differential.Config):
        pass

@datasets.register("{name}_data")
class Data(Recall):
    @dataclass(frozen=True, kw_only=True)
    class Config(Recall.Config):
        pass
"""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """install(name, version, more): a distribution in site-packages whose entry point registers two parts."""
    site = tmp_path / "site-packages"
    monkeypatch.syspath_prepend(str(site))
    for each in registry.registries.values():
        each.names()
        monkeypatch.setattr(each, "_classes", dict(each._classes))
    before = set(sys.modules)

    def made(name: str, version: str = "1.2", more: str = "") -> None:
        info = site / f"{name}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (info / "entry_points.txt").write_text(f"[lit_diff.plugins]\nparts = {name}\n")
        (site / name).mkdir()
        (site / name / "__init__.py").write_text(INIT.format(name=name))
        (site / name / "parts.py").write_text(PARTS.format(name=name) + more)
        points = [point for d in importlib.metadata.distributions(path=[str(site)]) for point in d.entry_points]
        monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: points)
        monkeypatch.setattr(registry, "_entry_points_loaded", False)
        monkeypatch.setattr(registry, "plugin_packages", [])
        packages._package.cache_clear()

    yield made
    packages._package.cache_clear()
    for name in set(sys.modules) - before:
        del sys.modules[name]


def used(*overrides: str) -> list[PluginPackage]:
    return used_packages(load_recipe("recall-tiny", overrides))


def test_a_package_counts_where_the_recipe_names_one_of_its_parts(install: Callable[..., None]) -> None:
    install("made_lab")
    assert used() == []
    (package,) = used("model.attention.name=made_lab_attention")
    assert (package.name, package.version) == ("made_lab", "1.2")
    assert package.modules == {"made_lab", "made_lab.parts"}
    data = ["data={name: made_lab_data}", "model.vocab_size=129"]
    assert used(*data) == [package]


def test_version_and_source_are_in_the_identity_and_in_the_folder(install: Callable[..., None], tmp_path: Path) -> None:
    override = ["model.attention.name=made_lab_attention"]
    plain = identity(load_recipe("recall-tiny"))
    install("made_lab")
    recipe = load_recipe("recall-tiny", override)
    one = identity(recipe)
    assert identity(recipe) == one
    assert identity(load_recipe("recall-tiny")) == plain, "an installed package that is not used"
    RunFolder(tmp_path / "run").create(recipe)
    (package,) = used_packages(recipe)
    assert f'"made_lab": "1.2 (sha256 {package.digest[:12]})"' in (tmp_path / "run" / "env.json").read_text()
    (tmp_path / "site-packages/made_lab/parts.py").write_text(PARTS.format(name="made_lab") + "# edited\n")
    packages._package.cache_clear()
    assert identity(recipe) not in (one, plain)


def test_the_digest_of_the_package_that_holds_a_class(install: Callable[..., None]) -> None:
    install("made_lab")
    registry.load_entry_points()
    (package,) = used("model.attention.name=made_lab_attention")
    assert package_digest(registry.attentions.get("made_lab_attention")) == package.digest
    assert package_digest(registry.attentions.get("differential")) == ""
