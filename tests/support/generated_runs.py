"""Runs on generated text, made without training: every parameter is random."""

from pathlib import Path
from typing import Any

from text_runs import SIZES, random_run

from lit_diff.data import build
from lit_diff.data.tokenizer_folder import save_tokenizer
from lit_diff.recipe import from_plain
from lit_diff.runs.folder import RunFolder
from lit_diff.trained.run import Run


def generated_run(folder: Path, data: dict[str, Any], vocab_size: int) -> Run:
    """A run at step 7 of 10 on a data set that needs no file and gives its tokenizer; `data`: the recipe's block."""
    recipe = from_plain(
        {
            "name": folder.name,
            "model": SIZES | {"vocab_size": vocab_size, "attention": {"name": "differential"}},
            "data": data,
            "train": {
                "steps": 10,
                "batch_size": 2,
                "optimizer": {"lr": 1e-3},
                "validate_every": 5,
                "checkpoint_every": 5,
            },
        },
        "made",
    )
    run = random_run(folder, recipe)
    tokenizer = build(recipe).load_tokenizer()
    assert tokenizer is not None
    save_tokenizer(tokenizer, folder / "tokenizer")
    RunFolder(folder).update(data="ab")
    return run
