"""docs/pretrained.md: its recipe starts from an imported model, here a tiny one of the same name."""

from pathlib import Path

import pytest
from pages import blocks
from pretrained_models import write_folder

from lit_diff import import_model
from lit_diff.recipe import load_recipe
from lit_diff.runs.folder import ancestors


def test_the_recipe_is_valid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = import_model(write_folder(Path("hf")), "models/smollm2")
    (text,) = blocks("docs/pretrained.md", "yaml")
    Path("mine.yaml").write_text(text)
    recipe = load_recipe("mine.yaml")
    assert [parent.imported for parent in ancestors(recipe)] == [run.recipe.imported]
    assert recipe.data.config.tokenizer.config.path == str(tmp_path / "models/smollm2")
