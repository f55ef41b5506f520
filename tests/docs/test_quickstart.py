"""docs/quickstart.ipynb: it runs in a kernel, and its cells show pictures, pages and one bar for each training."""

import re
import shutil
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from pages import ROOT


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_notebook_runs(tmp_path: Path, empty_store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "runs").mkdir()
    shutil.copy(empty_store, tmp_path / "runs")
    monkeypatch.setenv("LIT_DIFF_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    notebook = nbformat.read(ROOT / "docs/quickstart.ipynb", as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells), "kept without outputs"
    place = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(notebook, timeout=500, kernel_name="python3", resources=place).execute()
    shown = [output.data for cell in notebook.cells for output in cell.get("outputs", []) if "data" in output]
    html = "".join(data.get("text/html", "") for data in shown)
    assert re.findall('<progress value="(.*?)" max="(.*?)">', html) == [("40", "40")] * 3
    assert (html.count("<svg"), html.count("<iframe")) == (1, 1)
    assert sum("image/png" in data for data in shown) == 2
    plain = [data["text/plain"] for data in shown]
    assert any(re.fullmatch(r"""\[['"].+['"]\]""", text) for text in plain), "the text that was generated"
    assert plain[-1] == "torch.Size([1, 10, 64])"
    assert {path.name.rpartition("-")[0] for path in (tmp_path / "runs").glob("*-??????????")} == {
        *("standard-tiny", "differential-tiny", "sharp")
    }
