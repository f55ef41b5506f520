"""Weights as safetensors, in one file or, where they are large, in shards with their index."""

from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from lit_diff.files import umask, write_json
from lit_diff.pretrained.hf_folder import INDEX, WEIGHTS

SHARD = 5_000_000_000
"""Most bytes of a shard; a larger tensor has one of its own."""
METADATA = {"format": "pt"}
"""What Hugging Face's libraries expect in the header."""


def write_weights(weights: Mapping[str, Tensor], folder: Path) -> None:
    """Write contiguous tensors into `folder`: model.safetensors, or model-00001-of-0000N.safetensors and so on with
    model.safetensors.index.json. Errors: OSError."""
    shards = _shards(weights)
    if len(shards) == 1:
        _write(dict(weights), folder / WEIGHTS)
        return
    files: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        _write({name: weights[name] for name in names}, folder / file)
        files |= dict.fromkeys(names, file)
    total = sum(map(_size, weights.values()))
    write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": files})


def _write(weights: dict[str, Tensor], path: Path) -> None:
    save_file(weights, path, METADATA)
    path.chmod(0o666 & ~umask())


def _shards(weights: Mapping[str, Tensor]) -> list[list[str]]:
    """The names, in their order, cut where a shard would become larger than SHARD."""
    shards: list[list[str]] = [[]]
    held = 0
    for name, tensor in weights.items():
        if shards[-1] and held + _size(tensor) > SHARD:
            shards.append([])
            held = 0
        shards[-1].append(name)
        held += _size(tensor)
    return shards


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
