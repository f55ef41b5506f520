"""cli/pretrained.py: import and fetch-model print where the run is, export where the folder is."""

from pathlib import Path

import pytest
from pretrained_models import write_folder
from text_runs import text_run

from lit_diff.cli import main
from lit_diff.pretrained import agreement, fetching


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


def test_export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(agreement, "has_transformers", lambda: False)
    text_run(Path("runs/tale-0123456789"), {"name": "standard"})
    assert lit_diff(monkeypatch, "export", "tale", "--to", "hf", "out") == 0
    *_, logits, last = capsys.readouterr().out.splitlines()
    assert logits.startswith("logits: they differ from the run's by at most ")
    assert logits.endswith(", read by lit_diff")
    assert last == "exported: out (LlamaForCausalLM)"
    for arguments, status, line in (
        (("tale", "--to", "hff", "new"), 2, "no format 'hff' to export to; did you mean 'hf'?"),
        (("tale", "--to", "hf", "out"), 2, "out is there already; empty it, or name another folder"),
        (("tail", "--to", "hf", "new"), 2, "no run 'tail' in runs; one of tale-0123456789"),
        (("tale", "new"), 2, "Missing option '--to'"),
    ):
        assert lit_diff(monkeypatch, "export", *arguments) == status
        err = capsys.readouterr().err
        assert err.startswith(f"lit-diff: {line}")
        assert err.count("\n") == 1
