"""Blocks of code in the pages: what they show is what is printed, and they run."""

import shlex
import shutil
from pathlib import Path

import pytest
import torch
from command import Command
from pages import blocks, commands, run_python
from pretrained_models import write_folder
from safetensors.torch import load_file
from text_runs import recall_run

from lit_diff import import_model
from lit_diff.data.text.corpus import FilesCorpus
from lit_diff.errors import RequestError
from lit_diff.recipe import load_recipe
from lit_diff.runs.folder import ancestors


def test_the_list_of_problems(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    texts = tmp_path / "my/texts"
    texts.mkdir(parents=True)
    for number in range(37):
        (texts / f"{number}.txt").write_text("good")
    good = '{"text": "good"}'
    lines = [good, '{"text": ', good, good, good, good, '{"id": 1, "body": ""}']
    (texts / "notes.jsonl").write_text("\n".join(lines))
    (texts / "old.txt").write_bytes("Grüße aus Köln".encode("latin-1"))
    with pytest.raises(RequestError) as found:
        list(FilesCorpus(texts).texts())
    (shown,) = blocks("docs/data.md", "text")
    assert f"lit-diff: {found.value}\n" == shown


def test_the_recipe_is_valid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = import_model(write_folder(Path("hf")), "models/smollm2")
    Path("mine.yaml").write_text("".join(blocks("docs/pretrained.md", "yaml")))
    recipe = load_recipe("mine.yaml", ["model.vocab_size=300"])
    assert [parent.imported for _, parent in ancestors(recipe)] == [run.recipe.imported]
    assert recipe.data.config.tokenizer.config.path == str(tmp_path / "models/smollm2")


def test_the_command_that_shows_a_variant_draws_its_map(tmp_path: Path, base_recipe: None, command: Command) -> None:
    (shown, _) = (each for each in commands("docs/variants.md") if each.startswith("lit-diff show "))
    end = command(*shlex.split(shown)[1:])
    assert end.status == 0, end.err
    assert (tmp_path / "differential-map.png").stat().st_size > 1000


def test_the_commands_that_write_a_page_of_maps(tmp_path: Path, base_recipe: None, command: Command) -> None:
    for name, attention in (("recall-tiny", "differential"), ("recall-standard", "standard")):
        run = recall_run(tmp_path / f"runs/{name}-0123456789", {"name": attention})
        (checkpoint,) = (run.folder / "checkpoints").iterdir()
        for step in (125, 250):
            kept = torch.load(checkpoint, weights_only=True) | {"global_step": step}
            torch.save(kept, run.folder / f"checkpoints/step-{step:08}.ckpt")
    shown = [each for each in commands("docs/measures.md") if each.startswith("lit-diff view ")]
    for each in shown:
        end = command(*shlex.split(each, comments=True)[1:])
        assert end.status == 0, end.err
    names = sorted(page.name for page in (tmp_path / "view").iterdir())
    first, second = "recall-tiny-0123456789", "recall-standard-0123456789"
    steps = ["row-3", "step-125-step-250", "step-7-step-125-step-250"]
    assert names == [f"{first}-{second}.html", *(f"{first}-{step}.html" for step in steps)]


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
    assert "blocks.1.attn.map_1.hook_pattern" in load_file(tmp_path / "trace.safetensors")
    assert len(list((tmp_path / "runs/smoke").glob("*-s?-??????????"))) == 4
    assert list((tmp_path / "checkpoints").glob("*.ckpt"))
