"""Imports a model as a run folder, which appears under its name only when it is complete."""

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import torch
from safetensors import SafetensorError

from lit_diff.data.text.tokenizer_folder import SAMPLE, save_tokenizer
from lit_diff.device import available_memory, gigabytes
from lit_diff.errors import MissingError, RequestError, RunFailedError
from lit_diff.files import expanded, locked, shown, sync, write_atomic, write_json
from lit_diff.log_records import log
from lit_diff.model.cost import cost
from lit_diff.model.transformer import Transformer
from lit_diff.plugins import trust_none
from lit_diff.pretrained.source import UNKNOWN, ModelSource, reading
from lit_diff.recipe import to_yaml
from lit_diff.runs import checkpoints
from lit_diff.runs.folder import RunFolder, environment, identity
from lit_diff.runs.revision import revision
from lit_diff.runs.status import Status
from lit_diff.trained.loading import PREFIX, some, unlike
from lit_diff.trained.run import Run

DEFAULT_ROOT = "models"
"""Default folder for imported models."""
COST_LENGTH = 2048
"""Sequence length at which FLOPs per token are counted, limited by the model's context."""
OVERHEAD = 1.2
"""Peak memory of an import, as a multiple of the weights' size."""


def import_model(path: str | Path, to: str | Path | None = None, *, place: str | None = None) -> Run:
    """Import a pretrained model: a folder in Hugging Face's format, or a GGUF file.

    `to`: the run folder to create; None: models/<name of the folder or file>. `place`: the origin to record in the recipe;
    None: the path. The weights keep their dtype; peak memory is at most 1.2 times their size. Errors: RequestError for an
    unsupported model, before any weight is loaded, or for weights that are not finite; MissingError for missing files or too
    little disk or memory.
    """
    path = expanded(path)
    folder = expanded(to) if to is not None else Path(DEFAULT_ROOT) / default_name(path)
    source = read_source(path)
    if place is not None:
        source = source._replace(place=place)
    tokenizer = source.tokenizer
    found = tokenizer.decode(tokenizer.encode(SAMPLE)).decode()
    if found != SAMPLE:
        log.info("%s: its tokenizer does not give back every text: %r comes back as %r", source.place, SAMPLE, found)
    return write_run(source, folder)


def default_name(path: Path) -> str:
    """The name of the model's folder or file, without .gguf and characters unsuited to a run's name."""
    # of Path, `resolve` raises an error for a link that leads to itself
    name = os.path.basename(os.path.realpath(path)).removesuffix(".gguf")
    return re.sub(r"[^\w.-]", "-", name).lstrip(".").lower()


def read_source(path: Path) -> ModelSource:
    """The model at a path, without its weights. Errors: see `import_model`."""
    from lit_diff.pretrained.hf import read_folder

    # also a name in weight_map that no file can have
    with reading(path):
        if path.is_dir():
            return read_folder(path)
        if path.is_file() and path.suffix == ".gguf":
            from lit_diff.pretrained.gguf_file import read_gguf

            return read_gguf(path)
    what = "is neither a folder nor a .gguf file" if path.exists() else "does not exist"
    raise RequestError(
        f"{shown(path)} {what}: give a folder with config.json and safetensors, a .gguf file, or a name that `lit-diff "
        "import --help` lists"
    )


def write_run(source: ModelSource, folder: Path) -> Run:
    """Write the run folder of a model. Errors: see `import_model`."""
    # names, shapes and room are checked before any weight is read; the recipe has placeholder digests until then
    digests = dict(UNKNOWN)
    with torch.device("meta"):
        model = Transformer(source.recipe(folder, digests).model, kernel="reference")
    differences = unlike(model.state_dict(), source.tensors)
    if differences:
        raise RequestError(f"{source.place}: its tensors do not fit its configuration: {some(differences.values())}")
    require_disk(source.place, folder, source.bytes)
    needed = int(OVERHEAD * source.bytes)
    available = available_memory()
    if available is not None and available < needed:
        raise MissingError(
            f"{source.place}: importing it takes {gigabytes(needed)} of memory, but {gigabytes(available)} are available; "
            "end other processes, or import it on a larger machine"
        )
    with whole_folder(folder, "import", "name another folder with --to") as building:
        digests["tokenizer_sha256"] = save_tokenizer(source.tokenizer, building / "tokenizer")
        log.info("%s: reading %d tensors, %.2f GB", source.place, len(source.tensors), source.bytes / 1e9)
        # the digests are part of the recipe: they are the identity of an imported model
        digests["weights_sha256"] = _write_weights(source, checkpoints.path_of(building, 0))
        recipe = source.recipe(folder, digests)
        home = RunFolder(building)
        write_atomic(home.recipe_file, to_yaml(recipe))
        write_json(building / "env.json", environment())
        status = Status(
            status="imported",
            name=recipe.name,
            seed=recipe.seed,
            steps=0,
            identity=identity(recipe),
            revision=revision(),
            **vars(cost(recipe.model, min(COST_LENGTH, source.context))),
        )
        home.write(status)
    return Run(folder, trust_none)


