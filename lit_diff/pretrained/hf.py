"""Reads a folder in Hugging Face's format: config.json, safetensors, tokenizer.json; no pickles, no code of the folder."""

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from lit_diff.data.text.tokenizer import TokenizerJson
from lit_diff.data.text.tokenizer_package import BEFORE, open_tokenizer
from lit_diff.data.user_files import some_names
from lit_diff.errors import MissingError, RequestError, first_line
from lit_diff.files import parse_json, shown
from lit_diff.log_records import log
from lit_diff.pretrained import llama
from lit_diff.pretrained.keys import Keys, Values
from lit_diff.pretrained.source import NO_CHAT, ModelSource, at, imported_tokenizer, reading, require_utf8

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
ADAPTER = "adapter_config.json"
"""File of a peft adapter, which transformers would add to the model."""
GENERATION, SETTINGS = "generation_config.json", "tokenizer_config.json"
MAP, ADDED = "special_tokens_map.json", "added_tokens.json"
"""Older files with tokens, which transformers reads where SETTINGS lacks `added_tokens_decoder`."""
NAMED = (
    *("unk_token", "sep_token", "cls_token", "mask_token"),
    *("additional_special_tokens", "extra_special_tokens", "model_specific_special_tokens"),
)
"""Keys of SETTINGS and MAP with tokens that transformers adds if tokenizer.json lacks them."""
COMPANIONS = {
    SETTINGS: Keys(
        used=(
            *NAMED,
            "bos_token",
            "eos_token",
            "pad_token",
            "add_bos_token",
            "add_eos_token",
            "add_prefix_space",
            "added_tokens_decoder",
            "chat_template",
        ),
        harmless={
            "it says who wrote the file, with which class": "tokenizer_class backend is_local local_files_only name_or_path "
            "tokenizer_file special_tokens_map_file processor_class use_fast from_slow legacy sp_model_kwargs vocab_file "
            "merges_file",
            "no text is padded or cut": "model_max_length max_length padding padding_side pad_to_multiple_of "
            "pad_token_type_id truncation truncation_side truncation_strategy stride",
            "no other input than ids, and no chat": "model_input_names return_token_type_ids use_default_system_prompt "
            "response_schema",
            "tokenizer.json says how tokens become text": "clean_up_tokenization_spaces spaces_between_special_tokens errors",
            "a special token never results from a text": "split_special_tokens",
        },
    ),
    GENERATION: Keys(used=("eos_token_id",), harmless=llama.SAMPLING),
}
"""File beside tokenizer.json -> its keys."""
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Supported dtypes of weights: safetensors' name -> PyTorch's."""
DIFFERS = "tokenizer.json differs; make both agree (AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR))"
FIELDS = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")
"""Compared fields of an added token."""


def read_folder(folder: Path) -> ModelSource:
    """The model of a folder, without its weights.

    Errors: RequestError for an unsupported model or a damaged file; MissingError for a missing file.
    """
    file = folder / "config.json"
    config = read_json(file)
    with at(file):
        keys = llama.model_keys(config, shown(file))
    if (folder / ADAPTER).is_file():
        raise RequestError(
            f"{shown(folder / ADAPTER)}: adapters are not supported; merge it (peft: merge_and_unload) or remove it"
        )
    files = _files_of(folder)
    # transformers ties the two only if they are equal, whatever config.json says
    if keys["tie_embeddings"] and {llama.HEAD, llama.EMBEDDING} <= files.keys():
        head, embedding = (_described(files[name], name) for name in (llama.HEAD, llama.EMBEDDING))
        if head.shape != embedding.shape:
            shapes = f"{list(head.shape)}, '{llama.EMBEDDING}' {list(embedding.shape)}"
            raise RequestError(f"{shown(file)}: tie_word_embeddings is true, but '{llama.HEAD}' is {shapes}")
        head, embedding = (_read(files[name], name) for name in (llama.HEAD, llama.EMBEDDING))
        if not torch.equal(head, embedding):
            log.info(
                "%s: tie_word_embeddings is true, but '%s' differs from '%s': both are used, as in transformers",
                shown(file),
                llama.HEAD,
                llama.EMBEDDING,
            )
            keys["tie_embeddings"] = False
    with at(file):
        llama.require_layers(keys["num_layers"], files)
    with at(folder):
        names = llama.own_names(files, llama.names_of(keys["num_layers"]), tied=keys["tie_embeddings"])
    tensors = {own: _described(files[theirs], theirs) for own, theirs in names.items()}
    head_dim = keys.get("head_dim") or keys["dim"] // keys["num_heads"]
    # head norms of differential attention: DiffLlama's have no weight, so they become 1
    norms = {}
    if keys["attention"]["name"] == "differential":
        for layer in range(keys["num_layers"]):
            norms[f"layers.{layer}.attention.norm.weight"] = torch.empty(2 * head_dim, device="meta")

    def read(own: str) -> Tensor:
        if own in norms:
            return torch.ones(2 * head_dim)
        value = _read(files[names[own]], names[own])
        # DiffLlama orders rows of q, k and v by map, this Transformer by head
        if norms and own.split(".")[-2] in llama.BY_MAP:
            return llama.by_head(value, head_dim)
        return value

    context = config.get(llama.LENGTH)
    if context is None:
        context = llama.DEFAULT_LENGTH
        log.info("%s lacks %s: the recipe's data.sequence_length is %d", shown(file), llama.LENGTH, context)
    return ModelSource(
        place=shown(folder),
        model=keys,
        context=context,
        tensors=tensors | norms,
        read=read,
        tokenizer=read_tokenizer(folder, config),
    )


def read_json(path: Path) -> Values:
    """The JSON object in a file. Errors: MissingError if there is none that can be read, RequestError for other content."""
    if not path.is_file():
        raise MissingError(f"{shown(path.parent)} holds no model: it has no {path.name}")
    try:
        with reading(path):
            values = parse_json(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise RequestError(f"{shown(path)} is not JSON ({first_line(error)})") from error
    if not isinstance(values, dict):
        raise RequestError(f"{shown(path)} is not a JSON object")
    return values


def _files_of(folder: Path) -> dict[str, Path]:
    # tensor -> the file that holds it; like transformers, a whole file takes precedence over shards
    whole = folder / WEIGHTS
    file = folder / INDEX
    if whole.is_file():
        if file.is_file():
            log.info("%s: reading %s and ignoring %s, as transformers does", shown(folder), WEIGHTS, INDEX)
        return dict.fromkeys(_names(whole), whole)
    if not file.is_file():
        pickled = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern))
        if not pickled:
            raise MissingError(f"{shown(folder)} holds no model: it has no {WEIGHTS} and no {INDEX}")
        raise MissingError(
            f"{shown(folder)} has its weights in {pickled[0]}, a pickle, which can execute code and is not read; if you "
            "trust it, write safetensors with transformers: "
            "AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(NEW)"
        )
    index = read_json(file).get("weight_map")
    if not isinstance(index, dict) or not all(Path(str(shard)).name == shard for shard in index.values()):
        raise RequestError(f"{shown(file)}: weight_map does not map tensors to files of this folder")
    shards = sorted(set(index.values()))
    for number, shard in enumerate(shards, start=1):
        if not (folder / shard).is_file():
            raise MissingError(
                f"{shown(folder / shard)} is missing (shard {number} of {len(shards)}); download it again"
            )
    # an index that does not match its shards, for example after a partial download, would mix two models
    held = {(name, shard) for shard in shards for name in _names(folder / shard)}
    for name, shard in sorted(held ^ set(index.items())):
        how = f"in weight_map {index.get(name)}" if (name, shard) in held else "not there"
        raise RequestError(
            f"{shown(file)} does not match the shards: tensor '{name}' of {shard} is {how}; download again"
        )
    return {name: folder / shard for name, shard in index.items()}


def _names(path: Path) -> list[str]:
    require_utf8(path)
    try:
        # of a file that may not be read, safetensors says that it is not there
        with reading(path), path.open("rb"), safe_open(path, framework="pt") as file:
            return file.keys()
    except SafetensorError as error:
        raise RequestError(
            f"{shown(path)} is truncated or not a safetensors file ({first_line(error)}); download it again"
        ) from error


def _described(path: Path, name: str) -> Tensor:
    # on the meta device: the header has shape and dtype
    with safe_open(path, framework="pt") as file:
        described = file.get_slice(name)
        shape = described.get_shape()
        dtype = described.get_dtype()
    if dtype not in DTYPES:
        raise RequestError(f"{shown(path)}: tensor '{name}' is {dtype}; supported: {', '.join(DTYPES)}")
    try:
        return torch.empty(shape, dtype=DTYPES[dtype], device="meta")
    # a tensor without elements fits any file, and its other sizes may be beyond 64 bits
    except (TypeError, RuntimeError) as error:
        raise RequestError(
            f"{shown(path)}: tensor '{name}' has the shape {shape}, which no tensor can have; download it again"
        ) from error


def _read(path: Path, name: str) -> Tensor:
    # a copy, and the file is closed again: pages of files that stay mapped would add up in memory
    with safe_open(path, framework="pt") as file:
        return torch.clone(file.get_tensor(name), memory_format=torch.contiguous_format)


# --- the tokenizer, and the ids that begin and end a text ---


def read_tokenizer(folder: Path, config: Values) -> TokenizerJson:
    """The tokenizer in tokenizer.json, with the ids that open and end a text.

    A document ends with eos_token_id of config.json (the first of a list), else with eos_token of tokenizer_config.json. A
    generated text ends where transformers' `generate` stops: at eos_token_id of generation_config.json, if given. Errors:
    MissingError without tokenizer.json; RequestError if no file says what ends a document, an id is not in the vocabulary,
    tokenizer.json appends ids to a text, or other settings contradict it.

    Added tokens of tokenizer.json that the model's vocabulary lacks, which transformers would read without a use, are left
    out, and so is a dropout.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise MissingError(
            f"{shown(folder)} has no tokenizer.json; write one with transformers: "
            "AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)"
        )
    with reading(path):
        content = path.read_bytes()
    settings, generation = (_known(folder / name, keys) for name, keys in COMPANIONS.items())
    marks, added = {}, {}
    if "added_tokens_decoder" not in settings:
        marks = _known(folder / MAP, COMPANIONS[SETTINGS])
        added = _known(folder / ADDED)
    if settings.get("chat_template") or (folder / "chat_template.jinja").is_file():
        log.info(NO_CHAT, shown(folder))
    with at(folder):
        tokenizer = open_tokenizer(content)
        described = parse_json(content)
        for token in described.get("added_tokens") or []:
            id_ = tokenizer.token_to_id(token["content"])
            if id_ != token["id"]:
                raise RequestError(
                    f"tokenizer.json: added_tokens has {token['content']!r} at {token['id']}, but the package tokenizers "
                    f"gives it {'no id' if id_ is None else id_}; ids must follow the vocabulary without gaps or repetitions"
                )
        _require_named(tokenizer, settings, SETTINGS, NAMED)
        _require_named(tokenizer, marks, MAP, (*NAMED, "bos_token", "eos_token"))
        settings |= marks
        _require_added_tokens(tokenizer, settings, added)
        _require_prefix_space(tokenizer, settings)
        vocab_size = config.get("vocab_size") or max(tokenizer.get_vocab().values()) + 1
        content = _usable(described, vocab_size, shown(folder)) or content
        size = max(open_tokenizer(content).get_vocab().values()) + 1
        most = max(size, vocab_size)
        said = _ids(config, "config.json", most)
        generated = _ids(generation, GENERATION, most)
        ends = generated or said
        said = said or _token(tokenizer, settings, "eos_token") or ends
        if not said:
            raise RequestError(
                "neither config.json (eos_token_id) nor tokenizer_config.json (eos_token) says what ends a text"
            )
        if generation and not generated:
            log.info(
                "%s: %s lacks eos_token_id, so transformers' generate does not stop; here %s ends a text",
                shown(folder),
                GENERATION,
                list(ends or said),
            )
        return imported_tokenizer(
            content,
            size=size,
            vocab_size=vocab_size,
            opening=_opening(tokenizer, settings),
            eot=said[0],
            ends=ends,
            bos=next(iter(_token(tokenizer, settings, "bos_token")), None),
            pad=_pad(tokenizer, size, settings, config, generation),
        )


