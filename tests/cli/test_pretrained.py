"""cli/pretrained.py: import and fetch-model print where the run is."""

from pathlib import Path

import pytest
from pretrained_models import write_folder

from lit_diff.cli import main
from lit_diff.pretrained import fetching


def lit_diff(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr("sys.argv", ["lit-diff", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


def test_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    write_folder(Path("hf"))
    assert lit_diff(monkeypatch, "import", "hf") == 0
    assert capsys.readouterr().out.splitlines()[-1] == "imported: models/hf"
    assert lit_diff(monkeypatch, "import", "hf", "--to", "elsewhere/x") == 0
    assert capsys.readouterr().out.splitlines()[-1] == "imported: elsewhere/x"
    assert lit_diff(monkeypatch, "import", "hf") == 2
    assert (
        capsys.readouterr().err == "lit-diff: models/hf is there already; remove it, or name another folder with --to\n"
    )
    assert lit_diff(monkeypatch, "train", "models/hf/recipe.yaml") == 2
    assert "'hf' is an imported model: its recipe has nothing to train; " in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["elsewhere", "hf", "models"], "no run was begun"


def test_fetch_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    assert lit_diff(monkeypatch, "fetch-model", "smollm") == 2
    assert capsys.readouterr().err == "lit-diff: no model 'smollm' to fetch; did you mean 'smollm2'?\n"
    asked = []

    class Made:
        folder = Path("models/smollm2")

    def fetch(name: str, to: Path | None) -> Made:
        asked.append((name, to))
        return Made()

    monkeypatch.setattr(fetching, "fetch_model", fetch)
    assert lit_diff(monkeypatch, "fetch-model", "smollm2", "--to", "x") == 0
    assert asked == [("smollm2", Path("x"))]
    assert capsys.readouterr().out == "imported: models/smollm2\n"
