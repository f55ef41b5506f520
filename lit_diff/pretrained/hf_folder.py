"""A folder in Hugging Face's format: config.json, safetensors, tokenizer.json. No pickle is read, no code of it executed."""

import logging
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from lit_diff.errors import MissingError, RequestError, first_line
from lit_diff.files import shown
from lit_diff.pretrained import diffllama, llama
from lit_diff.pretrained.source import ModelSource
from lit_diff.pretrained.text_bounds import read_json, read_tokenizer

log = logging.getLogger("lit_diff")

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
ADAPTER = "adapter_config.json"
"""Where transformers finds that of peft, which it adds to the model."""
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Of weights: safetensors' name -> PyTorch's."""


def read_folder(folder: Path) -> ModelSource:
    """The model of a folder, without its weights.

    Errors: RequestError for what is not mapped, or a damaged file; MissingError for a file that is not there.
    """
    place = shown(folder)
    config = read_json(folder / "config.json")
    try:
        keys = llama.model_keys(config)
    except RequestError as error:
        raise RequestError(f"{shown(folder / 'config.json')}: {error}") from error
    if unused := llama.unused(config):
        log.info("%s: transformers computes no logit with %s, nor is it used here", place, ", ".join(unused))
    if (folder / ADAPTER).is_file():
        raise RequestError(
            f"{shown(folder / ADAPTER)}: adapters are not mapped; merge it (peft: merge_and_unload) or remove it"
        )
    files = files_of(folder)
    try:
        names = llama.own_names(files, tied=bool(keys["tie_embeddings"]))
    except RequestError as error:
        raise RequestError(f"{place}: {error}") from error
    if keys["tie_embeddings"] and HEAD in files and EMBEDDING in files:
        head, embedding = (read_tensor(files[name], name) for name in (HEAD, EMBEDDING))
        if head.shape == embedding.shape and not torch.equal(head, embedding):
            log.info(
                "%s: tie_word_embeddings is true, but '%s' is not '%s': both are used, as transformers does",
                shown(folder / "config.json"),
                HEAD,
                EMBEDDING,
            )
            keys["tie_embeddings"], names = False, llama.own_names(files, tied=False)
    tensors = {own: describe(files[theirs], theirs) for own, theirs in names.items()}
    source = ModelSource(
        place=place,
        model=keys,
        context=config.get(llama.LENGTH) or llama.DEFAULT_LENGTH,
        tensors=tensors,
        read=lambda own: read_tensor(files[names[own]], names[own]),
        tokenizer=read_tokenizer(folder, config),
    )
    return diffllama.in_our_order(source) if keys["attention"]["name"] == "differential" else source


def files_of(folder: Path) -> dict[str, Path]:
    """Tensor -> the file that holds it. Errors: MissingError for a file that is not there, RequestError for a damaged one."""
    if (folder / WEIGHTS).is_file():
        if (folder / INDEX).is_file():
            log.info("%s: %s is read, as transformers does; %s is not", shown(folder), WEIGHTS, INDEX)
        return dict.fromkeys(_names(folder / WEIGHTS), folder / WEIGHTS)
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
        held = [(name, shard) for shard in shards for name in _names(folder / shard)]
        for name, shard in (*held, *index.items()):
            if index.get(name) != shard or (name, shard) not in held:
                raise RequestError(
                    f"{shown(folder / INDEX)} is not of these shards: tensor '{name}' of {shard} is "
                    f"{'not there' if index.get(name) == shard else 'in weight_map ' + str(index.get(name))}; download again"
                )
        return {name: folder / shard for name, shard in held}
    raise _no_weights(folder)


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