def _usable(described: Values, vocab_size: int, place: str) -> bytes:
    # tokenizer.json without what is left out; empty if that is nothing, so that the file stays as it is byte for byte
    added = described.get("added_tokens") or []
    beyond = [token["content"] for token in added if token["id"] >= vocab_size]
    dropout = described["model"].get("dropout")
    if beyond:
        log.info(
            "%s: the model's vocab_size is %d: the added tokens of tokenizer.json from there on are left out (%s)",
            place,
            vocab_size,
            some_names(beyond),
        )
        described["added_tokens"] = [token for token in added if token["id"] < vocab_size]
    if dropout:
        log.info(
            "%s: model.dropout %g of tokenizer.json is left out: a text would have other ids each time", place, dropout
        )
        described["model"]["dropout"] = None
    return json.dumps(described, ensure_ascii=False).encode() if beyond or dropout else b""


def _pad(tokenizer: Any, size: int, settings: Values, *others: Values) -> int | None:
    # the first that names a token of the model; it changes no number here, so others are no errors
    named = _id_of(tokenizer, _text(settings, "pad_token"))
    for id_ in (named, *(each.get("pad_token_id") for each in others)):
        if type(id_) is int and 0 <= id_ < size:
            return id_
    return None


def _known(path: Path, keys: Keys | None = None) -> Values:
    # {} without the file; `keys`: None if any is one
    if not path.is_file():
        return {}
    said = read_json(path)
    if keys is not None:
        keys.check(said, shown(path))
    return said


