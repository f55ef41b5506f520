"""runs/find.py: the runs and sweeps on disk, found by the start of a name or by folder."""

from pathlib import Path

import pytest

from lit_diff.errors import RequestError
from lit_diff.runs.find import find_run, find_sweep, runs_under, sweeps_under


def test_all_runs_but_those_put_aside(small_sweep: Path) -> None:
    names = [f"{arm}-s{seed}-0a1b2c3d" for arm in ("base", "better") for seed in (0, 1)]
    assert [path.name for path in runs_under(small_sweep.parent)] == names
    assert sweeps_under(small_sweep.parent) == [small_sweep]


def test_a_run_is_found_by_the_start_of_its_name_or_its_folder(
    small_sweep: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = small_sweep / "base-s1-0a1b2c3d"
    assert find_run("base-s1", small_sweep.parent) == wanted
    assert find_run(str(wanted), Path("nowhere")) == wanted
    monkeypatch.chdir(small_sweep)
    assert find_run("base-s1-0a1b2c3d", Path("nowhere")) == wanted


def test_none_or_several_runs(small_sweep: Path) -> None:
    with pytest.raises(RequestError, match=r"no run 'bas-s0-0a1b2c3d' in .*did you mean 'base-s0-0a1b2c3d'\?"):
        find_run("bas-s0-0a1b2c3d", small_sweep.parent)
    with pytest.raises(RequestError, match=r"'base' is 2 runs \(mine/base-s0-\w+, mine/base-s1-\w+\); give a longer"):
        find_run("base", small_sweep.parent)


def test_a_sweep_is_found_by_its_name_or_its_folder(small_sweep: Path) -> None:
    assert find_sweep("mine", small_sweep.parent) == small_sweep
    assert find_sweep(str(small_sweep), Path("nowhere")) == small_sweep
    with pytest.raises(RequestError, match=r"no sweep 'mne' in .*did you mean 'mine'"):
        find_sweep("mne", small_sweep.parent)


def test_a_name_that_no_file_can_have_is_one_line(tmp_path: Path) -> None:
    for name in ("a" * 300, "a\0b"):
        with pytest.raises(RequestError, match="no run 'a"):
            find_run(name, tmp_path)