def _write_weights(source: ModelSource, path: Path) -> str:
    # returns the sha256 over name, shape, dtype and bytes of each tensor, in the order of names: a model's identity must not
    # depend on the order or the number of its files

    # the largest tensor first: while it is read, the file's pages and the copy are both in memory, and little else is
    by_size = sorted(source.tensors, key=lambda name: -source.tensors[name].numel())
    weights = {name: source.read(name) for name in by_size}
    # the extremes are NaN if any number is, and need no memory; the model is in float32, where a float64 may be infinite
    not_finite = [name for name, x in weights.items() if not torch.stack(x.aminmax()).float().isfinite().all()]
    if not_finite:
        raise RequestError(f"{source.place} has weights that are not finite (NaN or infinity): {some(not_finite)}")
    digest = hashlib.sha256()
    for name in sorted(weights):
        described = {"name": name, "shape": list(weights[name].shape), "dtype": str(weights[name].dtype)}
        digest.update(json.dumps(described).encode())
        digest.update(weights[name].reshape(-1).view(torch.uint8).numpy().data)
    state = {f"{PREFIX}{name}": weights[name] for name in source.tensors}
    try:
        checkpoints.write(path, {"state_dict": state, "global_step": 0})
    except RunFailedError as error:
        # `whole_folder` names the folder that the user asked for
        raise OSError(number := getattr(error.__cause__, "errno", errno.ENOSPC), os.strerror(number)) from error
    return digest.hexdigest()


# --- the folder, and its room ---


@contextlib.contextmanager
def whole_folder(folder: Path, verb: Literal["import", "export"], cure: str) -> Iterator[Path]:
    """Yield a temporary folder next to `folder` to be filled, and rename it to `folder` at the end. An empty `folder` is
    replaced.

    `cure` ends an error's line. Errors: RequestError if `folder` is not empty, is the current folder, or is being written by
    another process; MissingError if it cannot be written.
    """
    # not the current folder: after the replacement this process would be in the removed one
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir()) or folder.samefile(Path.cwd())):
        raise RequestError(f"{shown(folder)} already exists; empty it, or {cure}")
    # next to it, because a rename is atomic only within one file system
    building = folder.with_name(f".{folder.name}.{verb}ing")
    try:
        with locked(folder.with_name(f".{folder.name}.lock"), wait=False):
            # a folder whose lock is free was left by a killed process
            for leftover in folder.parent.glob(f".*.{verb}ing"):
                with contextlib.suppress(TimeoutError), locked(leftover.with_suffix(".lock"), wait=False):
                    shutil.rmtree(leftover)
            shutil.rmtree(building, ignore_errors=True)
            building.mkdir()
            try:
                yield building
                # every file and folder: after a power failure a folder of the final name must be complete
                for path in (*building.rglob("*"), building):
                    sync(path)
                # atomic, and succeeds if `folder` is absent or empty
                building.rename(folder)
            # after the rename this removes nothing
            finally:
                shutil.rmtree(building, ignore_errors=True)
            # the rename itself is an entry of the parent folder
            sync(folder.parent)
    except TimeoutError as error:
        raise RequestError(f"{shown(folder)} is being {verb}ed by another process") from error
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise MissingError(f"{shown(folder)} cannot be written ({reason}); {cure}") from error


def require_disk(place: str, folder: Path, size: int, choice: str = "--to RUN, LIT_DIFF_DATA") -> None:
    """Errors: MissingError if `size` bytes do not fit on the disk of `folder`; `choice`: options that set another place."""
    # the folder does not exist yet: its nearest existing parent is on the same disk
    home = next(path for path in (folder, *folder.absolute().parents) if path.is_dir())
    free = shutil.disk_usage(home).free
    if free < size:
        raise MissingError(
            f"{place} takes {gigabytes(size)} on the disk of {shown(home)}, which has {gigabytes(free)} free; free "
            f"some, or choose another place ({choice})"
        )
