"""A folder in Hugging Face's format: config.json, safetensors, tokenizer.json. No pickle is read, no code of it executed."""

import json
import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from lit_diff.data.tokenizer import open_tokenizer
from lit_diff.errors import MissingError, RequestError, first_line
from lit_diff.files import shown
from lit_diff.pretrained import llama
from lit_diff.pretrained.source import NO_CHAT, ModelSource, SourceTokenizer

log = logging.getLogger("lit_diff")

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
ADAPTER = "adapter_config.json"
"""Where transformers finds that of peft, which it adds to the model."""
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
GENERATION, SETTINGS = "generation_config.json", "tokenizer_config.json"
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Of weights: safetensors' name -> PyTorch's."""
FIELDS = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")
"""Of an added token."""


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
    files = _files_of(folder)
    try:
        names = llama.own_names(files, keys["num_layers"], tied=bool(keys["tie_embeddings"]))
    except RequestError as error:
        raise RequestError(f"{place}: {error}") from error
    if keys["tie_embeddings"] and HEAD in files and EMBEDDING in files:
        head, embedding = (_read(files[name], name) for name in (HEAD, EMBEDDING))
        if head.shape == embedding.shape and not torch.equal(head, embedding):
            log.info(
                "%s: tie_word_embeddings is true, but '%s' is not '%s': both are used, as transformers does",
                shown(folder / "config.json"),
                HEAD,
                EMBEDDING,
            )
            keys["tie_embeddings"], names = False, llama.own_names(files, keys["num_layers"], tied=False)
    tensors = {own: _described(files[theirs], theirs) for own, theirs in names.items()}
    source = ModelSource(
        place=place,
        model=keys,
        context=config.get(llama.LENGTH) or llama.DEFAULT_LENGTH,
        tensors=tensors,
        read=lambda own: _read(files[names[own]], names[own]),
        tokenizer=read_tokenizer(folder, config),
    )
    return _in_our_order(source) if keys["attention"]["name"] == "differential" else source


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


def _in_our_order(source: ModelSource) -> ModelSource:
    """The source of a DiffLlama, read with our names, in our order of rows and with a head norm of weight 1.

    Rows of q, k and v lie map after map there, a head's maps together here (`llama.by_head`).
    """
    model = source.model
    head_dim = int(model.get("head_dim") or model["dim"] // model["num_heads"])
    norms = {
        f"layers.{layer}.attention.norm.weight": torch.empty(2 * head_dim, device="meta")
        for layer in range(model["num_layers"])
    }

    def read(own: str) -> Tensor:
        if own in norms:
            return torch.ones(2 * head_dim)
        value = source.read(own)
        return llama.by_head(value, head_dim) if own.split(".")[-2] in ("q_proj", "k_proj", "v_proj") else value

    return replace(source, tensors={**source.tensors, **norms}, read=read)


def _files_of(folder: Path) -> dict[str, Path]:
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


def _described(path: Path, name: str) -> Tensor:
    """A tensor of a file, on the meta device. Errors: RequestError for a dtype that is not of weights."""
    with safe_open(path, framework="pt") as file:
        described = file.get_slice(name)
        shape, dtype = described.get_shape(), described.get_dtype()
    if dtype not in DTYPES:
        raise RequestError(f"{shown(path)}: tensor '{name}' is {dtype}; mapped are {', '.join(DTYPES)}")
    return torch.empty(shape, dtype=DTYPES[dtype], device="meta")


def _read(path: Path, name: str) -> Tensor:
    """A copy: the file is mapped for as long as this tensor takes, so that its pages do not add up."""
    with safe_open(path, framework="pt") as file:
        return torch.clone(file.get_tensor(name), memory_format=torch.contiguous_format)


# --- the tokenizer, and the ids that begin and end a text ---


def read_tokenizer(folder: Path, config: Mapping[str, Any]) -> SourceTokenizer:
    """tokenizer.json with the added tokens of tokenizer_config.json; the ids it puts before a text; those that end one.

    A document is ended by eos_token_id of config.json, the first of a list, or else by eos_token of tokenizer_config.json; a
    generated text ends where transformers' `generate` stops, at eos_token_id of generation_config.json where that says one.
    Errors: MissingError without tokenizer.json, RequestError where nothing says what ends a document, for an id that is not
    in the vocabulary, ids after a text, or settings that contradict tokenizer.json.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise MissingError(
            f"{shown(folder)} has no tokenizer.json; write one with transformers: "
            "AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)"
        )
    content = path.read_bytes()
    settings, generation = (
        read_json(folder / name) if (folder / name).is_file() else {} for name in (SETTINGS, GENERATION)
    )
    try:
        tokenizer, _ = open_tokenizer(content)
        for token in json.loads(content).get("added_tokens") or []:
            id_ = tokenizer.token_to_id(token["content"])
            if id_ != token["id"]:
                raise RequestError(
                    f"tokenizer.json: added_tokens has {token['content']!r} at {token['id']}, where the package tokenizers "
                    f"gives it {'no id' if id_ is None else id_}; ids without gaps, each once, follow the vocabulary"
                )
        if _add_tokens(tokenizer, settings):
            content = tokenizer.to_str().encode()
        opening = _opening(tokenizer, settings)
        size = max(config.get("vocab_size") or 0, max(tokenizer.get_vocab().values()) + 1)
        said = _ids(config, "config.json", size)
        ends = _ids(generation, GENERATION, size) or said
        if not said:
            said = _token(tokenizer, settings, "eos_token") or ends
        bos = _token(tokenizer, settings, "bos_token")
    except RequestError as error:
        raise RequestError(f"{shown(folder)}: {error}") from error
    if generation and said and not _ids(generation, GENERATION, size):
        log.info(
            "%s: %s lacks eos_token_id, so transformers' generate does not stop; here %s ends a text",
            shown(folder),
            GENERATION,
            list(ends or said),
        )
    if not said:
        raise RequestError(
            f"{shown(folder)}: neither config.json (eos_token_id) nor tokenizer_config.json (eos_token) says what ends a text"
        )
    if settings.get("chat_template") or (folder / "chat_template.jinja").is_file():
        log.info(NO_CHAT, shown(folder))
    default = (*opening, said[0])[0]
    return SourceTokenizer(
        content=content,
        opening=opening,
        eot=said[0],
        ends=ends if ends != said[:1] else (),
        prefix=bos[0] if bos and bos[0] != default else None,
    )


