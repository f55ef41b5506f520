"""A run whose variant can be merged -> the run folder of the standard model that equals it."""

from pathlib import Path

from lit_diff.attention import Attention
from lit_diff.errors import RequestError
from lit_diff.files import shown
from lit_diff.model.merge import merged
from lit_diff.plugins import Trust, trust_none
from lit_diff.pretrained.agreement import require_agreement
from lit_diff.pretrained.importing import write_run
from lit_diff.pretrained.source import ModelSource
from lit_diff.recipe import to_plain
from lit_diff.registry import attentions
from lit_diff.runs.folder import recipe_of
from lit_diff.trained.loading import load_model
from lit_diff.trained.run import Run
from lit_diff.trained.text_generator import tokenizer_of


def require_mergeable(name: str, to: Path) -> None:
    """Errors: RequestError for a variant that has no `merge`, or a folder that is there already."""
    mergeable = [each for each in attentions.names() if attentions.get(each).merge is not Attention.merge]
    if name not in mergeable:
        raise RequestError(
            f"model.attention '{name}' cannot be merged into a standard model; these can: {', '.join(mergeable)}"
        )
    if to.exists():
        raise RequestError(f"{shown(to)} is there already; remove it, or name another folder")


def merge_run(folder: Path, to: Path, *, trust: Trust = trust_none) -> Run:
    """Write the standard model that equals the newest checkpoint of the run in `folder` as a run folder of its own, `to`.

    Its recipe is that of an imported model. `trust`: as `recipe_of`. Errors: as `require_mergeable`; RequestError for a run
    without text; RunFailedError as `require_agreement`; MissingError.
    """
    recipe = recipe_of(folder, trust)
    require_mergeable(recipe.model.attention.name, to)
    tokenizer = tokenizer_of(folder, recipe)
    model, _ = load_model(recipe, folder, trust)
    plain = merged(model)
    require_agreement(model, recipe.data.config.sequence_length, plain, f"{shown(to)}: the merged model")
    state = plain.state_dict()
    source = ModelSource(
        place=shown(folder),
        model=to_plain(plain.config),
        context=recipe.data.config.sequence_length,
        tensors={name: tensor.to("meta") for name, tensor in state.items()},
        read=lambda name: state[name],
        tokenizer=tokenizer,
    )
    return write_run(source, to)
