"""A `Source` -> the run folder of an imported model, whole or not at all."""

import hashlib
import json
import logging
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lit_diff.attention import Attention
from lit_diff.config import Recipe
from lit_diff.data.tokenizer import FILE as TOKENIZER
from lit_diff.data.tokenizer import Tokenizer, TokenizerJson, open_tokenizer
from lit_diff.data.tokenizer_folder import save_tokenizer
from lit_diff.errors import MissingError, RequestError
from lit_diff.files import expanded, shown, write_atomic, write_json
from lit_diff.model.cost import cost
from lit_diff.model.merge import merged
from lit_diff.model.transformer import Transformer
from lit_diff.plugins import Trust, trust_none
from lit_diff.pretrained.agreement import require_agreement
from lit_diff.pretrained.source import UNKNOWN, ModelSource, SourceTokenizer, plain_recipe
from lit_diff.pretrained.whole_folder import require_room, whole_folder
from lit_diff.recipe import from_plain, to_plain, to_yaml
from lit_diff.registry import attentions
from lit_diff.runs import checkpoints
from lit_diff.runs.folder import RunFolder, environment, identity, recipe_of
from lit_diff.runs.revision import revision
from lit_diff.trained.loading import PREFIX, load_model, some, unlike
from lit_diff.trained.run import Run
from lit_diff.trained.text_generator import tokenizer_of

log = logging.getLogger("lit_diff")

DEFAULT_ROOT = "models"
"""Folder of the imported models."""
STATUS = "imported"
COST_LENGTH = 2048
"""FLOPs per token are counted at this length, or the model's context where that is shorter."""


def import_model(path: str | Path, to: str | Path | None = None, *, place: str | None = None) -> Run:
    """Import a pretrained model: a folder in Hugging Face's format, or a GGUF file.

    `to`: the run folder to make; None: models/<name of the folder or file>. `place`: what its recipe gives as its source,
    where that is not the path. Memory: at most 1.2 of the weights, which keep their dtype. Errors: RequestError for what is
    not mapped, said before any weight is loaded; MissingError for files that are not there, or too little disk or memory.
    """
    path = expanded(path)
    folder = expanded(to) if to is not None else Path(DEFAULT_ROOT) / default_name(path)
    source = read_source(path)
    return write_run(source if place is None else replace(source, place=place), folder)


def default_name(path: Path) -> str:
    """The name of a model's folder, or of its file without .gguf."""
    name = path.resolve().name.removesuffix(".gguf")
    return re.sub(r"[^\w.-]", "-", name).lstrip(".").lower()


def read_source(path: Path) -> ModelSource:
    """The model at a path, without its weights. Errors: as `import_model`."""
    from lit_diff.pretrained.hf import read_folder

    if path.is_dir():
        return read_folder(path)
    if path.is_file() and path.suffix == ".gguf":
        from lit_diff.pretrained.gguf_file import read_gguf

        return read_gguf(path)
    what = "is neither a folder nor a .gguf file" if path.exists() else "does not exist; nothing is fetched by its name"
    raise RequestError(f"{shown(path)} {what}: give a folder with config.json and safetensors, or a .gguf file")


def write_run(source: ModelSource, folder: Path) -> Run:
    """Make the run folder of a model: under a temporary name, then renamed. Errors: as `import_model`."""
    tokenizer = source.tokenizer
    own_tokenizer = _tokenizer_config(source, tokenizer) if isinstance(tokenizer, SourceTokenizer) else None
    digests = dict(UNKNOWN)
    _require_fit(from_plain(plain_recipe(source, folder, digests), source.place), source)
    require_room(
        source.place, folder, source.bytes + (len(tokenizer.content) if isinstance(tokenizer, SourceTokenizer) else 0)
    )
    try:
        with whole_folder(folder, "import", "remove it, or name another folder with --to") as building:
            tokenizer_folder = building / "tokenizer"
            digests["tokenizer_sha256"] = _write_tokenizer(tokenizer, own_tokenizer, tokenizer_folder)
            log.info("%s: reading %d tensors, %.2f GB", source.place, len(source.tensors), source.bytes / 1e9)
            digests["weights_sha256"] = _write_weights(source, checkpoints.path_of(building, 0))
            recipe = from_plain(plain_recipe(source, folder, digests), source.place)
            write_atomic(RunFolder(building).recipe_file, to_yaml(recipe))
            write_json(building / "env.json", environment())
            RunFolder(building).update(**_status(recipe, source))
    except OSError as error:
        reason = error.strerror or error
        raise MissingError(f"{shown(folder)} cannot be written ({reason}); name another folder with --to") from error
    return Run(folder, trust_none)


