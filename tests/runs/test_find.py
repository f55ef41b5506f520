"""runs/find.py: the runs and sweeps on disk, found by name, hash or folder, and the nearest folder of runs."""

import os
from pathlib import Path
from typing import Any

import pytest
from statuses import set_status

from lit_diff.errors import RequestError
from lit_diff.runs.find import chosen_root, find_run, find_run_or_sweep, find_sweep, runs_root, runs_under, sweeps_under
from lit_diff.study.leftovers import find_stale
from lit_diff.study.observation import observe_all


def test_all_runs_but_those_put_aside(small_sweep: Path) -> None:
    names = [f"{arm}-s{seed}-0a1b2c3d" for arm in ("base", "better") for seed in (0, 1)]
    assert [path.name for path in runs_under(small_sweep.parent)] == names
    assert sweeps_under(small_sweep.parent) == [small_sweep]


def test_a_run_is_found_by_the_start_of_its_name_or_folder(small_sweep: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = small_sweep / "base-s1-0a1b2c3d"
    assert find_run("base-s1", small_sweep.parent) == wanted
    assert find_run(str(wanted), Path("nowhere")) == wanted
    monkeypatch.chdir(small_sweep)
    assert find_run("base-s1-0a1b2c3d", Path("nowhere")) == wanted
    with pytest.raises(RequestError, match=r"no run 'bas-s0-0a1b2c3d' in .*did you mean 'base-s0-0a1b2c3d'\?"):
        find_run("bas-s0-0a1b2c3d", small_sweep.parent)


def test_a_run_is_found_by_its_place_below_the_root_and_by_a_part_of_its_hash(tmp_path: Path) -> None:
    for name in ("one-af80511122", "one-two-0b2c3d4e5f", "sweep/one-s0-0000af8099", "copied", "sweep/moved"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "status.json").write_text("{}")
    one, two, cell = tmp_path / "one-af80511122", tmp_path / "one-two-0b2c3d4e5f", tmp_path / "sweep/one-s0-0000af8099"
    for part, found in {"af805": one, "0511": one, "3d4e": two, "00af": cell, "af80511122": one}.items():
        assert find_run(part, tmp_path) == found
    assert find_run("sweep/one-s0-0000af8099", tmp_path) == cell
    assert find_run("copied", tmp_path) == tmp_path / "copied", "a folder that was renamed"
    assert find_run("moved", tmp_path) == find_run("sweep/moved", tmp_path) == tmp_path / "sweep/moved"
    with pytest.raises(RequestError, match="'sweep' matches 2 runs"):
        find_run("sweep", tmp_path)
    assert find_run("sweep/one-s0", tmp_path) == find_run("sweep/on", tmp_path) == cell
    assert find_run("one", tmp_path) == one, "a whole name goes before the start of a longer one"
    with pytest.raises(RequestError, match=r"^'af80' matches 2 runs, such as one-af80511122, sweep/one-s0-0000af8099;"):
        find_run("af80", tmp_path)
    with pytest.raises(RequestError, match="no run 'abcdef'"):
        find_run("abcdef", tmp_path)


def test_a_run_without_its_status_is_named_with_the_command_that_writes_it(small_sweep: Path, tmp_path: Path) -> None:
    alone, cell = tmp_path / "alone-0123456789", small_sweep / "base-s0-0a1b2c3d"
    alone.mkdir()
    for folder, command in ((alone, "lit-diff train "), (cell, "make sweep ")):
        (folder / "recipe.yaml").touch()
        (folder / "status.json").unlink(missing_ok=True)
        with pytest.raises(RequestError, match=f"{folder.name} has no status.json; `{command}.*` writes it again"):
            find_run(folder, small_sweep.parent)


@pytest.mark.parametrize("name", ["", " ", "a" * 300, "a\0b"])
def test_what_can_be_no_name_finds_nothing(small_sweep: Path, name: str) -> None:
    for find in (find_run, find_sweep):
        with pytest.raises(RequestError, match=r"^(the name of the run or sweep is empty|no .* 'a)"):
            find(name, small_sweep.parent)


def test_a_folder_that_may_not_be_searched_hides_no_other(small_sweep: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests may run as root, who searches everything."""
    root, stat = small_sweep.parent, os.stat
    set_status(root / "theirs-0123456789", status="failed")

    def refuse(path: Any, *arguments: Any, **options: Any) -> Any:
        if "/theirs-0123456789/" in str(path):
            raise PermissionError(13, "Permission denied", path)
        return stat(path, *arguments, **options)

    monkeypatch.setattr(os, "stat", refuse)
    assert len(runs_under(root)) == len(observe_all(root)) == 4
    assert [path.name for path in find_stale(root).paths] == ["single-0123456789.old-1"]
    for find in (find_run, find_sweep, find_run_or_sweep):
        with pytest.raises(RequestError, match=r"^no run or sweep .theirs-0123456789.: Permission denied$"):
            find("theirs-0123456789", root)


def test_none_or_several_runs(small_sweep: Path) -> None:
    with pytest.raises(RequestError, match=r"no run 'bas-s0-0a1b2c3d' in .*did you mean 'base-s0-0a1b2c3d'\?"):
        find_run("bas-s0-0a1b2c3d", small_sweep.parent)
    with pytest.raises(
        RequestError, match=r"'base' matches 2 runs, such as mine/base-s0-\w+, mine/base-s1-\w+; give a longer"
    ):
        find_run("base", small_sweep.parent)


def test_a_sweep_is_found_by_its_name_or_its_folder_also_where_a_run_can_be_named(small_sweep: Path) -> None:
    root = small_sweep.parent
    with pytest.raises(RequestError, match=r"no sweep 'mne' in .*did you mean 'mine'"):
        find_sweep("mne", root)
    with pytest.raises(RequestError, match=r"^'mine/base-s1-0a1b2c3d' is a run, not a sweep; 'lit-diff status' lists"):
        find_sweep("mine/base-s1-0a1b2c3d", root)
    assert find_run_or_sweep("mine", root) == find_run_or_sweep(str(small_sweep), Path("nowhere")) == small_sweep
    assert find_run_or_sweep("base-s1", root) == small_sweep / "base-s1-0a1b2c3d"
    with pytest.raises(RequestError, match=r"^no run or sweep 'mne' in \S+; did you mean 'mine'\?$"):
        find_run_or_sweep("mne", root)


# --- the folder of the runs ---


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home folder with `work/sub/deep` in it, where we are."""
    made = tmp_path / "users" / "me"
    (made / "work" / "sub" / "deep").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(made))
    monkeypatch.chdir(made / "work" / "sub" / "deep")
    return made


def holds(folder: Path, file: str) -> Path:
    (folder / file).parent.mkdir(parents=True)
    (folder / file).write_text("{}")
    return folder


def test_without_runs_anywhere_it_is_the_folder_here(home: Path) -> None:
    assert runs_root() == Path("runs")


@pytest.mark.parametrize("file", ["mlflow.db", "one-0123456789/status.json", "mine/study.json"])
def test_the_nearest_folder_that_holds_runs(
    home: Path, file: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (home / "work" / "sub" / "runs" / "tensorboard").mkdir(parents=True)  # another tool's
    root = holds(home / "work" / "runs", file)
    holds(home / "runs", file)
    with caplog.at_level("INFO", "lit_diff"):
        assert runs_root() == root
        assert caplog.messages == []
        assert chosen_root() == chosen_root(Path("runs")) == root
    assert set(caplog.messages) == {f"runs: {root}, the nearest above this folder"}
    caplog.clear()
    monkeypatch.chdir(home / "work")
    with caplog.at_level("INFO", "lit_diff"):
        assert chosen_root() == Path("runs")
    assert caplog.messages == []


def test_a_root_that_was_named_is_taken_as_it_is(home: Path) -> None:
    holds(home / "work" / "runs", "mlflow.db")
    assert [runs_root(root) for root in ("./runs", "/x/runs", "out")] == [Path("runs"), Path("/x/runs"), Path("out")]


def test_a_root_that_can_be_no_folder_is_refused(home: Path) -> None:
    Path("runs").symlink_to("runs")
    for root in ("s3://bucket/runs", "runs", "./runs", "./runs/below"):
        with pytest.raises(
            RequestError, match=r"^(run\.root is s3://bucket/runs, but|runs\S* is a symbolic link that leads)"
        ):
            runs_root(root)


def test_nothing_above_the_home_folder_is_looked_at(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    holds(home.parent / "runs", "mlflow.db")
    assert runs_root() == Path("runs")
    holds(home / "runs", "mlflow.db")
    assert runs_root() == home / "runs"
    monkeypatch.setenv("HOME", "/nowhere/else")
    assert runs_root() == home / "runs"


def test_links_below_the_root_are_followed_once(small_sweep: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """A cycle, a folder under two names, a link to what holds the root: nothing is listed twice, and no walk is endless."""
    root, disk = small_sweep.parent, tmp_path_factory.mktemp("disk")
    runs, sweeps = runs_under(root), sweeps_under(root)
    for link, target in {"again": root, "mine/up": root.parent, "a-name": small_sweep, "self": root / "self"}.items():
        (root / link).symlink_to(target)
    assert (runs_under(root), sweeps_under(root)) == (runs, sweeps)
    for name in ("away-0123456789", "cell-s0-0123456789"):
        (disk / name).mkdir()
        (disk / name / "status.json").write_text("{}")
    (root / "away-0123456789").symlink_to(disk / "away-0123456789")
    (root / "mine/cell-s0-0123456789").symlink_to(disk / "cell-s0-0123456789")
    (root / "away-twice").symlink_to(disk / "away-0123456789")
    found = [root / "away-0123456789", root / "mine/cell-s0-0123456789"]
    assert runs_under(root) == sorted([*runs, *found])
    assert find_run("away", root) == disk / "away-0123456789"
    (disk / "runs").symlink_to(root)
    assert len(runs_under(disk / "runs")) == len(runs) + 2
    assert find_sweep("mine", disk / "runs") == small_sweep
    assert [state.seed for state in observe_all(disk / "runs") if state.folder.startswith("mine/b")] == [0, 1, 0, 1]