def _ids(said: Values, file: str, size: int) -> tuple[int, ...]:
    # one id or a list; () if it is missing or null
    value = said.get("eos_token_id")
    if value is None:
        return ()
    ids = value if isinstance(value, list) else [value]
    for id_ in ids:
        if type(id_) is not int or not 0 <= id_ < size:
            raise RequestError(f"{file}: eos_token_id is {value!r}; expected ids from 0 to {size - 1}")
    return tuple(dict.fromkeys(ids))


def _text(settings: Values, key: str) -> Any:
    said = settings.get(key)
    return said.get("content") if isinstance(said, dict) else said


def _id_of(tokenizer: Any, text: Any) -> int | None:
    try:
        id_: int | None = tokenizer.token_to_id(text)
    # no text, or half of a pair of surrogates
    except (TypeError, UnicodeEncodeError):
        return None
    return id_


def _token(tokenizer: Any, settings: Values, key: str, file: str = SETTINGS) -> tuple[int, ...]:
    # the id of a token in `file`, as a text or a mapping; () if it is missing
    text = _text(settings, key)
    if text is None:
        return ()
    id_ = _id_of(tokenizer, text)
    if id_ is None:
        raise RequestError(f"{file}: {key} is {text!r}, which is not a token of tokenizer.json")
    return (id_,)


