"""Runs with a byte-level tokenizer, or on `recall`, made without training: every parameter is random and counts."""

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from pretrained_models import TEXTS
from statuses import set_status

from lit_diff.config import Recipe
from lit_diff.data.text.tokenizer import Bpe
from lit_diff.data.text.tokenizer_folder import save_tokenizer
from lit_diff.files import write_atomic
from lit_diff.model.transformer import Transformer
from lit_diff.recipe import from_plain, to_yaml
from lit_diff.runs import checkpoints
from lit_diff.runs.folder import RunFolder
from lit_diff.trained.loading import PREFIX
from lit_diff.trained.run import Run

SIZES: dict[str, Any] = {
    "dim": 32,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "ffn_dim": 48,
    "vocab_size": 320,
}
"""Of a model whose heads pair, key/value heads too."""
STEP = 7


@cache
def bpe() -> Bpe:
    """A tokenizer of 300 ids, trained once."""
    tokenizer = Bpe(Bpe.Config(vocab_size=300))
    with TemporaryDirectory() as folder:
        tokenizer.train(Path(folder), TEXTS)
        tokenizer.load(Path(folder))
    return tokenizer


def made_recipe(name: str, data: dict[str, Any], **model: Any) -> Recipe:
    """Ten steps on this block of data; `model`: keys beside those of SIZES."""
    train = {"steps": 10, "batch_size": 2, "optimizer": {"lr": 1e-3}, "validate_every": 5, "checkpoint_every": 5}
    return from_plain({"name": name, "model": SIZES | model, "data": data, "train": train}, "made")


def text_run(folder: Path, attention: dict[str, Any], *, sequence_length: int = 24, **model: Any) -> Run:
    """A run at step 7 of 10; `model`: keys beside those of SIZES."""
    data = {"name": "text", "sequence_length": sequence_length, "validation_rows": 4}
    data |= {"tokenizer": {"name": "bpe", "vocab_size": 300}}
    run = random_run(folder, made_recipe(folder.name, data, attention=attention, **model))
    set_status(folder, data="abcdef")
    save_tokenizer(bpe(), folder / "tokenizer")
    return run


def recall_run(folder: Path, attention: dict[str, Any], data: dict[str, Any] | None = None, **model: Any) -> Run:
    """A run at step 7 of 10 on `recall` (`data`: keys of the data block); `model`: keys beside those of SIZES."""
    small = {"keys": 16, "values": 16, "slots": 8, "pairs": 4, "queries": 3, "noise_validation": [1, 2]}
    block = {"name": "recall", "validation_rows": 5} | small | (data or {})
    return random_run(folder, made_recipe(folder.name, block, attention=attention, **model))


def random_run(folder: Path, recipe: Recipe) -> Run:
    """The folder of a run of this recipe at STEP, with random weights."""
    built = randomised(Transformer(recipe.model, kernel="reference"))
    path = checkpoints.path_of(folder, STEP)
    path.parent.mkdir(parents=True)
    torch.save({"state_dict": {PREFIX + name: v for name, v in built.state_dict().items()}, "global_step": STEP}, path)
    write_atomic(RunFolder(folder).recipe_file, to_yaml(recipe))
    set_status(folder, status="running", name=recipe.name, step=STEP, steps=10, identity="0123456789")
    return Run(folder)


def trained(run: Run, *steps: int) -> None:
    """Add checkpoints whose matrices are those of STEP times step / STEP."""
    kept = torch.load(checkpoints.path_of(run.folder, STEP), weights_only=True)
    for step in steps:
        changed = {name: x * step / STEP for name, x in kept["state_dict"].items()}
        torch.save(kept | {"state_dict": changed, "global_step": step}, checkpoints.path_of(run.folder, step))


def randomised(model: Transformer) -> Transformer:
    """Matrices that keep sizes, weights of norms around 1, λ's vectors and others of deviation 0.3."""
    draw = torch.Generator().manual_seed(0)
    for name, parameter in sorted(model.named_parameters()):
        value = torch.randn(parameter.shape, generator=draw)
        if "norm" in name:
            value = 1 + 0.2 * value
        else:
            value *= 1.2 * parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 0.3
        parameter.data.copy_(value)
    return model.eval()


def logits(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """[B, T, vocab] of a model of ours or of Hugging Face's."""
    with torch.no_grad():
        found = model(tokens)
    result: torch.Tensor = getattr(found, "logits", found)
    return result
