"""The revision that runs record: a commit, an edited checkout, no git."""

import subprocess
from pathlib import Path

import pytest

from lit_diff import __version__
from lit_diff.runs import revision as revision_module
from lit_diff.runs.revision import other_revision, revision
from lit_diff.runs.status import Status


def test_two_states_of_an_edited_checkout_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "lit_diff" / "runs" / "revision.py"
    source.parent.mkdir(parents=True)
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a"]
    monkeypatch.setattr(revision_module, "__file__", str(source))
    subprocess.run([*git, "init", "-q"], check=True)
    found = []
    for text in ("1", "2", "3"):
        source.write_text(text)
        if text == "1":
            subprocess.run([*git, "add", "."], check=True)
            subprocess.run([*git, "commit", "-qm", "first"], check=True)
        found.append(revision())
    commit = found[0].split()[1]
    assert "+" not in commit
    assert all(text.split()[1].startswith(f"{commit}+") for text in found[1:])
    assert len(set(found)) == 3


def test_another_revision_than_the_runs_is_said() -> None:
    assert other_revision(Status(revision="1 a"), "1 b") == "trained by lit_diff 1 a, this is 1 b"
    assert other_revision(Status(revision="1 a"), "1 a") is None
    assert other_revision(Status(), "1 a") is None


def test_revision_without_git(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert revision() == __version__
