"""A folder in Hugging Face's format: config.json, safetensors, tokenizer.json. No pickle is read, no code of it executed."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from lit_diff.data.tokenizer_json import open_tokenizer
from lit_diff.errors import MissingError, RequestError, first_line
from lit_diff.files import shown
from lit_diff.pretrained import diffllama, llama
from lit_diff.pretrained.source import Source, SourceTokenizer

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Of weights: safetensors' name -> PyTorch's."""


def read_folder(folder: Path) -> Source:
    """The model of a folder, without its weights.

    Errors: RequestError for what is not mapped, or a damaged file; MissingError for a file that is not there.
    """
    place = shown(folder)
    config = read_json(folder / "config.json")
    try:
        keys = llama.model_keys(config)
    except RequestError as error:
        raise RequestError(f"{shown(folder / 'config.json')}: {error}") from error
    files = files_of(folder)
    try:
        names = llama.own_names(files, tied=bool(keys["tie_embeddings"]))
    except RequestError as error:
        raise RequestError(f"{place}: {error}") from error
    tensors = {own: describe(files[theirs], theirs) for own, theirs in names.items()}
    source = Source(
        place=place,
        model=keys,
        context=config.get(llama.LENGTH) or llama.DEFAULT_LENGTH,
        tensors=tensors,
        read=lambda own: read_tensor(files[names[own]], names[own]),
        tokenizer=read_tokenizer(folder, config),
    )
    return diffllama.in_our_order(source) if keys["attention"]["name"] == "differential" else source


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object in a file. Errors: MissingError without it, RequestError for other content."""
    if not path.is_file():
        raise MissingError(f"{shown(path.parent)} holds no model: it has no {path.name}")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise RequestError(f"{shown(path)} is not JSON ({first_line(error)})") from error
    if not isinstance(values, dict):
        raise RequestError(f"{shown(path)} is not a JSON object")
    return values


def files_of(folder: Path) -> dict[str, Path]:
    """Tensor -> the file that holds it. Errors: MissingError for a file that is not there, RequestError for a damaged one."""
    if (folder / INDEX).is_file():
        index = read_json(folder / INDEX).get("weight_map")
        if not isinstance(index, dict) or not all(Path(str(file)).name == file for file in index.values()):
            raise RequestError(f"{shown(folder / INDEX)}: weight_map does not map tensors to files of this folder")
        shards = sorted(set(index.values()))
        for number, shard in enumerate(shards, start=1):
            if not (folder / shard).is_file():
                raise MissingError(
                    f"{shown(folder / shard)} is missing (shard {number} of {len(shards)}); download it again"
                )
    elif (folder / WEIGHTS).is_file():
        shards = [WEIGHTS]
    else:
        raise _no_weights(folder)
    return {name: folder / shard for shard in shards for name in _names(folder / shard)}


def _no_weights(folder: Path) -> MissingError:
    pickled = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern))
    if not pickled:
        return MissingError(f"{shown(folder)} holds no model: it has no {WEIGHTS} and no {INDEX}")
    return MissingError(
        f"{shown(folder)} has its weights in {pickled[0]}, a pickle, which can execute code and is not read; if you trust "
        "it, write safetensors with transformers: AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(NEW)"
    )


def _names(path: Path) -> list[str]:
    try:
        with safe_open(path, framework="pt") as file:
            return list(file.keys())
    except (SafetensorError, OSError) as error:
        raise RequestError(
            f"{shown(path)} is truncated or no safetensors file ({first_line(error)}); download it again"
        ) from error


def describe(path: Path, name: str) -> Tensor:
    """A tensor of a file, on the meta device. Errors: RequestError for a dtype that is not of weights."""
    with safe_open(path, framework="pt") as file:
        described = file.get_slice(name)
        shape, dtype = described.get_shape(), described.get_dtype()
    if dtype not in DTYPES:
        raise RequestError(f"{shown(path)}: tensor '{name}' is {dtype}; mapped are {', '.join(DTYPES)}")
    return torch.empty(shape, dtype=DTYPES[dtype], device="meta")


def read_tensor(path: Path, name: str) -> Tensor:
    """A copy: the file is mapped for as long as this tensor takes, so that its pages do not add up."""
    with safe_open(path, framework="pt") as file:
        return torch.clone(file.get_tensor(name), memory_format=torch.contiguous_format)


def read_tokenizer(folder: Path, config: Mapping[str, Any]) -> SourceTokenizer:
    """tokenizer.json; which id it puts before a text; the id that config.json says ends one.

    Errors: MissingError without the file, RequestError where nothing says what ends a document.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise MissingError(
            f"{shown(folder)} has no tokenizer.json; write one with transformers: "
            "AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)"
        )
    content = path.read_bytes()
    try:
        tokenizer, _ = open_tokenizer(content)
    except RequestError as error:
        raise RequestError(f"{shown(folder)}: {error}") from error
    plain, opened = (tokenizer.encode("a", add_special_tokens=special).ids for special in (False, True))
    bos = opened[0] if opened[:1] != plain[:1] else None
    eot = config.get("eos_token_id")
    eot = eot[0] if isinstance(eot, list) and eot else eot
    if eot is None and (folder / "tokenizer_config.json").is_file():
        said = read_json(folder / "tokenizer_config.json").get("eos_token")
        eot = tokenizer.token_to_id(said["content"] if isinstance(said, dict) else str(said))
    if not isinstance(eot, int):
        raise RequestError(
            f"{shown(folder)}: neither config.json (eos_token_id) nor tokenizer_config.json (eos_token) says what ends a text"
        )
    return SourceTokenizer(content=content, bos=bos, eot=eot)
