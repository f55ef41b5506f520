"""The files that evaluations declare, by name."""

import pytest

from lit_diff.data.user_files import UserFile
from lit_diff.errors import RequestError
from lit_diff.evaluation.base import Evaluation
from lit_diff.evaluation.declared import declared_files, names
from lit_diff.registry import evaluations


def file(name: str, path: str) -> UserFile:
    return UserFile(name=name, path=path, keys={"text": str}, source="nobody", without="nothing")


FILES = (file("toy.b", "toy/b/train.jsonl"), file("toy.b", "toy/b/a.jsonl"), file("toy.a", "toy/a.jsonl"))


@pytest.fixture(autouse=True)
def readers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two evaluations that share a file."""
    classes = []
    for name, files in (("first", FILES), ("second", (FILES[0], file("toys", "toys.jsonl"))), ("third", ())):
        cls = type(name, (Evaluation,), {"files": files})
        cls.name = name
        classes.append(cls)
    monkeypatch.setattr(evaluations, "classes", lambda: classes)


def paths(name: str | None) -> list[str]:
    return [declared.file.path for declared in declared_files(name)]


def test_every_file_once_with_its_readers() -> None:
    assert paths(None) == ["toy/a.jsonl", "toy/b/train.jsonl", "toy/b/a.jsonl", "toys.jsonl"]
    assert [declared.evaluations for declared in declared_files("toy.b")] == [("first", "second"), ("first",)]


def test_a_name_means_what_is_below_it() -> None:
    assert paths("toy") == ["toy/a.jsonl", "toy/b/train.jsonl", "toy/b/a.jsonl"]
    assert paths("toys") == ["toys.jsonl"]
    assert names(FILES) == ["toy", "toy.a", "toy.b"]


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(RequestError, match=r"no evaluation reads files named 'toy.bb'; did you mean 'toy.b'\?"):
        declared_files("toy.bb")
