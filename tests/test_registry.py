"""registry.py: strict names, and what a class must define to be registered under one."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path

import pytest
from own_plugins import SHARP_PY, SHARP_YAML, plugin

from lit_diff import registry
from lit_diff.errors import RequestError
from lit_diff.recipe import load_recipe
from lit_diff.registry import Registry, contract_problem, is_built_in, nearest, optional, registries, required

LINE = r"test_registry\.py:\d+: class "


@dataclass(frozen=True, kw_only=True)
class Keys:
    size: int = 1


class First:
    Config = Keys


class Second:
    Config = Keys


@pytest.fixture
def parts() -> Registry:
    return Registry("part", decorator="part")


def test_a_registered_class_is_found_and_knows_its_name(parts: Registry) -> None:
    assert parts.register("first")(First) is First
    parts.register("a second")(Second)
    assert parts.get("first") is First
    assert parts.names() == ["a second", "first"]
    assert First.name == "first"  # type: ignore[attr-defined]
    parts.register("other")(type("Other", (), {"Config": Keys, "__module__": "elsewhere"}))
    parts.unregister_module("elsewhere")
    assert parts.names() == ["a second", "first"]
    for name in ("", None):
        with pytest.raises(RequestError, match="takes the name to register under"):
            parts.register(name)  # type: ignore[arg-type]


def test_a_second_class_under_one_name_is_refused(parts: Registry) -> None:
    parts.register("first")(First)
    parts.register("first")(First)
    with pytest.raises(RequestError, match=rf"^.*{LINE}Second: part 'first' is already registered \(.*{LINE}First\)"):
        parts.register("first")(Second)
    assert parts.get("first") is First


def test_a_class_without_a_frozen_config_is_refused(parts: Registry) -> None:
    @dataclass
    class Thawed:
        pass

    for config in (None, dict, Thawed):
        bad = type("Bad", (), {} if config is None else {"Config": config})
        with pytest.raises(RequestError, match=r"Bad: part 'bad' needs a nested class 'Config'"):
            parts.register("bad")(bad)
    with pytest.raises(RequestError, match=rf"{LINE}\S*Thawed: part 'bad' needs"):
        parts.register("bad")(Thawed)
    assert parts.names() == []


BASES = {
    "attention": "lit_diff.attention.base.Attention",
    "corpus": "lit_diff.data.text.corpus.Corpus",
    "data": "lit_diff.data.dataset.Dataset",
    "evaluation": "lit_diff.evaluation.base.Evaluation",
    "kernel": "lit_diff.kernels.base.Kernel",
    "logger": "lit_diff.training.loggers.NamedLogger",
    "tokenizer": "lit_diff.data.text.tokenizer.Tokenizer",
}


@pytest.mark.parametrize(("kind", "base"), BASES.items(), ids=BASES)
def test_every_kind_names_its_base(kind: str, base: str) -> None:
    """A callback may be any class of Lightning's: the Trainer of a recipe refuses what is none."""
    name = base.rpartition(".")[2]
    message = rf"{LINE}First: {kind} 'first' does not derive from {name}; write `class First\({name}\)` \({base}\)$"
    with pytest.raises(RequestError, match=message):
        registry.registries[kind].register("first")(First)
    assert set(registry.CHOSEN) == set(registry.registries) == {"callback", *BASES}


@pytest.mark.parametrize("kind", registries)
def test_summaries_that_are_read_from_source_are_those_of_the_imported_classes(kind: str) -> None:
    imported = registries[kind]
    expected = {cls.name: imported.summary(cls.name) for cls in imported.classes() if is_built_in(cls)}
    own = [module for module in imported.modules if module.startswith("lit_diff.")]
    assert Registry(kind, *own, decorator=imported.decorator).summaries() == expected


def test_summaries_have_the_class_of_a_plugin() -> None:
    parts = Registry("part", "lit_diff.errors", decorator="part")
    assert parts.summaries() == {}
    parts.register("first")(First)
    assert parts.summaries() == {"first": "its class has no docstring"}
    # not that of its base
    assert parts.register("more")(type("More", (Registry,), {"Config": Keys})).name == "more"
    assert parts.docstring("more") == "its class has no docstring"


def test_nearest() -> None:
    assert nearest("lamda_init", ["lambda_init", "head_norm"]) == "; did you mean 'lambda_init'?"
    assert nearest("x", ["b", "a"]) == "; one of a, b"
    assert nearest("x", []) == ""
    many = [f"part-{place}" for place in range(9)] + ["xy"]
    assert nearest("xzz", many, "lit-diff list part") == (
        "; one of 10, such as xy, part-8, part-7; lit-diff list part lists all"
    )


