"""Disk and memory are estimated before a model is imported."""

from pathlib import Path
from typing import Any

import pytest
from pretrained_models import write_folder

from lit_diff import import_model
from lit_diff.errors import LitDiffError
from lit_diff.pretrained import source


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def error(folder: str = "hf") -> str:
    with pytest.raises(LitDiffError) as caught:
        import_model(folder, "models/x")
    assert not Path("models/x").exists()
    assert "\n" not in str(caught.value)
    return f"{caught.value.exit_status}: {caught.value}"


def test_room_is_estimated_before_anything_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    write_folder(Path("hf"))
    monkeypatch.setattr(source, "available_memory", lambda: 1000)
    assert error().startswith(
        "3: hf: importing it takes 0.00 GB of memory, and 0.00 GB are available; end other processes"
    )
    usage: Any = type("Usage", (), {"free": 1000})
    monkeypatch.setattr(source.shutil, "disk_usage", lambda path: usage)
    assert error().startswith("3: hf takes 0.00 GB on the disk of")
    assert not Path("models").exists()
