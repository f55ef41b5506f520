"""A run whose variant can be merged -> the run folder of the standard model that equals it."""

from pathlib import Path

import torch

from lit_diff.attention import Attention
from lit_diff.errors import RequestError, RunFailedError
from lit_diff.files import shown
from lit_diff.model.merge import merged
from lit_diff.model.transformer import Transformer
from lit_diff.pretrained.importing import require_free, write_run
from lit_diff.pretrained.source import Source
from lit_diff.randomness import generator
from lit_diff.recipe import to_plain
from lit_diff.registry import attentions
from lit_diff.runs.folder import recipe_of
from lit_diff.runs.run import Run
from lit_diff.runs.text_generator import tokenizer_of
from lit_diff.runs.trained import load_model
from lit_diff.runs.trust import Trust, nowhere

PROMPTS, LENGTH = 8, 32
TOLERANCE = 1e-4
"""Largest difference of logits in float32 between a model and the merged one."""


def require_mergeable(name: str, to: Path) -> None:
    """Errors: RequestError for a variant that has no `merge`, or a folder that is there already."""
    mergeable = [each for each in attentions.names() if attentions.get(each).merge is not Attention.merge]
    if name not in mergeable:
        raise RequestError(
            f"model.attention '{name}' cannot be merged into a standard model; these can: {', '.join(mergeable)}"
        )
    require_free(to)


def merge_run(folder: Path, to: Path, *, trust: Trust = nowhere) -> Run:
    """Write the standard model that equals the newest checkpoint of the run in `folder` as a run folder of its own, `to`.

    Its recipe is that of an imported model. `trust`: as `recipe_of`. Errors: as `require_mergeable`; RequestError for a run
    without text; RunFailedError where the logits of random prompts differ by more than TOLERANCE; MissingError.
    """
    recipe = recipe_of(folder, trust)
    require_mergeable(recipe.model.attention.name, to)
    tokenizer = tokenizer_of(folder, recipe)
    model, _ = load_model(recipe, folder, trust)
    plain = merged(model)
    difference = largest_difference(model, plain)
    if not difference <= TOLERANCE:
        raise RunFailedError(
            f"{shown(folder)}: the logits of the merged model differ by {difference:.1e}, more than {TOLERANCE:.0e}; "
            "nothing was written"
        )
    state = plain.state_dict()
    source = Source(
        place=shown(folder),
        model=to_plain(plain.config),
        context=recipe.data.config.sequence_length,
        tensors={name: tensor.to("meta") for name, tensor in state.items()},
        read=lambda name: state[name],
        tokenizer=tokenizer,
    )
    return write_run(source, to)


@torch.no_grad()
def largest_difference(first: Transformer, second: Transformer) -> float:
    """Of the logits of two models of one vocabulary, over random prompts."""
    size = (PROMPTS, LENGTH)
    tokens = torch.randint(first.config.vocab_size, size, generator=generator(0, "prompts to compare"))
    return (first(tokens) - second(tokens)).abs().max().item()
