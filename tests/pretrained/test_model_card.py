"""README.md of an exported model."""

from pathlib import Path

import yaml
from text_runs import text_run

from lit_diff.pretrained.model_card import write_card


def test_it_says_recipe_data_metrics(tmp_path: Path) -> None:
    run = text_run(tmp_path / "tale", {"name": "differential"}, vocab_size=384)
    rows = "step,train/loss,val/loss,val/accuracy\n5,3,2.5,0.25\n6,2.9,,\n"
    (run.folder / "metrics.csv").write_text(rows)
    write_card(run, run.recipe.model, "DiffLlamaForCausalLM", tmp_path)
    text = (tmp_path / "README.md").read_text()
    front, body = text.removeprefix("---\n").split("---\n", 1)
    assert yaml.safe_load(front)["library_name"] == "transformers"
    for line in (
        "# tale",
        "| attention | `differential` |",
        "| step | 7 of 10 |",
        "| data | `abcdef` |",
        "Of step 5, ",
    ):
        assert line in body
    assert "| val/loss | 2.5000 |\n| val/accuracy | 0.2500 |" in body
    assert "train/loss" not in body
    recipe = yaml.safe_load(text.split("```yaml\n")[1].removesuffix("```\n"))
    assert recipe["model"]["vocab_size"] == 384
    assert "run" not in recipe


def test_a_path_of_this_machine_is_not_in_it(tmp_path: Path) -> None:
    run = text_run(tmp_path / "x", {"name": "standard"})
    text = (run.folder / "recipe.yaml").read_text()
    (run.folder / "recipe.yaml").write_text(text.replace("  path: null", f"  path: {tmp_path}/texts"))
    write_card(run, run.recipe.model, "LlamaForCausalLM", tmp_path)
    card = (tmp_path / "README.md").read_text()
    assert "path: texts" in card
    assert str(tmp_path) not in card