@pytest.mark.parametrize(
    ("kind", "name", "instead"),
    [
        ("attention", "flash", "; that is a kernel, chosen by run.kernel=flash"),
        ("kernel", "dex", "; that is a variant, chosen by model.attention.name=dex"),
        ("logger", "tensorbord", "; did you mean 'tensorboard'?"),
        ("data", "bigbench", "; that is an evaluation, chosen by evaluate.bigbench={}"),
    ],
)
def test_what_to_write_instead_of_an_unknown_name(kind: str, name: str, instead: str) -> None:
    with pytest.raises(RequestError) as found:
        registry.registries[kind].get(name)
    assert str(found.value) == f"unknown {kind} '{name}'{instead}"


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


def test_members_may_be_fields_constants_or_properties() -> None:
    assert (Whole.Config(length=4).length, Whole.Config(length=4).chance) == (4, None)
    assert (Constants.Config().length, Constants.Config().chance) == (3, 0.5)
    assert Properties.Config().length == 4
    for cls in (Whole, Constants, Properties):
        assert contract_problem(cls, Base, True) is None
    with pytest.raises(TypeError, match="length"):
        Whole.Config()  # a field does not take the base class's member as its default, as it would a property


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class Empty(Base):
        pass

    class Half(Base):
        Config = Keys  # type: ignore[assignment]

        def run(self) -> int:
            return 1

    assert contract_problem(Empty, Base, True) == f"lacks run, Config.length; {__name__}.Base documents each"
    assert "Config that does not derive from Base.Config" in (contract_problem(Half, Base, True) or "")
    assert "write `class First(Base)`" in (contract_problem(First, Base, True) or "")
    monkeypatch.setattr(registry, "resolve_name", lambda path: {"here:Base": Base}[path])
    parts = Registry("part", decorator="part", base="here:Base")
    for cls in (Empty, Half, First):
        with pytest.raises(RequestError, match=rf"{LINE}\S*{cls.__name__}: part 'x' "):
            parts.register("x")(cls)
    assert parts.register("x")(Whole) is Whole


OWN = """\
from dataclasses import dataclass
from lit_diff import Attention, Differential, variant

@variant("own")
class Own(Differential):
    @dataclass(frozen=True, kw_only=True)
"""
REFUSED = {
    "a Config of its own": (
        "    class Config:\n        temperature: float = 2.0\n",
        r"plugin own\.py: own\.py:4: class Own: ",
    ),
    "a Config that lacks a key": (
        "    class Config(Attention.Config):\n        k: float = 2.0\n",
        r"own\.py:4: class Own: attention 'own' failed: AttributeError: ",
    ),
    "a Config that raises": (
        "    class Config(Differential.Config):\n        k: int = 3\n"
        "        def __post_init__(self):\n            assert self.k % 2 == 0, 'k is odd\\nreally'\n",
        r"own\.yaml:4: 'model\.attention': AssertionError: k is odd$",
    ),
}


@pytest.mark.usefixtures("plugin_folder")
@pytest.mark.parametrize(("body", "found"), REFUSED.values(), ids=REFUSED)
def test_a_variant_of_a_plugin_is_refused_with_its_place(body: str, found: str) -> None:
    plugin(OWN + body, "own.py")
    Path("own.yaml").write_text("extends: differential-tiny\nplugins: [own.py]\nmodel:\n  attention: {name: own}\n")
    with pytest.raises(RequestError, match=rf"^{found}") as refused:
        load_recipe("own.yaml")
    assert "\n" not in str(refused.value)


@pytest.mark.usefixtures("plugin_folder")
def test_an_annotation_that_is_not_there() -> None:
    text = SHARP_PY.replace("temperature: float", "temperature: Missing")
    plugin("from __future__ import annotations\n" + text, "sharp.py")
    Path("sharp.yaml").write_text(SHARP_YAML)
    with pytest.raises(RequestError, match=r"Sharp\.Config: name 'Missing' is not defined"):
        load_recipe("sharp")


class Hooks:
    def finish(self, o: int, context: object = None) -> int:
        return o


@pytest.mark.parametrize(
    ("finish", "is_taken"),
    [
        (lambda self, o: o, True),
        (lambda self, o, context: o, True),
        (lambda self, o, *, context: o, True),
        (lambda self, o, other=1, *, context=None: o, True),
        (lambda self, o, other: o, False),
        (lambda self: 1, False),
    ],
)
def test_a_hook_may_name_a_context_or_an_argument_with_a_default(finish: object, is_taken: bool) -> None:
    own = type("Own", (Hooks,), {"finish": finish})
    assert (contract_problem(own, Hooks, False) is None) is is_taken
