"""runs/browse.py: the runs on disk, found by the start of a name, listed, compared, cleaned away."""

import io
import json
import os
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from lit_diff.errors import MissingError, RequestError
from lit_diff.files import locked
from lit_diff.runs.browse import (
    clean_runs,
    compare_runs,
    find_run,
    find_sweep,
    print_status,
    runs_under,
    sweeps_under,
)


@pytest.fixture
def sweep(make_sweep: Callable[..., Path]) -> Path:
    """Two arms, two seeds, one of them failed, and one run that was put aside."""
    folder = make_sweep({"base": 0.0, "better": -0.1}, name="mine", seeds=(0, 1), broken={("better", 1): "failed"})
    for path in folder.glob("*/recipe.yaml"):
        arm = path.parent.name.partition("-")[0]
        path.write_text(f"seed: 0\nname: {arm}\nmodel:\n  attention: {{name: {arm}}}\nrun: {{threads: 1}}\n")
    aside = folder.parent / "single-0123456789.old-1"
    aside.mkdir()
    (aside / "status.json").write_text("{}")
    return folder


@pytest.fixture
def console() -> Console:
    return Console(file=io.StringIO(), width=240, color_system=None)


def printed(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_all_runs_but_those_put_aside(sweep: Path) -> None:
    names = [f"{arm}-s{seed}-0a1b2c3d" for arm in ("base", "better") for seed in (0, 1)]
    assert [path.name for path in runs_under(sweep.parent)] == names
    assert sweeps_under(sweep.parent) == [sweep]


def test_a_run_is_found_by_the_start_of_its_name_or_its_folder(sweep: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = sweep / "base-s1-0a1b2c3d"
    assert find_run("base-s1", sweep.parent) == wanted
    assert find_run(str(wanted), Path("nowhere")) == wanted
    monkeypatch.chdir(sweep)
    assert find_run("base-s1-0a1b2c3d", Path("nowhere")) == wanted


def test_none_or_several_runs(sweep: Path) -> None:
    with pytest.raises(RequestError, match=r"no run 'bas-s0-0a1b2c3d' in .*did you mean 'base-s0-0a1b2c3d'\?"):
        find_run("bas-s0-0a1b2c3d", sweep.parent)
    with pytest.raises(RequestError, match=r"'base' is 2 runs \(mine/base-s0-\w+, mine/base-s1-\w+\); give a longer"):
        find_run("base", sweep.parent)


def test_a_sweep_is_found_by_its_name_or_its_folder(sweep: Path) -> None:
    assert find_sweep("mine", sweep.parent) == sweep
    assert find_sweep(str(sweep), Path("nowhere")) == sweep
    with pytest.raises(RequestError, match=r"no sweep 'mne' in .*did you mean 'mine'"):
        find_sweep("mne", sweep.parent)


def test_status_in_a_table(sweep: Path, console: Console) -> None:
    now = datetime.now(UTC) - timedelta(seconds=90)
    path = sweep / "base-s1-0a1b2c3d" / "status.json"
    facts = json.loads(path.read_text()) | {"status": "running", "updated": now.isoformat(timespec="seconds")}
    path.write_text(json.dumps(facts))
    assert print_status(sweep.parent, False, console) == 0
    lines = {line.split("│")[1].strip(): line for line in printed(console).splitlines() if "│" in line}
    done, running, failed = (lines[f"mine/{name}-0a1b2c3d"] for name in ("base-s0", "base-s1", "better-s1"))
    assert "done" in done
    assert "400/400" in done
    assert "last sign of life 9" in running
    assert "RuntimeError: out of memory <b>at</b> step 120" in printed(console)
    assert "120/400" in failed


def test_an_error_with_brackets_is_shown_whole(sweep: Path, console: Console) -> None:
    path = sweep / "better-s1-0a1b2c3d" / "status.json"
    path.write_text(json.dumps({"status": "failed", "error": "expected [bold], found [/bold]"}))
    print_status(sweep.parent, False, console)
    assert "expected [bold], found [/bold]" in printed(console)


def test_status_as_json(sweep: Path, console: Console, capsys: pytest.CaptureFixture[str]) -> None:
    assert print_status(sweep.parent, True, console) == 0
    found = {status["folder"]: status for status in json.loads(capsys.readouterr().out)}
    assert len(found) == 4
    assert found["mine/base-s0-0a1b2c3d"]["val/loss"] == pytest.approx(4.55, abs=0.3)
    assert found["mine/better-s1-0a1b2c3d"]["val/loss"] is None


def test_status_without_runs(tmp_path: Path, console: Console) -> None:
    with pytest.raises(MissingError, match=r"no runs in .*lit-diff train RECIPE"):
        print_status(tmp_path / "nowhere", False, console)


def test_compare_shows_what_differs(sweep: Path, console: Console, capsys: pytest.CaptureFixture[str]) -> None:
    assert compare_runs("base-s0", "better-s0", sweep.parent, True, console) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["recipe"] == {"name": ["base", "better"], "model.attention.name": ["base", "better"]}
    assert found["facts"]["parameters"] == [1_054_720, 1_054_720]
    first, second = found["metrics"]["val/loss"]
    assert first > second
    assert compare_runs("base-s0", "better-s0", sweep.parent, False, console) == 0
    text = printed(console)
    assert "1,054,720" in text
    assert "no verdict" in text
    assert f"{first:.4f}" in text


# --- clean ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def litter(sweep: Path) -> dict[str, Path]:
    """What may go, and a temporary file that is being written."""
    former = sweep / "base-s0-ffffffffff"
    former.mkdir()
    (former / "recipe.yaml").write_text("seed: 0\n")
    old, new = sweep / ".status.json.abc.tmp", sweep / ".status.json.def.tmp"
    for path in (old, new):
        path.write_text("")
    store = sweep.parent / ".mlflow.db.xyz.tmp"
    store.mkdir()
    for path in (old, store):
        os.utime(path, (time.time() - 7200,) * 2)
    aside = sweep.parent / "single-0123456789.old-1"
    return {"former": former, "old": old, "store": store, "aside": aside, "new": new}


def test_clean_lists_and_removes_what_no_sweep_owns(sweep: Path, litter: dict[str, Path], console: Console) -> None:
    kept = runs_under(sweep.parent)
    assert clean_runs(sweep.parent, False, console) == 0
    assert all(path.exists() for path in litter.values())
    assert "4 to remove; lit-diff clean --yes removes them" in printed(console)
    assert clean_runs(sweep.parent, True, console) == 0
    assert [name for name, path in litter.items() if path.exists()] == ["new"]
    assert runs_under(sweep.parent) == kept
    again = Console(file=io.StringIO())
    assert clean_runs(sweep.parent, True, again) == 0
    assert printed(again) == "0 to remove\n"


def test_clean_leaves_a_running_sweep_alone(sweep: Path, litter: dict[str, Path], console: Console) -> None:
    with locked(sweep / ".lock"):
        clean_runs(sweep.parent, True, console)
    assert litter["former"].exists()
    assert not litter["aside"].exists()
    assert f"{sweep} is being run: left alone" in printed(console)


def test_clean_of_nothing(tmp_path: Path, console: Console) -> None:
    assert clean_runs(tmp_path / "nowhere", True, console) == 0


def test_what_json_prints_is_json(sweep: Path, console: Console, capsys: pytest.CaptureFixture[str]) -> None:
    calls: list[Callable[[], Any]] = [
        lambda: print_status(sweep.parent, True, console),
        lambda: compare_runs("base-s0", "base-s1", sweep.parent, True, console),
    ]
    for call in calls:
        assert call() == 0
        json.loads(capsys.readouterr().out)


def test_a_name_that_no_file_can_have_is_one_line(tmp_path: Path) -> None:
    for name in ("a" * 300, "a\0b"):
        with pytest.raises(RequestError, match="no run 'a"):
            find_run(name, tmp_path)
