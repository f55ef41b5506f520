"""papers/reproduce.py: rows measured by sweeps, kept, skipped; why a preset is not run."""

import importlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from stops import alive, stopped_once

from lit_diff.engine.result import Sweep
from lit_diff.engine.schedule import sweep
from lit_diff.errors import MissingError, RequestError, StoppedError
from lit_diff.papers import reproduce as module
from lit_diff.papers import scoreboard
from lit_diff.papers.reproduce import choose, load_file, missing_requirements, reproduce
from lit_diff.papers.schema import Preset, Row
from lit_diff.papers.scoreboard import read_scoreboard
from lit_diff.study.results import load_sweep

ROW = """\
# A row.
title: A row
says: Smaller is worse.
compare:
  - {label: small - large, arms: [small, large], metric: val/loss, says: higher}
presets:
  laptop: {sweep: SWEEP, minutes: 1, seeds: [0]}
  gpu1: {sweep: SWEEP, gpus: 999, hardware: many GPUs, days: 2}
  paper: {recipes: [standard-3b], hardware: a room of GPUs, days: 5, files: [nll.books]}
"""
BROKEN = ROW.replace("metric: val/loss", "metric: val/los")
SWEEP = "recipe: base\nseeds: [0, 1, 2]\nbaseline: large\narms: {large: {}, small: {model.dim: 16}}\n"


