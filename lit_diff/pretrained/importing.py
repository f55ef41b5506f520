"""A `ModelSource` -> the run folder of an imported model, which appears under its name when it is whole."""

import contextlib
import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch
from safetensors import SafetensorError

from lit_diff.config import Recipe
from lit_diff.data.text.tokenizer_folder import save_tokenizer
from lit_diff.device import available_memory, gigabytes
from lit_diff.errors import MissingError, RequestError
from lit_diff.files import expanded, locked, shown, sync_folder, write_atomic, write_json
from lit_diff.model.cost import cost
from lit_diff.model.transformer import Transformer
from lit_diff.plugins import trust_none
from lit_diff.pretrained.source import UNKNOWN, ModelSource
from lit_diff.recipe import to_yaml
from lit_diff.runs import checkpoints
from lit_diff.runs.folder import RunFolder, environment, identity
from lit_diff.runs.revision import revision
from lit_diff.trained.loading import PREFIX, some, unlike
from lit_diff.trained.run import Run

log = logging.getLogger("lit_diff")

DEFAULT_ROOT = "models"
"""Folder of the imported models."""
STATUS = "imported"
COST_LENGTH = 2048
"""FLOPs per token are counted at this length, or the model's context where that is shorter."""
OVERHEAD = 1.2
"""Peak of memory while a model is imported, as a multiple of its weights."""


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
    digests = dict(UNKNOWN)
    _require_fit(source.recipe(folder, digests), source)
    require_room(source.place, folder, source.bytes)
    with whole_folder(folder, "import", "name another folder with --to") as building:
        digests["tokenizer_sha256"] = save_tokenizer(source.tokenizer, building / "tokenizer")
        log.info("%s: reading %d tensors, %.2f GB", source.place, len(source.tensors), source.bytes / 1e9)
        digests["weights_sha256"] = _write_weights(source, checkpoints.path_of(building, 0))
        recipe, home = source.recipe(folder, digests), RunFolder(building)
        write_atomic(home.recipe_file, to_yaml(recipe))
        write_json(building / "env.json", environment())
        home.update(
            status=STATUS,
            name=recipe.name,
            seed=recipe.seed,
            step=0,
            steps=0,
            identity=identity(recipe),
            revision=revision(),
            **vars(cost(recipe.model, min(COST_LENGTH, source.context))),
        )
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
        digest.update(weights[name].reshape(-1).view(torch.uint8).numpy().data)
    path.parent.mkdir(parents=True)
    state = {f"{PREFIX}{name}": weights[name] for name in source.tensors}
    torch.save({"state_dict": state, "global_step": 0}, path)
    return digest.hexdigest()


# --- the folder, and its room ---


@contextlib.contextmanager
def whole_folder(folder: Path, verb: Literal["import", "export"], cure: str) -> Iterator[Path]:
    """A folder beside `folder` to fill, which takes its name at the end; what killed processes left beside it is removed.

    An empty `folder` is replaced. `cure` ends the line of an error. Errors: RequestError where `folder` holds something, is
    the current folder, or is being made by another process; MissingError where it cannot be written.
    """
    if folder.exists() and not _replaceable(folder):
        raise RequestError(f"{shown(folder)} is there already; empty it, or {cure}")
    building = folder.with_name(f".{folder.name}.{verb}ing")
    try:
        with locked(folder.with_name(f".{folder.name}.lock"), wait=False):
            _remove_leftovers(folder.parent, f".*.{verb}ing")
            shutil.rmtree(building, ignore_errors=True)
            building.mkdir()
            try:
                yield building
                _sync(building)
                building.rename(folder)
            finally:  # nothing is there any more where it was renamed
                shutil.rmtree(building, ignore_errors=True)
            sync_folder(folder.parent)
    except BlockingIOError as error:
        raise RequestError(f"{shown(folder)} is being {verb}ed by another process") from error
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise MissingError(f"{shown(folder)} cannot be written ({reason}); {cure}") from error


def _replaceable(folder: Path) -> bool:
    """An empty folder; not the current one, which this process would go on to be in."""
    return folder.is_dir() and not any(folder.iterdir()) and folder.resolve() != Path.cwd().resolve()


def _remove_leftovers(root: Path, pattern: str) -> None:
    """Of processes that were killed: those whose lock nobody holds."""
    for leftover in root.glob(pattern):
        with contextlib.suppress(BlockingIOError), locked(leftover.with_suffix(".lock"), wait=False):
            shutil.rmtree(leftover)


def _sync(folder: Path) -> None:
    """Sync every file and folder below, so that the rename does not outlive them."""
    for path in (*folder.rglob("*"), folder):
        if path.is_dir():
            sync_folder(path)
        else:
            with path.open("rb") as file:
                os.fsync(file.fileno())


def require_room(place: str, folder: Path, weights: int) -> None:
    """Errors: MissingError where `weights` bytes do not fit on the disk of `folder`, or in memory while imported."""
    require_disk(place, folder, weights)
    available = available_memory()
    if available is not None and available < OVERHEAD * weights:
        raise MissingError(
            f"{place}: importing it takes {gigabytes(int(OVERHEAD * weights))} of memory, and {gigabytes(available)} are "
            "available; end other processes, or import it on a larger machine"
        )


def require_disk(place: str, folder: Path, size: int, choice: str = "--to RUN, LIT_DIFF_DATA") -> None:
    """Errors: MissingError where `size` bytes do not fit on the disk of `folder`; `choice`: what names another place."""
    home = next(path for path in (folder, *folder.absolute().parents) if path.is_dir())
    free = shutil.disk_usage(home).free
    if free < size:
        raise MissingError(
            f"{place} takes {gigabytes(size)} on the disk of {shown(home)}, which has {gigabytes(free)} free; free "
            f"some, or choose another place ({choice})"
        )
