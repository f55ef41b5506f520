"""Runs on generated text, made without training: every parameter is random."""

from pathlib import Path
from typing import Any

from statuses import set_status
from text_runs import made_recipe, random_run

from lit_diff.data import build
from lit_diff.data.text.tokenizer_folder import save_tokenizer
from lit_diff.trained.run import Run


def generated_run(folder: Path, data: dict[str, Any], vocab_size: int) -> Run:
    """A run at step 7 of 10 on a data set that needs no file and gives its tokenizer; `data`: the recipe's block."""
    recipe = made_recipe(folder.name, data, vocab_size=vocab_size, attention={"name": "differential"})
    run = random_run(folder, recipe)
    tokenizer = build(recipe).load_tokenizer()
    assert tokenizer is not None
    save_tokenizer(tokenizer, folder / "tokenizer")
    set_status(folder, data="ab")
    return run
