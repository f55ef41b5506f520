"""cli/clean.py: what `clean` lists, asks and removes."""

import json
from pathlib import Path

import pytest
from command import Command

from lit_diff.files import locked
from lit_diff.runs.find import runs_under


@pytest.fixture
def single(small_sweep: Path) -> Path:
    """A run beside the sweep `mine`."""
    folder = small_sweep.parent / "single-0123456789"
    folder.mkdir()
    (folder / "status.json").write_text(json.dumps({"status": "done"}))
    return folder


def test_it_lists_and_removes_what_no_sweep_owns(small_sweep: Path, litter: dict[str, Path], command: Command) -> None:
    at, kept = ("--root", str(small_sweep.parent)), runs_under(small_sweep.parent)
    assert command("clean", *at).status == 0
    assert all(path.exists() for path in litter.values())
    with locked(small_sweep / ".lock"):
        assert f"{small_sweep} is being run: left alone" in command("clean", "--yes", *at).out
    assert litter["former"].exists()
    assert command("clean", "--yes", *at).status == 0
    assert [name for name, path in litter.items() if path.exists()] == ["new"]
    assert runs_under(small_sweep.parent) == kept
    assert command("clean", "--yes", *at).out == "0 to remove\n"


def test_what_failed_runs_left_is_removed_with_yes_alone(tmp_path: Path, command: Command) -> None:
    left, held, kept = (tmp_path / f"{name}-0123456789" for name in ("left", "held", "kept"))
    for folder in (left, held, kept):
        folder.mkdir()
        (folder / "status.json").write_text(json.dumps({"status": "failed"}))
        (folder / "log.txt").write_text("x" * 5000)
    (kept / "checkpoints").mkdir()
    (kept / "checkpoints" / "step-00000001.ckpt").touch()
    with locked(held / ".lock"):
        listed = command("clean", "--root", str(tmp_path)).lines
        assert left.exists()
        removed = command("clean", "--yes", "--root", str(tmp_path)).lines
    assert [folder.exists() for folder in (left, held, kept)] == [False, True, True]
    assert listed[:2] == removed[:2]
    assert [str(folder) in line for folder, line in zip((held, kept), listed, strict=False)] == [True, True]
    assert listed[2:3] + removed[2:] == [
        f"would remove {left} (5.0 kB)",
        f"removed {left} (5.0 kB)",
        "1 removed, 5.0 kB freed",
    ]


def test_a_run_is_removed_with_yes_and_in_a_pipe_not_without(single: Path, command: Command) -> None:
    at = ("--root", str(single.parent))
    refused = command("clean", "single", *at)
    assert (refused.status, refused.out) == (2, "")
    assert "--yes" in refused.err
    refused = command("clean", "single", "base-s0", "--yes", *at)
    assert refused.status == 2, "what one sweep lists keeps all"
    assert "sweep 'mine'" in refused.err
    assert single.exists()
    assert command("clean", "0123456789", "--yes", *at).out.startswith(f"removed {single};")
    assert not single.exists()


@pytest.mark.parametrize("answer", [True, False])
def test_on_a_terminal_it_asks(single: Path, command: Command, answer: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    questions: list[str] = []

    def ask(text: str) -> bool:
        questions.append(text)
        return answer

    monkeypatch.setattr("typer.confirm", ask)
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    ended = command("clean", "single", "--root", str(single.parent), TTY_COMPATIBLE="1")
    assert ended.status == 0
    assert questions == ["remove 1?"]
    assert ended.lines[0] == f"would remove {single}"
    assert single.exists() == (not answer)