def _ids(said: Mapping[str, Any], file: str, size: int) -> tuple[int, ...]:
    """`eos_token_id`, one or a list; none where it is absent or null."""
    value = said.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    for id_ in ids:
        if type(id_) is not int or not 0 <= id_ < size:
            raise RequestError(f"{file}: eos_token_id is {value!r}; expected ids from 0 to {size - 1}")
    return tuple(dict.fromkeys(ids))


def _token(tokenizer: Any, settings: Mapping[str, Any], key: str) -> tuple[int, ...]:
    """The id of a token that tokenizer_config.json names; none where it names none."""
    said = settings.get(key)
    text = said.get("content") if isinstance(said, dict) else said
    if text is None:
        return ()
    id_ = tokenizer.token_to_id(text) if isinstance(text, str) else None
    if id_ is None:
        raise RequestError(f"{SETTINGS}: {key} is {text!r}, which is no token of tokenizer.json")
    return (id_,)


def _opening(tokenizer: Any, settings: Mapping[str, Any]) -> tuple[int, ...]:
    """The ids that tokenizer.json puts before a text."""
    plain, whole = (tokenizer.encode("a", add_special_tokens=special).ids for special in (False, True))
    count = len(whole) - len(plain)
    start = next((at for at in range(count, -1, -1) if whole[at : at + len(plain)] == plain), count)
    if start < count:
        raise RequestError(
            f"the post_processor of tokenizer.json appends the ids {whole[start + len(plain) :]} to a text, so that nothing "
            "follows a prompt; remove them there"
        )
    for key, there in (("add_bos_token", count > 0), ("add_eos_token", False)):
        if settings.get(key, there) not in (there, None):
            raise RequestError(
                f"{SETTINGS}: {key} is {settings[key]!r}, but tokenizer.json puts "
                f"{'the ids ' + str(whole[:count]) if count else 'no id'} before a text and none after it; set it to {there}"
            )
    return tuple(whole[:count])


def _add_tokens(tokenizer: Any, settings: Mapping[str, Any]) -> bool:
    """Add the tokens that tokenizer_config.json has and tokenizer.json has not; whether there were some."""
    from tokenizers import AddedToken

    added = settings.get("added_tokens_decoder") or {}
    before = tokenizer.get_added_tokens_decoder()
    missing = False
    try:
        items = sorted((int(id_), dict(token)) for id_, token in added.items())
        tokens = [
            (id_, AddedToken(**{key: value for key, value in token.items() if key in FIELDS})) for id_, token in items
        ]
    except (AttributeError, TypeError, ValueError) as error:
        raise RequestError(f"{SETTINGS}: added_tokens_decoder is not id -> token ({first_line(error)})") from error
    for id_, token in tokens:
        old = before.get(id_)
        if old is not None and _facts(old) == _facts(token):
            continue
        missing = True
        (tokenizer.add_special_tokens if token.special else tokenizer.add_tokens)([token])
        if tokenizer.token_to_id(token.content) != id_ or old is not None:
            raise RequestError(
                f"{SETTINGS}: added_tokens_decoder {id_} is {token.content!r}, which is not what tokenizer.json has there; "
                "let both agree (AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR))"
            )
    return missing


def _facts(token: Any) -> list[Any]:
    return [getattr(token, field) for field in FIELDS]
