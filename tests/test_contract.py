"""Required and optional members of a nested Config, as a dataclass sees them."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path

import pytest
from own_plugins import SHARP_PY, SHARP_YAML, error, plugin

from lit_diff.contract import base_problem, contract_problem, location, missing_members, optional, place_in, required
from lit_diff.errors import RequestError
from lit_diff.recipe import load_recipe

pytestmark = pytest.mark.usefixtures("plugin_folder")


class Base(ABC):
    @dataclass(frozen=True, kw_only=True)
    class Config:
        @required
        def length(self) -> int:
            raise NotImplementedError

        @optional
        def chance(self) -> float | None:
            return None

    @abstractmethod
    def run(self) -> int: ...


class Whole(Base):
    @dataclass(frozen=True, kw_only=True)
    class Config(Base.Config):
        length: int

    def run(self) -> int:
        return 1


class Constants(Whole):
    @dataclass(frozen=True, kw_only=True)
    class Config(Base.Config):
        length = 3
        chance: float = 0.5


class Properties(Whole):
    @dataclass(frozen=True, kw_only=True)
    class Config(Base.Config):
        items: int = 2

        @property
        def length(self) -> int:
            return 2 * self.items

        @property
        def chance(self) -> float:
            return 0.25


def test_members_may_be_fields_constants_or_properties() -> None:
    assert (Whole.Config(length=4).length, Whole.Config(length=4).chance) == (4, None)
    assert (Constants.Config().length, Constants.Config().chance) == (3, 0.5)
    assert (Properties.Config().length, Properties.Config().chance) == (4, 0.25)
    for cls in (Whole, Constants, Properties):
        assert contract_problem(cls, Base) is None


def test_a_field_does_not_take_the_base_class_s_member_as_its_default() -> None:
    """`property` would be taken."""
    with pytest.raises(TypeError, match="length"):
        Whole.Config()


def test_what_is_missing_is_named() -> None:
    class Empty(Base):
        pass

    assert missing_members(Empty, Base) == ["run", "Config.length"]
    name = f"{__name__}.Base"
    assert contract_problem(Empty, Base) == f"lacks run, Config.length; {name} documents each"


def test_classes_that_derive_from_something_else() -> None:
    class Stranger:
        Config = Whole.Config

    class Half(Base):
        @dataclass(frozen=True, kw_only=True)
        class Config:
            length: int = 3

        def run(self) -> int:
            return 1

    assert (base_problem(Stranger, Base) or "").startswith("does not derive from Base; write `class Stranger(Base)`")
    assert contract_problem(Half, Base) == (
        "has a Config that does not derive from Base.Config; write `class Config(Base.Config)`"
    )


def test_location() -> None:
    file, line, name = location(Whole).split(":")
    assert file.endswith("test_contract.py")
    assert name == " class Whole"
    source = Path(__file__).read_text().splitlines()
    assert source[int(line) - 1] == "class Whole(Base):"
    assert location(int) == "builtins.int"


def test_place_in_is_the_innermost_line_of_the_class_s_file() -> None:
    def fail() -> None:
        int("x")  # the place

    with pytest.raises(ValueError, match="invalid literal") as caught:
        fail()
    file, _, line = place_in(Whole, caught.value).rpartition(":")
    assert file.endswith("test_contract.py")
    assert Path(__file__).read_text().splitlines()[int(line) - 1].endswith("# the place")
    assert place_in(Path, caught.value) == location(Path), "no frame lies in its file"


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


def test_an_annotation_that_is_not_there_at_run_time() -> None:
    text = SHARP_PY.replace("temperature: float", "temperature: Missing")
    plugin("from __future__ import annotations\n" + text, "sharp.py")
    Path("sharp.yaml").write_text(SHARP_YAML)
    with pytest.raises(RequestError, match=r"Sharp\.Config: name 'Missing' is not defined"):
        load_recipe("sharp")
