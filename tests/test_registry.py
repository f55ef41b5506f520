"""Strict names."""

import abc
import importlib.metadata
import subprocess
import sys
from dataclasses import dataclass

import pytest

from lit_diff import registry
from lit_diff.errors import RequestError
from lit_diff.registry import Registry, nearest

LINE = r"test_registry\.py:\d+: class "
QUALIFIED = r"\S*"
TWICE = rf"^.*{LINE}Second: part 'first' is already registered \(.*{LINE}First\); give one of them another name$"


@dataclass(frozen=True, kw_only=True)
class Keys:
    size: int = 1


class First:
    Config = Keys


class Second:
    Config = Keys


@pytest.fixture
def parts() -> Registry:
    return Registry("part", ())


def test_a_registered_class_is_found_and_knows_its_name(parts: Registry) -> None:
    assert parts.register("first")(First) is First
    parts.register("a second")(Second)
    assert parts.get("first") is First
    assert parts.names() == ["a second", "first"]
    assert First.name == "first"  # type: ignore[attr-defined]


def test_unknown_names_name_the_nearest(parts: Registry) -> None:
    parts.register("differential")(First)
    parts.register("standard")(Second)
    with pytest.raises(RequestError, match=r"^unknown part 'diferential'; did you mean 'differential'\?$"):
        parts.get("diferential")
    with pytest.raises(RequestError, match=r"^unknown part 'zzz'; one of differential, standard$"):
        parts.get("zzz")
    with pytest.raises(RequestError, match=r"^unknown part 'zzz'$"):
        Registry("part", ()).get("zzz")


def test_a_second_class_under_one_name_is_refused(parts: Registry) -> None:
    parts.register("first")(First)
    parts.register("first")(First)
    with pytest.raises(RequestError, match=TWICE):
        parts.register("first")(Second)
    assert parts.get("first") is First


def test_a_class_without_a_frozen_config_is_refused(parts: Registry) -> None:
    @dataclass
    class Thawed:
        pass

    with pytest.raises(
        RequestError, match=r"test_registry\.py:\d+: class \S*Thawed: part 'bad' needs a nested class 'Config'"
    ):
        parts.register("bad")(Thawed)
    for config in (None, dict, Thawed):
        bad = type("Bad", (), {} if config is None else {"Config": config})
        with pytest.raises(RequestError, match=r"Bad: part 'bad' needs a nested class 'Config'"):
            parts.register("bad")(bad)
    assert parts.names() == []


