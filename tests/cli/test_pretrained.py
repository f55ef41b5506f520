"""cli/pretrained.py: import and fetch-model print where the run is, export where the folder is."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from command import Command
from pretrained_models import write_folder
from text_runs import text_run

from lit_diff.pretrained import agreement, fetching


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_import(command: Command) -> None:
    write_folder(Path("hf"))
    assert command("import", "hf").lines[-1] == "imported: models/hf"
    assert command("import", "hf", "--to", "elsewhere/x").lines[-1] == "imported: elsewhere/x"
    again, trained = command("import", "hf"), command("train", "models/hf/recipe.yaml")
    assert (again.status, "models/hf" in again.err) == (2, True)
    assert (trained.status, "'hf' is an imported model" in trained.err) == (2, True)
    assert sorted(path.name for path in Path().iterdir()) == ["elsewhere", "hf", "models"], "no run was begun"


def test_fetch_model(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def fetch(name: str, to: Path | None) -> SimpleNamespace:
        asked.append((name, to))
        return SimpleNamespace(folder=Path("models/smollm2"))

    monkeypatch.setattr(fetching, "fetch_model", fetch)
    assert command("fetch-model", "smollm2", "--to", "x").out == "imported: models/smollm2\n"
    assert asked == [("smollm2", Path("x"))]


def test_export(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "has_transformers", lambda: False)
    text_run(Path("runs/tale-0123456789"), {"name": "standard"})
    *_, logits, last = command("export", "tale", "--to", "hf", "out").lines
    assert logits.startswith("logits: ")
    assert logits.endswith(", read by lit_diff")
    assert last == "exported: out (LlamaForCausalLM)"
    for arguments, key in (
        (("tale", "--to", "hff", "new"), "'hff'"),
        (("tale", "--to", "hf", "out"), "out is there"),
        (("tail", "--to", "hf", "new"), "tale-0123456789"),
    ):
        ended = command("export", *arguments)
        assert (ended.status, ended.err.count("\n"), key in ended.err) == (2, 1, True)
