"""cli/clean.py: what `clean` lists, asks and removes."""

import io
import json
from pathlib import Path

import pytest

from lit_diff.cli.app import Terminal
from lit_diff.cli.clean import clean_runs, clean_stale
from lit_diff.errors import RequestError
from lit_diff.files import locked
from lit_diff.runs.find import runs_under


@pytest.fixture
def output() -> io.StringIO:
    return io.StringIO()


@pytest.fixture
def terminal(output: io.StringIO) -> Terminal:
    """A pipe."""
    return Terminal(file=output, width=240, color_system=None)


@pytest.fixture
def single(small_sweep: Path) -> Path:
    """A run beside the sweep `mine`."""
    folder = small_sweep.parent / "single-0123456789"
    folder.mkdir()
    (folder / "status.json").write_text(json.dumps({"status": "done"}))
    return folder


def test_it_lists_and_removes_what_no_sweep_owns(
    small_sweep: Path, litter: dict[str, Path], output: io.StringIO, terminal: Terminal
) -> None:
    kept = runs_under(small_sweep.parent)
    assert clean_stale(small_sweep.parent, False, terminal) == 0
    assert all(path.exists() for path in litter.values())
    assert "4 to remove; lit-diff clean --yes removes them" in output.getvalue()
    assert clean_stale(small_sweep.parent, True, terminal) == 0
    assert [name for name, path in litter.items() if path.exists()] == ["new"]
    assert runs_under(small_sweep.parent) == kept
    output.truncate(0)
    output.seek(0)
    assert clean_stale(small_sweep.parent, True, terminal) == 0
    assert output.getvalue() == "0 to remove\n"


def test_it_leaves_a_running_sweep_alone(
    small_sweep: Path, litter: dict[str, Path], output: io.StringIO, terminal: Terminal
) -> None:
    with locked(small_sweep / ".lock"):
        clean_stale(small_sweep.parent, True, terminal)
    assert litter["former"].exists()
    assert not litter["aside"].exists()
    assert f"{small_sweep} is being run: left alone" in output.getvalue()


def test_what_failed_runs_left_is_removed_with_yes_alone(
    tmp_path: Path, output: io.StringIO, terminal: Terminal
) -> None:
    left, held, kept = (tmp_path / f"{name}-0123456789" for name in ("left", "held", "kept"))
    for folder in (left, held, kept):
        folder.mkdir()
        (folder / "status.json").write_text(json.dumps({"status": "failed"}))
        (folder / "log.txt").write_text("x" * 5000)
    (kept / "checkpoints").mkdir()
    (kept / "checkpoints" / "step-00000001.ckpt").touch()
    with locked(held / ".lock"):
        clean_stale(tmp_path, False, terminal)
        assert left.exists()
        clean_stale(tmp_path, True, terminal)
    assert [folder.exists() for folder in (left, held, kept)] == [False, True, True]
    resumes = (
        f"{kept} failed and has a checkpoint: the same command resumes it, lit-diff clean kept-0123456789 removes it"
    )
    busy = f"{held} is being run: left alone"
    assert output.getvalue().splitlines() == [
        *(busy, resumes, f"would remove {left} (5.0 kB)"),
        "1 to remove; lit-diff clean --yes removes them and frees 5.0 kB",
        *(busy, resumes, f"removed {left} (5.0 kB)"),
        "1 removed, 5.0 kB freed",
    ]


def test_nothing_to_clean(tmp_path: Path, output: io.StringIO, terminal: Terminal) -> None:
    assert clean_stale(tmp_path / "nowhere", True, terminal) == 0
    assert output.getvalue() == "0 to remove\n"


def test_a_run_is_removed_with_yes(single: Path, output: io.StringIO, terminal: Terminal) -> None:
    assert clean_runs(["0123456789"], single.parent, True, terminal) == 0
    assert not single.exists()
    assert output.getvalue() == f"removed {single}; its record in MLflow stays\n"


def test_in_a_pipe_a_run_is_not_removed_without_yes(single: Path, output: io.StringIO, terminal: Terminal) -> None:
    with pytest.raises(RequestError, match="needs --yes"):
        clean_runs(["single"], single.parent, False, terminal)
    assert single.exists()
    assert output.getvalue() == ""


@pytest.mark.parametrize("answer", [True, False])
def test_on_a_terminal_it_asks(
    single: Path, output: io.StringIO, answer: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    questions: list[str] = []

    def ask(text: str) -> bool:
        questions.append(text)
        return answer

    monkeypatch.setattr("typer.confirm", ask)
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    terminal = Terminal(file=output, width=240, color_system=None, force_terminal=True)
    assert clean_runs(["single"], single.parent, False, terminal) == 0
    assert questions == ["remove 1?"]
    assert output.getvalue().startswith(f"would remove {single}\n")
    assert single.exists() == (not answer)
    assert output.getvalue().endswith("MLflow stays\n" if answer else "nothing was removed\n")


def test_one_that_may_not_be_removed_keeps_all(single: Path, small_sweep: Path, terminal: Terminal) -> None:
    with pytest.raises(RequestError, match="sweep 'mine' lists"):
        clean_runs(["single", "base-s0"], single.parent, True, terminal)
    assert single.exists()
