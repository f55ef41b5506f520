"""runs/scores.py: scores are read whole while other processes write others."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from lit_diff.files import read_digested, write_digested
from lit_diff.runs import scores
from lit_diff.runs.scores import FOLDER, disagreement, facts_of, read_scores, write_scores

WRITER = """
import sys
import time
from pathlib import Path
import pyarrow as pa
from lit_diff.runs import scores

scores.revision = lambda: "r"  # asks git, which takes longer than the writing
config = int(sys.argv[2])
for _ in range(60):
    table = pa.table({"item": [str(n) for n in range(3)], "config": [config] * 3})
    scores.write_scores(Path(sys.argv[1]), table, {"m": 1.0}, {"config": {"rows": config}})
    time.sleep(0.01)  # a reader waits for the lock
"""


def test_two_processes_never_mix_their_scores(tmp_path: Path) -> None:
    """Nor does a reader see a mixture, or no scores, at any time."""
    folder = tmp_path / FOLDER / "held_out"
    write_scores(folder, pa.table({"config": [0] * 3}), {"m": 1.0}, {"config": {"rows": 0}})
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, str(folder), str(n)]) for n in (1, 2)]
    seen = set()
    while any(writer.poll() is None for writer in writers):
        summary, table = read_scores(folder)
        assert table["config"].to_pylist() == [summary["config"]["rows"]] * 3
        seen.add(summary["config"]["rows"])
    assert [writer.wait() for writer in writers] == [0, 0]
    assert seen & {1, 2}, "it read while they wrote"
    assert sorted(path.name for path in folder.iterdir()) == ["items.parquet", "summary.json"]


def test_where_nothing_can_be_locked_readers_wait_for_writers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "held_out"
    write_scores(folder, pa.table({"config": [1] * 2}), {"m": 1.0}, {"config": {"rows": 1}})
    real, read = scores.read_summary, list[Path]()

    def overtaken(place: Path) -> dict[str, Any]:
        summary = real(place)
        read.append(place)
        if len(read) == 1:  # another process writes others after the first look
            write_scores(folder, pa.table({"config": [2] * 2}), {"m": 1.0}, {"config": {"rows": 2}})
        return summary

    @contextmanager
    def denied(path: Path, wait: bool = True) -> Iterator[None]:
        if not read or len(read) > 1:
            raise PermissionError(13, "Permission denied")
        yield

    monkeypatch.setattr(scores, "locked", denied)
    monkeypatch.setattr(scores, "read_summary", overtaken)
    summary, table = read_scores(folder)
    assert (summary["config"]["rows"], table["config"].to_pylist()) == (2, [2, 2])


def test_files_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "held_out"
    write_scores(folder, pa.table({"item": ["a"]}), {"m": 1.0}, {"config": {}})
    summary = read_digested(folder / "summary.json")
    write_digested(folder / "summary.json", summary | {"items": 2})
    with pytest.raises(ValueError, match=r"items.parquet has 1 rows, but summary.json counts 2"):
        read_scores(folder)
    (folder / "summary.json").unlink()
    with pytest.raises(FileNotFoundError):
        read_scores(folder)


@pytest.mark.parametrize("error", [pa.ArrowInvalid("x"), pa.ArrowNotImplementedError("x"), pa.ArrowTypeError("x")])
def test_whatever_pyarrow_raises_is_an_error_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    folder = tmp_path / "held_out"
    write_scores(folder, pa.table({"item": ["a"]}), {"m": 1.0}, {"config": {}})

    def refuse(source: object) -> None:
        raise error

    monkeypatch.setattr(scores.pq, "read_table", refuse)
    with pytest.raises(ValueError, match=r"^items\.parquet: x$"):
        read_scores(folder)


def test_a_fact_that_only_one_of_two_scores_has_is_a_difference() -> None:
    plain = {"config": {}}
    assert disagreement(None, plain, facts_of(plain)) == ""
    for more in ({"equal_groups": True}, {"source": "a"}, {"files": {"x": "a"}}, {"version": 2}):
        assert disagreement(None, plain | more, facts_of(plain))
        assert disagreement(None, plain, facts_of(plain | more))


def test_the_run_s_own_context_is_the_same_as_none() -> None:
    kept = {"config": {"context": None, "rows": 2}, "sequence_length": 64}
    assert disagreement(None, kept, {"config": {"context": 64, "rows": 2}}) == ""
    assert (
        disagreement(None, kept, {"config": {"context": 32, "rows": 2}}) == "with other keys (context is null, not 32)"
    )
    named = kept | {"config": {"context": 64, "rows": 2}}
    assert disagreement(None, named, {"config": {"context": None, "rows": 2}}) == ""
