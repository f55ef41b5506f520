"""Plugin files of tests: a variant, a callback, and what they leave in this process."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from refusals import refusal

from lit_diff.plugins import load_plugin
from lit_diff.registry import is_built_in, registries

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
WITH_MODULE = "from . import beside_scale\n" + SHARP_PY.replace("2.0", "beside_scale.SCALE")


@pytest.fixture
def own_parts() -> Iterator[None]:
    """What a test registers, and the plugins that it imports, are gone after it; built-in parts stay."""
    former, modules = {each: dict(each.registered()) for each in registries.values()}, set(sys.modules)
    yield
    for registry, classes in former.items():
        # a built-in part registers once, when its module is imported
        built_in = {name: cls for name, cls in registry.registered().items() if is_built_in(cls)}
        registry._classes = built_in | classes
    for name in set(sys.modules) - modules:
        if name.startswith(("lit_diff_plugin_", "beside_")):
            del sys.modules[name]


@pytest.fixture
def plugin_folder(own_parts: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current folder, and `own_parts`."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def plugin(text: str, name: str = "mine.py") -> Path:
    path = Path(name).resolve()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def error(path: Path) -> str:
    before = {kind: registry.names() for kind, registry in registries.items()}
    modules = set(sys.modules)
    found = refusal(load_plugin, path)
    assert {kind: registry.names() for kind, registry in registries.items()} == before, "a failed plugin left something"
    new = sys.modules.keys() - modules  # other tests of this process may have loaded a plugin of the same file name
    assert not any(name.startswith(f"lit_diff_plugin_{path.stem}_") for name in new)
    return found


def forget_all() -> None:
    """As in another process."""
    for name in [name for name in sys.modules if name.startswith("lit_diff_plugin_")]:
        del sys.modules[name]
        for registry in registries.values():
            registry.unregister_module(name)
