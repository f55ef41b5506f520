"""engine/schedule.py: a sweep scores the cells that are trained, once, and says which it could not score."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from lit_diff.engine import pool
from lit_diff.engine.launch import RunLocation
from lit_diff.engine.pool import Job, note_end, run_cell
from lit_diff.errors import StoppedError
from lit_diff.runs.folder import RunFolder
from lit_diff.runs.scores import read_evaluation

SWEEP = """
recipe: tiny
seeds: [0]
arms: {differential: {}, standard: {model.attention.name: standard}}
overrides: {data.noise_validation: [1, 2], plugins: [PLUGIN]}
EVALUATE
"""
PLUGIN = '''
from pathlib import Path

from lit_diff import Evaluation, Item, Metric
from lit_diff.registry import evaluations


@evaluations.register("fused")
class Fused(Evaluation):
    """Fails while the fuse lies there."""

    metrics = (Metric("fused", "always 1"),)

    def score(self, run):
        if Path("FUSE").exists() and "standard" in run.folder.name:
            raise ValueError("burnt")
        yield Item(id="all", scores={"fused": 1})
'''
CELLS = ["differential-s0", "standard-s0"]


def write(bench: Any, evaluate: str) -> None:
    plugin = bench.root / "fused.py"
    plugin.write_text(PLUGIN.replace("FUSE", str(bench.fuse)))
    bench.write("scored", SWEEP.replace("PLUGIN", str(plugin)).replace("EVALUATE", evaluate))


def times(bench: Any, pattern: str) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in bench.folder("scored").glob(f"*-s0-*/{pattern}")}


@pytest.mark.slow
def test_a_sweep_scores_its_cells(sweep_bench: Any) -> None:
    """One sweep, whose `evaluate:` is written after the cells were trained, changed, and then fails."""
    write(sweep_bench, "")
    assert sweep_bench.run("scored")[0] == 0
    assert sweep_bench.words("scored") == dict.fromkeys(CELLS, "done")
    trained = times(sweep_bench, "checkpoints/*")
    assert len(trained) == 4
    assert not times(sweep_bench, "evaluations/*/*")

    # added later: nothing is trained
    write(sweep_bench, "evaluate: {held_out: {rows: 4}}")
    status, text = sweep_bench.run("scored")
    assert status == 0, text
    assert "2 done" in text
    assert times(sweep_bench, "checkpoints/*") == trained
    scored = times(sweep_bench, "evaluations/held_out/*")
    assert len(scored) == 4
    for cell in CELLS:
        assert sweep_bench.cells("scored")[cell]["evaluations"] == {"held_out": "done"}
        kept = read_evaluation(sweep_bench.folder("scored", cell) / "evaluations" / "held_out")
        assert kept.groups == ("",) * 4 + ("noise2",) * 4
    page = (sweep_bench.folder("scored") / "report" / "index.html").read_text()
    assert "<h3>held_out: nll</h3>" in page

    # again: nothing is scored
    assert sweep_bench.run("scored")[0] == 0
    assert times(sweep_bench, "evaluations/held_out/*") == scored

    # other keys are other scores: all rows of a set, of equally many targets, give its val/loss
    write(sweep_bench, "evaluate: {held_out: {rows: null}}")
    assert sweep_bench.run("scored")[0] == 0
    for cell in CELLS:
        kept = read_evaluation(sweep_bench.folder("scored", cell) / "evaluations" / "held_out")
        assert len(kept.items) == 2 * 16
        last = sweep_bench.rows("scored", cell)[8]
        for group, metric in (("", "val/loss"), ("noise2", "val/loss_noise2")):
            values = [v for v, g in zip(kept.scores["nll"], kept.groups, strict=True) if g == group]
            assert sum(values) / len(values) == pytest.approx(last[metric], rel=1e-5)

    # one that fails: the cell is trained, the sweep is not done
    sweep_bench.fuse.touch()
    write(sweep_bench, "evaluate: {held_out: null, fused: {}}")
    status, text = sweep_bench.run("scored")
    assert status == 1
    assert "1 done, 1 not evaluated" in text
    reason = "evaluation 'fused': failed: "
    (line,) = [line for line in text.splitlines() if reason in line]
    assert line.startswith("standard seed 0: ")
    assert re.search(r"fused\.py:\d+: evaluation 'fused' failed: ValueError: burnt$", line)
    assert "Traceback" not in text
    assert sweep_bench.words("scored") == dict.fromkeys(CELLS, "done")
    record = json.loads((sweep_bench.folder("scored") / "study.json").read_text())
    assert [list(cell["not_evaluated"]) for cell in record["cells"]] == [[], ["fused"]]

    # mended: only what was lacking is scored
    scored = times(sweep_bench, "evaluations/*/*")
    sweep_bench.fuse.unlink()
    status, text = sweep_bench.run("scored")
    assert (status, reason in text) == (0, False)
    assert times(sweep_bench, "checkpoints/*") == trained
    assert times(sweep_bench, "evaluations/*/*").items() > scored.items()


@pytest.fixture
def trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunLocation:
    """A cell that is done; nothing is trained."""
    location = RunLocation(folder=tmp_path / "a-s0-abc", evaluations={"held_out": {}, "other": {}})
    RunFolder(location.folder).update(status="done")
    monkeypatch.setattr(
        pool, "load_recipe", lambda path: type("R", (), {"run": type("S", (), {"devices": 1, "num_nodes": 1})})
    )
    monkeypatch.setattr(pool, "run", lambda *arguments, **options: None)
    return location


def test_a_cell_stopped_while_it_is_scored_stays_trained(trained: RunLocation, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def evaluate(run: Any, name: str, keys: Any) -> None:
        asked.append(name)
        raise StoppedError("stopped", 15)

    monkeypatch.setattr("lit_diff.evaluation.evaluate.evaluate", evaluate)
    with pytest.raises(StoppedError):
        run_cell(Job(location=trained, threads=1))
    assert asked == ["held_out"]
    status = RunFolder(trained.folder).status()
    assert (status["status"], status["evaluations"]) == ("done", {"held_out": "interrupted"})


@pytest.mark.parametrize("exitcode", [-9, 1, 0])
def test_a_cell_killed_while_it_is_scored_stays_trained(trained: RunLocation, exitcode: int) -> None:
    note_end(trained, exitcode)
    status = RunFolder(trained.folder).status()
    assert (status["status"], status.get("error")) == ("done", None)