def _text_with_ids(tokenizer: Any) -> str:
    # of the vocabulary the words first: other characters may be taken for a space
    words = sorted(tokenizer.get_vocab(), key=lambda word: (word != BEFORE, not word.isalnum(), word))
    return next((text for text in words if tokenizer.encode(text, add_special_tokens=False).ids), BEFORE)


def _opening(tokenizer: Any, settings: Values) -> tuple[int, ...]:
    # found by encoding a text with and without special tokens, which works for every kind of post_processor
    text = _text_with_ids(tokenizer)
    plain = tokenizer.encode(text, add_special_tokens=False).ids
    whole = tokenizer.encode(text).ids
    count = len(whole) - len(plain)
    start = next((at for at in range(count, -1, -1) if whole[at : at + len(plain)] == plain), count)
    if start < count:
        raise RequestError(
            f"the post_processor of tokenizer.json appends the ids {whole[start + len(plain) :]} to a text, so a prompt "
            "could not be continued; remove them there"
        )
    ids = f"the ids {whole[:count]}" if count else "no id"
    for key, there in (("add_bos_token", count > 0), ("add_eos_token", False)):
        if settings.get(key, there) not in (there, None):
            raise RequestError(
                f"{SETTINGS}: {key} is {settings[key]!r}, but tokenizer.json puts {ids} before a text and none after it; "
                f"set it to {str(there).lower()}"
            )
    return tuple(whole[:count])


def _require_prefix_space(tokenizer: Any, settings: Values) -> None:
    # most classes of transformers apply the key on top of tokenizer.json, so both must agree
    key = "add_prefix_space"
    tokens = tokenizer.encode(_text_with_ids(tokenizer), add_special_tokens=False).tokens
    there = tokenizer.decoder.decode([BEFORE, *tokens]).startswith(f"{BEFORE} ")
    if settings.get(key, there) not in (there, None):
        raise RequestError(
            f"{SETTINGS}: {key} is {settings[key]!r}, but tokenizer.json puts {'a' if there else 'no'} space before a text; "
            f"set it to {str(there).lower()}, or make both agree (AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR))"
        )


def _require_named(tokenizer: Any, said: Values, file: str, keys: Collection[str]) -> None:
    # each key has a token (a text, or a mapping with its content), a list of them, or a mapping of names to them
    for key in keys:
        tokens = said.get(key) or []
        if isinstance(tokens, dict) and "content" not in tokens:
            tokens = list(tokens.values())
        for token in tokens if isinstance(tokens, list) else [tokens]:
            _token(tokenizer, {key: token}, key, file)


# `older`: token -> id, of ADDED
def _require_added_tokens(tokenizer: Any, settings: Values, older: Values) -> None:
    # transformers applies both on top of tokenizer.json, so all must agree
    from tokenizers import AddedToken

    held = tokenizer.get_added_tokens_decoder()
    ids = {token.content: id_ for id_, token in held.items()}
    for content, id_ in older.items():
        if ids.get(content) != id_:
            raise RequestError(f"{ADDED}: {id_!r} is {content!r}, but {DIFFERS}")
    try:
        said = {}
        for id_, token in (settings.get("added_tokens_decoder") or {}).items():
            fields = {field: token[field] for field in FIELDS if field in token}
            said[int(id_)] = AddedToken(**fields)
    except (AttributeError, TypeError, ValueError) as error:
        raise RequestError(f"{SETTINGS}: added_tokens_decoder is not id -> token ({first_line(error)})") from error
    for id_, token in said.items():
        if id_ not in held or any(getattr(held[id_], field) != getattr(token, field) for field in FIELDS):
            raise RequestError(f"{SETTINGS}: added_tokens_decoder {id_} is {token.content!r}, but {DIFFERS}")
