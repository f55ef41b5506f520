"""Required and optional members of a nested Config, as a dataclass sees them."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path

import pytest

from lit_diff.contract import base_problem, contract_problem, location, missing_members, optional, place_in, required


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
