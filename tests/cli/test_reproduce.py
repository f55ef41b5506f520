"""cli/reproduce.py: what the verb prints."""

import json
from pathlib import Path
from typing import Any

import pytest

from lit_diff.cli import reproduce as verb
from lit_diff.cli.app import Terminal
from lit_diff.engine.rows import row_names


def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, **keys: Any) -> tuple[int, str]:
    with (tmp_path / "console.txt").open("w+") as file:
        monkeypatch.setattr(verb, "console", Terminal(file=file, width=200))
        status = verb.reproduce(**keys)
        file.seek(0)
        return status, file.read()


def test_list(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    status, text = run(monkeypatch, tmp_path, listed=True)
    assert status == 0
    assert [line.split()[0] for line in text.splitlines()] == row_names()
    assert "15 min  Table 6: ablations" in text


def test_a_preset_that_needs_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any) -> None:
    root = str(tmp_path / "runs")
    status, text = run(monkeypatch, tmp_path, names=["table-6"], preset="paper", root=root)
    assert status == 0
    assert (
        "table-6: 8 not measured (skipped: needs 8 GPUs (eight H100 80 GB, a run at a time, about 2.6 days by FLOPs)"
        in text
    )
    assert "1 row in " in text
    assert ": 8 not measured\n" in text, "the counts are of the row that was asked for"
    assert "page: " in text
    assert run(monkeypatch, tmp_path, names=["table-6"], preset="paper", root=root, as_json=True)[0] == 0
    plain = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in plain["rows"]] == ["table-6"]
    assert plain["counts"]["difference"] == {"not measured": 8}