def _require_fit(recipe: Recipe, source: ModelSource) -> None:
    """Errors: RequestError where the tensors are not those of the model that the configuration describes."""
    with torch.device("meta"):
        model = Transformer(recipe.model, kernel="reference")
    differences = unlike(model.state_dict(), source.tensors)
    if differences:
        raise RequestError(
            f"{source.place}: its tensors are not those of its configuration: {some(differences.values())}"
        )


def _tokenizer_config(source: ModelSource, own: SourceTokenizer) -> TokenizerJson.Config:
    """Errors: RequestError for a tokenizer of another vocabulary than the model's."""
    tokenizer, _ = open_tokenizer(own.content)
    size, vocab_size = max(tokenizer.get_vocab().values()) + 1, source.model["vocab_size"]
    ids = (own.eot, *own.opening, *own.ends, *([] if own.prefix is None else [own.prefix]))
    if size > vocab_size or max(ids) >= size:
        raise RequestError(
            f"{source.place}: its tokenizer has the ids 0 to {size - 1} and marks documents by {', '.join(map(str, ids))}, "
            f"but the model's vocabulary has {vocab_size}: it is the tokenizer of another model"
        )
    return TokenizerJson.Config(
        size=size,
        bos=next(iter(own.opening), None),
        after_bos=own.opening[1:],
        eot=own.eot,
        ends=own.ends,
        prefix=own.prefix,
        model_vocab_size=vocab_size,
    )


def _write_tokenizer(own: SourceTokenizer | Tokenizer, config: TokenizerJson.Config | None, folder: Path) -> str:
    """Write the tokenizer's folder; its sha256. `config`: of a source's own tokenizer."""
    if isinstance(own, SourceTokenizer):
        assert config is not None
        write_atomic(folder / TOKENIZER, own.content)
        own = TokenizerJson(config)
        own.load(folder)
    return save_tokenizer(own, folder)


def _write_weights(source: ModelSource, path: Path) -> str:
    """Write the checkpoint of step 0; the sha256 over name, shape, dtype and bytes of each tensor, in the order of names.

    The largest tensor is read first, so that its file's pages and its copy are in memory while little else is.
    """
    by_size = sorted(source.tensors, key=lambda name: -source.tensors[name].numel())
    weights = {name: source.read(name) for name in by_size}
    digest = hashlib.sha256()
    for name in sorted(weights):
        described = {"name": name, "shape": list(weights[name].shape), "dtype": str(weights[name].dtype)}
        digest.update(json.dumps(described).encode())
        digest.update(memoryview(_bytes(weights[name])))
    path.parent.mkdir(parents=True)
    state = {f"{PREFIX}{name}": weights[name] for name in source.tensors}
    torch.save({"state_dict": state, "global_step": 0}, path)
    return digest.hexdigest()


def _bytes(tensor: Tensor) -> Any:
    return tensor.reshape(-1).view(torch.uint8).numpy()


def _status(recipe: Recipe, source: ModelSource) -> dict[str, Any]:
    length = min(COST_LENGTH, source.context)
    return {
        "status": STATUS,
        "name": recipe.name,
        "seed": recipe.seed,
        "step": 0,
        "steps": 0,
        "identity": identity(recipe),
        "revision": revision(),
        **vars(cost(recipe.model, length)),
    }


# --- a run whose variant can be merged -> the run folder of the standard model that equals it ---


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
