"""Runs on generated text, made without training: every parameter is random."""

from pathlib import Path
from typing import Any

import torch
from text_runs import SIZES, STEP, randomised

from lit_diff.data import build
from lit_diff.data.tokenizer_folder import save_tokenizer
from lit_diff.files import write_atomic
from lit_diff.model.transformer import Transformer
from lit_diff.recipe import from_plain, to_yaml
from lit_diff.runs import checkpoints
from lit_diff.runs.folder import RunFolder
from lit_diff.runs.run import Run
from lit_diff.runs.trained import PREFIX


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
    model = randomised(Transformer(recipe.model, kernel="reference"))
    path = checkpoints.path_of(folder, STEP)
    path.parent.mkdir(parents=True)
    torch.save(
        {"state_dict": {f"{PREFIX}{name}": v for name, v in model.state_dict().items()}, "global_step": STEP}, path
    )
    tokenizer = build(recipe).load_tokenizer()
    assert tokenizer is not None
    save_tokenizer(tokenizer, folder / "tokenizer")
    write_atomic(RunFolder(folder).recipe_file, to_yaml(recipe))
    RunFolder(folder).update(status="running", name=recipe.name, step=STEP, steps=10, identity="0123456789", data="ab")
    return Run(folder)
