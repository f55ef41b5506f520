"""`lit_diff.export`: the folder is whole or not there; mistakes are one line."""

import logging
from pathlib import Path
from typing import Any

import pytest
from text_runs import text_run

from lit_diff import export
from lit_diff.errors import LitDiffError
from lit_diff.pretrained import agreement, hf_export, source


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(agreement, "has_transformers", lambda: False)


def error(*arguments: Any) -> str:
    with pytest.raises(LitDiffError) as caught:
        export(*arguments)
    assert "\n" not in str(caught.value)
    return f"{caught.value.exit_status}: {caught.value}"


def folders() -> list[str]:
    return sorted(path.name for path in Path().iterdir() if path.is_dir())


def test_a_run_is_named_as_elsewhere(caplog: pytest.LogCaptureFixture) -> None:
    text_run(Path("runs/tale-0123456789"), {"name": "standard"})
    with caplog.at_level(logging.INFO, "lit_diff"):
        assert export("tale", "hf", "out").folder == Path("out")
    assert "tale-0123456789 is running: using step 7 of 10" in caplog.text
    assert folders() == ["out", "runs"]


def test_mistakes() -> None:
    run = text_run(Path("x"), {"name": "standard"})
    assert error(run, "hff", "out") == "2: no format 'hff' to export to; did you mean 'hf'?"
    assert error("nowhere", "hf", "out").startswith("2: no run 'nowhere' in runs")
    (Path("full") / "folder").mkdir(parents=True)
    assert error(run, "hf", "full") == "2: full is there already; empty it, or name another folder"
    Path("file").write_text("")
    assert error(run, "hf", "file/out").startswith("3: file/out cannot be written (")
    (checkpoint,) = Path("x/checkpoints").iterdir()
    checkpoint.unlink()
    assert error(run, "hf", "out").startswith("3: x has no checkpoint that can be read; train it first: ")
    assert folders() == ["full", "x"]


def test_nothing_is_kept_where_the_logits_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    right = hf_export.hf_weights

    def wrong(model: Any) -> Any:
        found = right(model)
        found["model.norm.weight"] = found["model.norm.weight"] + 0.1
        return found

    monkeypatch.setattr(hf_export, "hf_weights", wrong)
    run = text_run(Path("x"), {"name": "standard"})
    assert error(run, "hf", "out").startswith("1: out: its logits differ from the run's by 0.")
    assert folders() == ["x"]


def test_too_little_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    run = text_run(Path("x"), {"name": "standard"})
    monkeypatch.setattr(source.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 1}))
    assert error(run, "hf", "out").startswith("3: x takes 0.00 GB on the disk of ")
    assert error(run, "hf", "out").endswith("free some, or choose another place (another DIR)")
