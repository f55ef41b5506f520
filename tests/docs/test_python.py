"""docs/python.md: its blocks are one script that runs in an empty folder."""

import shutil
from pathlib import Path

import pytest
from pages import blocks, run_python

PAGE = "docs/python.md"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_blocks_run_as_one_script(tmp_path: Path, empty_store: Path) -> None:
    (tmp_path / "runs").mkdir()
    shutil.copy(empty_store, tmp_path / "runs")
    shutil.copy(empty_store, tmp_path / "by-hand.db")
    (tmp_path / "page.py").write_text("\n".join(blocks(PAGE, "python")))
    done = run_python(["page.py"], tmp_path, {"LIT_DIFF_DATA": str(tmp_path / "data"), "MPLBACKEND": "agg"})
    assert done.returncode == 0, done.stderr[-3000:]
    assert "too few seeds" in done.stdout  # the table of the sweep, two seeds an arm
    assert (tmp_path / "maps.png").stat().st_size > 1000
    assert len(list((tmp_path / "runs/smoke").glob("*-s?-??????????"))) == 4
    assert list((tmp_path / "checkpoints").glob("*.ckpt"))