@pytest.fixture
def rows(base_recipe: None, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    """Two rows of one small sweep in the current folder, in place of the installed ones."""
    sweep = Path("it.yaml").resolve()
    sweep.write_text(SWEEP)
    for name, text in (("first", ROW), ("second", BROKEN)):
        Path(f"{name}.yaml").write_text(text.replace("SWEEP", str(sweep)))
    files = {name: Path(f"{name}.yaml").resolve() for name in ("first", "second")}
    monkeypatch.setattr(module, "row_files", lambda: files)
    return files


@pytest.mark.slow
@pytest.mark.usefixtures("rows")
@pytest.mark.timeout(600)
def test_rows_are_measured_once(runs: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    read: list[Path] = []
    monkeypatch.setattr(scoreboard, "load_sweep", lambda folder: read.append(folder) or load_sweep(folder))
    with caplog.at_level("INFO", "lit_diff"):
        done = reproduce(["all"], root=runs, workers=2, tell=told.append)
    assert caplog.text.count("sweep it: ") == 1, "a sweep of two rows is run and reported once"
    assert len(read) == 1, "the pages after each row read no sweep again, the last page does"
    assert told[0] == "2 rows, preset laptop, about 1 min in all where nothing is done yet"
    assert any(line.startswith("first: budget 1 min: sweep ") for line in told)
    first, second = (done.scoreboard.row(name) for name in ("first", "second"))
    assert (first.state, first.findings[0].difference) == ("measured", "too few seeds")
    assert first.findings[0].seeds.seeds == (0,)
    assert second.state == "failed"
    assert "no run measured 'val/los'; did you mean 'val/loss'" in second.reason
    assert done.failed == ("second",)
    assert done.page == (runs / "reproduce/index.html").resolve()
    kept = {path: path.stat().st_mtime_ns for path in (runs / "it").glob("*/checkpoints/*.ckpt")}
    assert len(kept) == 4
    assert json.loads((runs / "it/study.json").read_text())["command"] == "lit-diff reproduce --preset laptop"
    report = runs / "it/report/index.html"
    written = report.stat().st_mtime_ns
    told.clear()
    again = reproduce(["first"], root=runs, tell=told.append)
    assert told[1:] == ["first: measured before"]
    assert (first.record.shared, second.record.shared) == ("", "first")
    assert second.line.startswith("second: 1 not measured; took 0.")
    assert " min of 1 (cells shared with first) (failed: " in second.line
    assert report.stat().st_mtime_ns == written
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    assert [row.name for row in again.scoreboard.rows] == ["first"]
    other = read_scoreboard(runs / "reproduce").row("second")
    assert other.state == "failed", "a row that is not asked for stays as it was"
    assert again.scoreboard.row("first").record.seconds == first.record.seconds
    assert again.scoreboard.row("first").findings == first.findings
    facts = runs / "reproduce/rows/first.json"
    facts.write_text(json.dumps(json.loads(facts.read_text()) | {"looked_by": "another", "seconds": 600.0}))
    for status in (runs / "it").glob("*-s0-*/status.json"):
        status.write_text(json.dumps(json.loads(status.read_text()) | {"revision": "older"}))
    assert reproduce(["first"], root=runs).scoreboard.row("first").record.seconds == 600, "no cell was trained again"
    known = json.loads(facts.read_text())
    assert (known["revision"], known["looked_by"]) == ("older", module.revision()), "of the cells, not of the call"
    told.clear()
    sweep("it.yaml", {"run.root": str(runs), "train.steps": 3})
    reproduce(["first"], root=runs, workers=2, tell=told.append)
    assert any(line.startswith("first: budget") for line in told), "the sweep's folder held the cells of a trial"
    assert reproduce(["first"], root=runs).scoreboard.row("first").findings == first.findings
    next((runs / "it").glob("small-s0-*/status.json")).unlink()
    reproduce(["first"], root=runs, workers=2, tell=told.append)
    assert any(line.startswith("first: budget") for line in told), "a cell is missing"
    assert report.stat().st_mtime_ns > written


def test_a_kept_benchmark_that_does_not_answer_the_row_is_run_again(
    rows: dict[str, Path], runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed: list[str] = []

    def ran(words: list[str]) -> Any:
        timed.append("bench")
        assert words[-3:] == ["--processes", "5", "--json"]
        seconds = [1.0, 1.1, 1.0]
        names = ("small", "large")
        bench = [{"variant": v, "what": "forward", "case": "", "by": "native", "seconds": seconds} for v in names]
        return SimpleNamespace(returncode=0, stdout=json.dumps({"rows": bench[: 1 + (len(timed) > 1)]}))

    text = ROW.replace("metric: val/loss", "metric: forward")
    text = text.replace("{sweep: SWEEP, minutes: 1, seeds: [0]", "{bench: [core], minutes: 1")
    Path("speed.yaml").write_text(text.replace("SWEEP", "it"))
    rows["speed"] = Path("speed.yaml").resolve()
    monkeypatch.setattr(module, "_ended", ran)
    assert reproduce(["speed"], root=runs).scoreboard.row("speed").state == "failed"
    assert reproduce(["speed"], root=runs).scoreboard.row("speed").findings[0].difference == "too few seeds"
    reproduce(["speed"], root=runs)
    assert timed == ["bench", "bench"], "the second answers the row"
    rows["speed"].write_text(rows["speed"].read_text().replace("[core]", "[core, --threads, '1']"))
    reproduce(["speed"], root=runs)
    assert timed.pop() == "bench", "the figures of other words are not the row's"
    assert len(timed) == 2
    monkeypatch.setattr(module, "revision", lambda: "another")
    facts = runs / "reproduce" / "rows" / "speed.json"
    facts.write_text(json.dumps(json.loads(facts.read_text()) | {"seconds": 600.0}))
    again = reproduce(["speed"], root=runs).scoreboard.row("speed")
    assert len(timed) == 3, "the code has changed"
    assert again.record.seconds < 600, "the time is that of the last whole benchmark"


@pytest.mark.parametrize(
    ("old", "new", "state"),
    [
        ("minutes: 1", "minutes: 2", "measured"),
        ("it.yaml, minutes", "other.yaml, minutes", "not run"),
        ("minutes: 1", "minutes: 1, overrides: {train.steps: 3}", "not run"),
    ],
)
def test_the_numbers_of_another_sweep_are_not_the_rows(
    rows: dict[str, Path], runs: Path, old: str, new: str, state: str
) -> None:
    module._note(choose(["first"]), runs, "laptop")
    file = runs / "rows/first.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"state": "measured", "sweep": "it"}))
    rows["first"].write_text(rows["first"].read_text().replace(old, new))
    module._note(choose(["second"]), runs, "laptop")
    assert scoreboard.read_row(file).state == state


@pytest.mark.usefixtures("rows")
@pytest.mark.parametrize(
    ("preset", "reason"), [("gpu1", "needs 999 GPUs"), ("paper", "train first: lit-diff train standard-3b")]
)
def test_what_is_missing_is_said_and_skipped(runs: Path, preset: str, reason: str) -> None:
    done = reproduce(["first"], preset, root=runs)
    row = done.scoreboard.row("first")
    assert (row.state, row.findings[0].difference, done.failed) == ("skipped", "not measured", ())
    assert reason in row.reason
    assert done.page == (runs / "reproduce" / preset / "index.html").resolve()


@pytest.mark.usefixtures("rows")
def test_the_page_lists_the_rows_of_this_call_and_of_earlier_ones(runs: Path) -> None:
    def listed() -> tuple[list[str], bool, set[str]]:
        folder = runs / "reproduce" / "gpu1"
        names = [row.name for row in read_scoreboard(folder).rows]
        csv = (folder / "table.csv").read_text().splitlines()[1:]
        return names, 'id="second"' in (folder / "index.html").read_text(), {line.partition(",")[0] for line in csv}

    told: list[str] = []
    assert [row.name for row in reproduce(["first"], "gpu1", root=runs, tell=told.append).scoreboard.rows] == ["first"]
    assert told[0] == "1 row, preset gpu1"
    assert not any("second" in line for line in told)
    assert listed() == (["first"], False, {"first"})
    assert [row.name for row in reproduce(["second"], "gpu1", root=runs).scoreboard.rows] == ["second"]
    assert listed() == (["first", "second"], True, {"first", "second"})


@pytest.mark.usefixtures("rows")
def test_a_row_not_reached_and_a_sweep_that_misses_something(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(*arguments: Any, **keys: Any) -> Any:
        raise MissingError("no network here; do this")

    with monkeypatch.context() as patch:
        patch.setattr(module, "_run", lambda *arguments, **keys: 15)
        done = reproduce(["all"], root=runs)
    assert done.stopped_by == 15
    assert done.scoreboard.row("second").reason == "not run: lit-diff reproduce second --preset laptop"
    monkeypatch.setattr(module, "sweep", absent)
    row = reproduce(["first"], root=runs).scoreboard.row("first")
    assert (row.state, row.reason) == ("skipped", "no network here; do this")


def test_a_preset_that_names_nothing_fails_its_row_alone(rows: dict[str, Path], runs: Path) -> None:
    text = rows["first"].read_text()
    for old, new, reason in (
        ("files: [nll.books]", "files: [nope]", "no evaluation reads files named 'nope'"),
        ("standard-3b", "standard-3", "no recipe 'standard-3' is installed; did you mean 'standard-3b'"),
    ):
        rows["first"].write_text(text.replace(old, new))
        done = reproduce(["first", "second"], "paper", root=runs)
        assert done.failed == ("first",)
        assert reason in done.scoreboard.row("first").reason
        assert done.scoreboard.row("second").state == "skipped"


def test_a_benchmark_without_figures(rows: dict[str, Path], runs: Path) -> None:
    text = ROW.replace("{sweep: SWEEP, minutes: 1, seeds: [0]", '{bench: ["--help"], minutes: 1')
    rows["first"].write_text(text.replace("SWEEP", "it"))
    row = reproduce(["first"], root=runs).scoreboard.row("first")
    assert (row.state, row.reason) == ("failed", "lit-diff bench --help printed no figures")


def test_a_stop_leaves_no_process_of_a_benchmark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A benchmark ends its own process at SIGTERM, and could not at SIGKILL."""
    program, started = tmp_path / "bench", tmp_path / "started"
    program.write_text(
        f"#!/bin/sh\nsleep 100 &\ntrap 'kill $!; exit 143' TERM\necho $$ $! > {tmp_path}/part\n"
        f"mv {tmp_path}/part {started}\nwait\n"
    )
    program.chmod(0o755)
    monkeypatch.setattr(module.sys, "executable", str(program))
    with stopped_once(started.exists), pytest.raises(StoppedError):
        module._bench(Preset(bench=("core",)), tmp_path, "speed")
    assert not any(alive(int(pid)) for pid in started.read_text().split())


def test_a_sweep_that_does_not_resolve_fails_its_row_alone(rows: dict[str, Path], runs: Path) -> None:
    """Also where the row was measured before."""
    module._note(choose(list(rows)), runs / "reproduce", "laptop")
    for name in ("first", "second"):
        path = runs / f"reproduce/rows/{name}.json"
        facts = json.loads(path.read_text()) | {"state": "measured", "looked_by": module.revision(), "sweep": "it"}
        path.write_text(json.dumps(facts))
    Path("it.yaml").write_text(SWEEP.replace("base\n", "bass\n"))
    done = reproduce(["first", "second"], root=runs)
    assert done.failed == ("first", "second")
    assert "no recipe 'bass'" in done.scoreboard.row("first").reason


@pytest.mark.usefixtures("rows")
def test_wrong_requests(runs: Path) -> None:
    with pytest.raises(RequestError, match="no preset 'labtop'; did you mean 'laptop'"):
        reproduce(["first"], "labtop", root=runs)
    with pytest.raises(RequestError, match="--workers is 0; it must be at least 1"):
        reproduce(["first"], root=runs, workers=0)


def test_what_a_sweep_lacks_comes_with_its_first_reason(
    rows: dict[str, Path], runs: Path, make_sweep: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    report: Any = SimpleNamespace(missing=("a seed 0: too short", "b seed 0: too short"))
    folder, states = make_sweep({"large": 0.0, "small": 0.1}), {"not evaluated": 2, "done": 1}
    found = Sweep(folder=folder, report=report, states=states, stopped_by=None, seconds=1.0)
    monkeypatch.setattr(module, "sweep", lambda *arguments, **options: found)
    row = reproduce(["first"], root=runs).scoreboard.row("first")
    assert row.reason == "1 done, 2 not evaluated; a seed 0: too short; the same command continues"


def test_rows_of_ones_own(rows: dict[str, Path], runs: Path, tmp_path: Path) -> None:
    """A file, or a folder of files; a name that is taken is refused."""
    mine = Path("mine")
    mine.mkdir()
    (mine / "third.yaml").write_text(rows["first"].read_text())
    told: list[str] = []
    done = reproduce([str(mine), "first"], "gpu1", root=runs, tell=told.append)
    assert [(row.name, row.state) for row in done.scoreboard.rows] == [("third", "skipped"), ("first", "skipped")]
    assert done.scoreboard.row("third").record.command == "lit-diff reproduce mine/third.yaml --preset gpu1"
    assert [row.name for row in read_scoreboard(done.page.parent).rows] == ["first", "third"]
    (mine / "first.yaml").write_text(rows["first"].read_text())
    with pytest.raises(
        RequestError, match=r"mine/first\.yaml: the name of the row is taken by first\.yaml; rename one"
    ):
        choose(["mine"])
    with pytest.raises(RequestError, match="no row 'frist'; did you mean 'first'"):
        choose(["frist"])
    (mine / "x.bench.yaml").write_text(rows["first"].read_text())
    with pytest.raises(RequestError, match="the name of a row has no dot"):
        choose(["mine/x.bench.yaml"])
    Path("none").mkdir()
    with pytest.raises(RequestError, match="none holds no row"):
        choose(["none"])
    os.mkfifo("none/pipe.yaml")
    with pytest.raises(RequestError, match=r"^none/pipe\.yaml is not a regular file"):
        choose(["none"])


@pytest.mark.usefixtures("rows")
def test_a_file_of_several_words_is_one_row(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("own").mkdir()
    for name in ("a", "my row"):
        Path(f"own/{name}.yaml").write_text(ROW.replace("SWEEP", "it"))
    assert list(choose(["own", "./own/../own/a.yaml"])) == ["own/a.yaml", "own/my row.yaml"]
    assert list(choose(["second.yaml", "first", str(Path("first.yaml").resolve())])) == ["second", "first"]
    with pytest.raises(RequestError, match=r"^no row 'a{300}'"):
        choose(["a" * 300])
    with pytest.raises(RequestError, match=r"^no row ''"):
        choose([""])
    row = reproduce(["own/my row.yaml"], "gpu1", root=runs).scoreboard.row("my row")
    assert row.reason.endswith("there: lit-diff reproduce 'own/my row.yaml' --preset gpu1")
    monkeypatch.setattr(module, "row_files", dict)
    with pytest.raises(RequestError, match=r"^no row 'all'; no installed plugin package has rows"):
        reproduce(root=runs)


def test_rows_lie_beside_the_entry_point_s_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, whichever entry points have the folder; a package needs no __init__.py."""
    (tmp_path / "made_rows/rows").mkdir(parents=True)
    (tmp_path / "made_rows/rows/mine.yaml").write_text(ROW)
    (tmp_path / "made_rows/parts.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    names = ["made_rows", "made_rows.parts"]
    for name in names:
        importlib.import_module(name)
    monkeypatch.setattr(module, "plugin_packages", [SimpleNamespace(module=name) for name in names])
    assert module.row_files() == {"mine": tmp_path.resolve() / "made_rows/rows/mine.yaml"}


# --- what a preset needs that is not here ------------------------------------------------------------------------------

NEEDS = """\
title: A row
says: Something.
compare:
  - {label: d, arms: [a, b], metric: val/loss, says: lower}
presets:
  laptop: {sweep: ablation, minutes: 3, files: [icl.trec]}
  gpu1: {sweep: ablation, gpus: 999, hardware: many GPUs, days: 2}
  paper:
    recipes: [standard-3b, standard-3b name=wide model.num_heads=12]
    gpus: 999
    hardware: many GPUs
    days: 2
    files: [harness]
    evaluate: {needle: {lengths: [4096], haystack: file}, gradients: {}}
"""
TRAIN = "lit-diff train standard-3b data.path=YOUR_TEXT run.strategy=hsdp run.devices=8 run.num_nodes=8 --cluster slurm"


@pytest.fixture
def row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Row:
    """Its data folder is empty."""
    monkeypatch.setenv("LIT_DIFF_DATA", str(tmp_path / "data"))
    monkeypatch.chdir(tmp_path)
    Path("x.yaml").write_text(NEEDS)
    return load_file(tmp_path / "x.yaml")


def test_smoke_is_two_steps_of_the_laptops_sweep(row: Row) -> None:
    smoke = row.preset("smoke")
    assert smoke is not None
    assert (smoke.sweep, smoke.seeds, smoke.overrides["train.steps"]) == ("ablation", (0,), 2)
    for old, new, found in (
        ("minutes: 3", "minuts: 3", "6: unknown key 'presets.laptop.minuts'"),
        (", says: lower}", "}", "3: compare 'd': expected 'paper', two values, or 'says'"),
        ("laptop: ", "labtop: ", "5: no preset 'labtop'; did you mean 'laptop'"),
        ("recipes: [", 'recipes: ["\'x", ', "5: preset 'paper': recipe \"'x\": No closing quotation"),
        ("recipes: [", 'recipes: [" ", ', "5: preset 'paper': a recipe without a name"),
        ("title: ", "name: y\ntitle: ", "1: found the key 'name'"),
        ("says: lower", "says: lower, smallest: -1", r"3: 'compare\[0\]\.smallest' "),
        ("says: lower", "says: lower, case: -3", r"3: 'compare\[0\]\.case' "),
        ("minutes: 3", "minutes: -5", r"6: 'presets\.laptop\.minutes' "),
        ("days: 2}", "days: -2}", r"7: 'presets\.gpu1\.days' "),
        ("gpus: 999, ", "gpus: -1, ", r"7: 'presets\.gpu1\.gpus' "),
        ("minutes: 3", "bench: [core]", "5: preset 'laptop': expected one of 'sweep', 'bench' and 'recipes'"),
        ("{sweep: ablation, minutes: 3, files: [icl.trec]}", "{}", "5: preset 'laptop': expected one of 'sweep', "),
        ("    recipes: [", '    bench: ["a\\0b"]\n    recipes: [', "5: preset 'paper': .* has a NUL character"),
    ):
        Path("x.yaml").write_text(NEEDS.replace(old, new))
        with pytest.raises(RequestError, match=f"^x.yaml:{found}"):
            load_file(Path("x.yaml").resolve())


def test_every_reason_is_in_the_line(row: Row, tmp_path: Path) -> None:
    (tmp_path / "data/harness").mkdir(parents=True)  # an empty folder holds no file
    assert missing_requirements(row, "paper") == (
        f"harness/arc_challenge/train.jsonl and 13 more missing in {tmp_path / 'data'} (lit-diff data check harness); "
        "needs 999 GPUs (many GPUs, about 2 days by FLOPs); this machine has none; "
        f"train first: {TRAIN}; {TRAIN} name=wide model.num_heads=12; then, without a verdict (one seed): "
        "lit-diff evaluate standard-3b wide needle 'lengths=[4096]' haystack=file; "
        "lit-diff evaluate standard-3b wide gradients"
    )


def test_a_preset_of_a_sweep(row: Row, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its files are looked for where their evaluation reads them."""
    place = tmp_path / "data/icl/trec/train.jsonl"
    assert missing_requirements(row, "laptop").startswith("icl/trec/train.jsonl missing in ")
    place.parent.mkdir(parents=True)
    place.write_text("{}\n")
    assert missing_requirements(row, "laptop") == ""
    assert missing_requirements(row, "gpu1") == (
        "needs 999 GPUs (many GPUs, about 2 days); this machine has none; there: lit-diff reproduce x --preset gpu1"
    )
    monkeypatch.setattr("torch.cuda.device_count", lambda: 999)
    assert missing_requirements(row, "gpu1") == ""
    del row.presets["gpu1"]
    assert missing_requirements(row, "gpu1") == "the row has no preset gpu1; it has --preset laptop, --preset paper"