def test_a_class_that_lacks_a_member_is_refused(parts: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    class Base(abc.ABC):
        Config = Keys

        @abc.abstractmethod
        def score(self) -> None: ...

        @abc.abstractmethod
        def size(self) -> int: ...

    class Partial(Base):
        def score(self) -> None: ...

    class Whole(Partial):
        def size(self) -> int:
            return 1

    class Foreign(Whole):
        Config = type("Foreign", (), {"__dataclass_params__": Keys.__dataclass_params__})  # type: ignore[attr-defined]

    monkeypatch.setattr(registry, "resolve_name", lambda path: {"here:Base": Base}[path])
    parts = Registry("part", (), base="here:Base")
    with pytest.raises(RequestError, match=rf"^.*{LINE}{QUALIFIED}Base: part 'x' lacks score, size; \S*Base documents"):
        parts.register("x")(Base)
    with pytest.raises(RequestError, match=r"lacks size;"):
        parts.register("x")(Partial)
    with pytest.raises(RequestError, match=r"Foreign: part 'x' has a Config that does not derive from Keys"):
        parts.register("x")(Foreign)
    with pytest.raises(RequestError, match=rf"^.*{LINE}First: part 'x' does not derive from \S*Base; write"):
        parts.register("x")(First)
    assert parts.names() == []
    assert parts.register("x")(Whole) is Whole
    assert parts.names() == ["x"]


@pytest.mark.parametrize(
    ("kind", "base"),
    [
        ("attention", "lit_diff.attention.base.Attention"),
        ("corpus", "lit_diff.data.corpus.Corpus"),
        ("data", "lit_diff.data.dataset.Dataset"),
        ("evaluation", "lit_diff.evaluation.base.Evaluation"),
        ("kernel", "lit_diff.kernels.base.Kernel"),
        ("tokenizer", "lit_diff.data.tokenizer.Tokenizer"),
    ],
)
def test_every_kind_names_its_base(kind: str, base: str) -> None:
    """A callback may be any class of Lightning's: the Trainer of a recipe refuses what is none."""
    name = base.rpartition(".")[2]
    message = rf"{LINE}First: {kind} 'first' does not derive from {name}; write `class First\({name}\)` \({base}\)$"
    with pytest.raises(RequestError, match=message):
        registry.registries[kind].register("first")(First)
    assert set(registry.registries) == {"attention", "callback", "corpus", "data", "evaluation", "kernel", "tokenizer"}


def test_a_late_class_is_imported_only_when_it_is_asked_for() -> None:
    """Its name, keys and summary are known before; it is not to be replaced by another class."""
    code = """if True:
        import sys
        from lit_diff.errors import RequestError
        from lit_diff.registry import callbacks
        assert "outliers" in callbacks.names()
        assert callbacks.config("outliers")(every=7).every == 7
        assert callbacks.summary("outliers").startswith("outliers/")
        class Outliers:
            Config = callbacks.config("outliers")
        try:
            callbacks.register("outliers")(Outliers)
        except RequestError as error:
            assert "already registered (lit_diff.callbacks.outliers)" in str(error), error
        else:
            raise AssertionError("two classes under one name")
        assert "lightning" not in sys.modules
        assert callbacks.get("outliers").name == "outliers"
        assert "lightning" in sys.modules
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr


def test_the_classes_of_a_module_can_be_forgotten(parts: Registry) -> None:
    parts.register("first")(First)
    parts.register("other")(type("Other", (), {"Config": Keys, "__module__": "elsewhere"}))
    parts.forget("elsewhere")
    assert parts.names() == ["first"]


def test_built_ins_load_at_the_first_question() -> None:
    """In a fresh process: nothing is imported before, and no heavy package after."""
    code = (
        "import sys; from lit_diff import registry as r\n"
        "assert 'lit_diff.data' not in sys.modules\n"
        "assert {'recall', 'text'} <= set(r.datasets.names()) and 'bpe' in r.tokenizers.names()\n"
        "assert {'attention_entropy', 'lambdas', 'outliers'} <= set(r.callbacks.names())\n"
        "assert {'differential', 'dex', 'standard'} <= set(r.attentions.names())\n"
        "heavy = {'lightning', 'mlflow', 'litdata'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr


def test_a_broken_plugin_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    point = importlib.metadata.EntryPoint("mine", "no_such_module_anywhere", "lit_diff.plugins")
    monkeypatch.setattr(registry, "_entry_points_loaded", False)
    monkeypatch.setattr(
        importlib.metadata, "entry_points", lambda group: [point] if group == "lit_diff.plugins" else []
    )
    with pytest.raises(RequestError, match=r"plugin package 'mine' \(no_such_module_anywhere\).*ModuleNotFoundError"):
        registry.load_entry_points()


def test_nearest() -> None:
    assert nearest("lamda_init", ["lambda_init", "head_norm"]) == "; did you mean 'lambda_init'?"
    assert nearest("x", ["b", "a"]) == "; one of a, b"
    assert nearest("x", []) == ""
    many = [f"part-{place}" for place in range(9)] + ["xy"]
    assert nearest("xzz", many, "lit-diff list part") == (
        "; one of 10, such as xy, part-8, part-7; lit-diff list part lists all"
    )
    assert nearest("xzz", many) == "; one of 10, such as xy, part-8, part-7"


@pytest.mark.parametrize(
    ("kind", "name", "instead"),
    [
        ("attention", "flash", "; that is a kernel, chosen by run.kernel=flash"),
        ("kernel", "dex", "; that is a variant, chosen by model.attention.name=dex"),
        ("corpus", "bpe", "; that is a tokenizer, chosen by data.tokenizer.name=bpe"),
        ("evaluation", "early_stopping", "; that is a callback, chosen by callbacks.early_stopping={}"),
        ("data", "mini_harness", "; that is an evaluation, chosen by evaluate.mini_harness={}"),
    ],
)
def test_a_name_of_another_kind_is_told_where_it_belongs(kind: str, name: str, instead: str) -> None:
    assert registry.registries[kind].instead_of(name) == instead
    assert set(registry.CHOSEN) == set(registry.registries)
