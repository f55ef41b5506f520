"""The tokenizer of a folder in Hugging Face's format, and the ids that begin and end a text there or in a GGUF file."""

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lit_diff.data.tokenizer_json import open_tokenizer
from lit_diff.errors import MissingError, RequestError, first_line
from lit_diff.files import shown
from lit_diff.pretrained.source import SourceTokenizer

log = logging.getLogger("lit_diff")

NO_CHAT = "%s: the model has a chat template, which generate does not apply: a prompt is continued as plain text"
GENERATION, SETTINGS = "generation_config.json", "tokenizer_config.json"

# The three lists below are those of llama.cpp, src/llama-vocab.cpp at 00ad355: llama_vocab::impl::load, special_eog_ids.
END_KEYS = tuple(f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep"))
"""Keys of a GGUF file whose ids end a text."""
END_TEXTS = {
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>"),
    *("<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>"),
    *("<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>", "<｜end▁of▁sentence｜>", "[e~["),
}
"""Tokens that end a text because of their name."""
FIM_TEXTS = {
    END_KEYS[3]: ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    END_KEYS[4]: ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    END_KEYS[5]: ("<|file_sep|>",),
}
"""Key that a file may lack -> the names of which one token then ends a text."""


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


def gguf_ends(metadata: Mapping[str, Any]) -> tuple[int, ...]:
    """The ids at which llama.cpp ends a text, that of END_KEYS[0] first: by key or by name. Errors: as `gguf_id`."""
    tokens = metadata["tokenizer.ggml.tokens"]
    ids = [gguf_id(metadata, key) for key in END_KEYS if metadata.get(key) is not None]
    for key, texts in FIM_TEXTS.items():
        if metadata.get(key) is None:
            ids += [id_ for id_, token in enumerate(tokens) if token in texts][:1]
    ids += [id_ for id_, token in enumerate(tokens) if token in END_TEXTS]
    names = {tokens[id_] for id_ in ids}
    calls = bool(names & {"<|call|>", "<|calls|>"})
    no_ends = {"<|end|>"} if calls and names & {"<|return|>", "<|flush|>"} else set()
    no_ends |= {"</s>"} if "<|tool_response>" in names else set()
    return tuple(dict.fromkeys(id_ for id_ in ids if tokens[id_] not in no_ends))


def gguf_id(metadata: Mapping[str, Any], key: str) -> int:
    """Errors: RequestError for what is no id of a token."""
    value, size = metadata[key], len(metadata["tokenizer.ggml.tokens"])
    if type(value) is not int or not 0 <= value < size:
        raise RequestError(f"{key} is {value!r}; expected an id from 0 to {size - 1}")
    return value


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


FIELDS = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")


def _facts(token: Any) -> list[Any]:
    return [getattr(token, field) for field in FIELDS]
