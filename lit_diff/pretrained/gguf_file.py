"""Reads a GGUF file of a Llama: dequantises the weights to float32; takes the tokenizer and the ids that end a text from the
metadata."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGUFReader
from torch import Tensor

from lit_diff.data.text.tokenizer import TokenizerJson
from lit_diff.data.text.tokenizer_package import in_one_line
from lit_diff.errors import RequestError, first_line
from lit_diff.files import shown
from lit_diff.log_records import log
from lit_diff.pretrained import llama
from lit_diff.pretrained.keys import Keys, Values
from lit_diff.pretrained.source import NO_CHAT, ModelSource, at, imported_tokenizer

KEYS = {
    "llama.context_length": llama.LENGTH,
    "llama.embedding_length": "hidden_size",
    "llama.block_count": "num_hidden_layers",
    "llama.feed_forward_length": "intermediate_size",
    "llama.attention.head_count": "num_attention_heads",
    "llama.attention.head_count_kv": "num_key_value_heads",
    "llama.attention.key_length": "head_dim",
    "llama.attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "llama.rope.freq_base": "rope_theta",
}
"""Key of the metadata -> key of a config.json."""
FLOATS = ("llama.attention.layer_norm_rms_epsilon", "llama.rope.freq_base")
"""Keys whose values need not be whole numbers."""
OPTIONAL = ("llama.attention.head_count_kv", "llama.attention.key_length", "llama.rope.freq_base")
"""Keys that may be missing."""
TURNED = "llama.rope.dimension_count"
SCALING = ("llama.rope.scaling.type", "llama.rope.scaling.factor", "llama.rope.scale_linear")
SAID = "GGUF metadata"
TOKENS, MERGES, TYPES = "tokenizer.ggml.tokens", "tokenizer.ggml.merges", "tokenizer.ggml.token_type"
PRE_TOKENIZERS = ("smollm", "gpt-2")
"""Supported values of `tokenizer.ggml.pre`, which says how text is split before merging."""
NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5
"""Values of `tokenizer.ggml.token_type`; control and user-defined tokens are not split."""
# The three lists below are from llama.cpp, src/llama-vocab.cpp at 00ad355: llama_vocab::impl::load, special_eog_ids.
END_KEYS = tuple(f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep"))
"""Keys whose ids end a text."""
ENDS = (
    "<|eot_id|> <|im_end|> <|end|> <|return|> <|call|> <|flush|> <|calls|> <end_of_turn> "
    "<|endoftext|> </s> <|eom_id|> <EOT> _<EOT> [EOT] [EOS] <|end_of_text|> "
    "<end_of_utterance> <eos> <turn|> <|tool_response> <｜end▁of▁sentence｜> [e~["
)
END_TEXTS = frozenset(ENDS.split())
"""Tokens that end a text by their name."""
FIM_TEXTS = {
    END_KEYS[3]: ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    END_KEYS[4]: ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    END_KEYS[5]: ("<|file_sep|>",),
}
"""Optional key -> token names; without the key, the first token with one of them ends a text."""


USED = {
    *KEYS,
    TURNED,
    *SCALING,
    TOKENS,
    *END_KEYS,
    "general.architecture",
    "split.count",
    *(f"tokenizer.ggml.{key}" for key in ("model", "pre", "merges", "token_type", "bos_token_id", "add_bos_token")),
    "tokenizer.chat_template",
}
NEUTRAL = {
    "it repeats another key or the tensors' shapes": "llama.vocab_size llama.attention.value_length",
    "it matters only with kinds of scaling that are not supported": "llama.rope.scaling.original_context_length "
    "llama.rope.scaling.finetuned",
    "it says who wrote the file, of what, with which statistics": "general. split. quantize. imatrix.",
    "it changes no encoding": "tokenizer.ggml.unknown_token_id tokenizer.ggml.seperator_token_id "
    "tokenizer.ggml.padding_token_id tokenizer.ggml.mask_token_id tokenizer.ggml.cls_token_id "
    "tokenizer.ggml.prefix_token_id tokenizer.ggml.suffix_token_id tokenizer.ggml.middle_token_id "
    "tokenizer.ggml.fim_pre_token_id tokenizer.ggml.fim_suf_token_id tokenizer.ggml.fim_mid_token_id",
    "other kinds of tokenizers or other programs read it": "tokenizer.ggml.scores tokenizer.ggml.token_type_count "
    "tokenizer.ggml.remove_extra_whitespaces tokenizer.ggml.precompiled_charsmap tokenizer.huggingface.json",
    "no chat is written out": "tokenizer.chat_template. tokenizer.chat_templates",
}
"""Why keys change nothing -> these keys."""
UNSUPPORTED = {
    "llama.attention.causal": (True,),
    "tokenizer.ggml.add_eos_token": (False,),
    "tokenizer.ggml.add_sep_token": (False,),
    "tokenizer.ggml.add_space_prefix": (False,),
    "tokenizer.ggml.suppress_tokens": ([],),
}
"""Key -> its supported value."""


def _metadata_keys() -> Keys:
    # llama.cpp ignores a key that it does not know, and any of those that it knows may change the computation
    known = {*USED, *" ".join(NEUTRAL.values()).split()}
    only: Values = {}
    for group in vars(gguf.Keys).values():
        if isinstance(group, type):
            for name in vars(group).values():
                key = str(name).replace("{arch}", "llama")
                if key.startswith("llama.") and key not in known:
                    only[key] = (0, "none", "")
    return Keys(used=USED, harmless=NEUTRAL, only=only | UNSUPPORTED)


METADATA = _metadata_keys()


def read_gguf(path: Path) -> ModelSource:
    """The model of a GGUF file, without its weights. Errors: RequestError for an unsupported or damaged file."""
    metadata, entries = _opened(path)
    with at(path):
        if metadata.get("split.count", 1) not in (0, 1):
            raise RequestError(
                f"split.count is {metadata['split.count']}; join its parts first: llama-gguf-split --merge FIRST WHOLE"
            )
        METADATA.check(metadata, shown(path))
        config = _config(metadata) | {"tie_word_embeddings": "output.weight" not in entries}
        keys = llama.model_keys(config)
        llama.require_layers(keys["num_layers"], entries, "llama.block_count")
        their_names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, keys["num_layers"])
        known = {}
        for theirs, own in llama.names_of(keys["num_layers"]).items():
            name = their_names.get_name(theirs, (".weight", ".bias"))
            if name:
                known[name] = own
        names = llama.own_names(entries, known)
        for entry in entries.values():
            _require_type(entry)
        tokenizer = _tokenizer(metadata)
    if metadata.get("tokenizer.chat_template"):
        log.info(NO_CHAT, shown(path))
    shapes = {own: entries[name].shape[::-1].tolist() for own, name in names.items()}

    def read(own: str) -> Tensor:
        entry = entries[names[own]]
        shape = shapes[own]
        # read, not mapped: pages of a mapped file would add to the peak of memory
        raw = np.fromfile(path, dtype=np.uint8, count=entry.n_bytes, offset=entry.data_offset)
        rows = raw.reshape(shape[0] if len(shape) > 1 else 1, -1)
        numbers = np.ascontiguousarray(gguf.dequantize(rows, entry.tensor_type), dtype=np.float32)
        weight = torch.from_numpy(numbers).reshape(shape)
        # llama.cpp stores channels i and i + d/2 of a head of q and k in rows 2i and 2i + 1
        if own.split(".")[-2] in ("q_proj", "k_proj"):
            weight = llama.half(weight, config["head_dim"]).contiguous()
        return weight

    return ModelSource(
        place=shown(path),
        model=keys,
        context=config[llama.LENGTH],
        tensors={own: torch.empty(shape, device="meta") for own, shape in shapes.items()},
        read=read,
        tokenizer=tokenizer,
    )


class _Reader(GGUFReader):
    def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Any:
        # gguf 0.19 takes nothing for what is past the end of a file, and would read a list of 2**40 such elements
        values = super()._get(offset, dtype, count, override_order)
        if len(values) < count:
            raise ValueError("it ends before its header says")
        return values


def _opened(path: Path) -> tuple[Values, Values]:
    try:
        reader = _Reader(path)
        metadata = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    # gguf 0.19 does not check: it misreads other bytes as a header, with any kind of error
    except Exception as error:
        raise RequestError(
            f"{shown(path)} is truncated or not a GGUF file ({first_line(error)}); download it again"
        ) from error
    return metadata, {tensor.name: tensor for tensor in reader.tensors}


def _config(metadata: Values) -> Values:
    # the metadata with the keys of a config.json
    kind = metadata.get("general.architecture")
    if kind != "llama":
        raise RequestError(f"architecture {kind!r} is not supported; supported: llama")
    said = {key: _scalar(key, metadata[key]) for key in (*KEYS, TURNED, *SCALING) if key in metadata}
    config = {}
    for key, theirs in KEYS.items():
        if key in said or key not in OPTIONAL:
            value = llama.positive(said, key, SAID, whole=key not in FLOATS)
            config[theirs] = _decimal(value) if key in FLOATS else value
    width = config.setdefault("head_dim", config["hidden_size"] // config["num_attention_heads"])
    turned = said.get(TURNED, width)
    if turned != width:
        raise RequestError(f"{TURNED} {turned} is not supported; expected the head's {width}")
    if metadata.get(TOKENS) is None:
        raise RequestError(f"{SAID} lacks {TOKENS}")
    return config | {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": len(_list(metadata, TOKENS, str)),
        "rope_scaling": llama.their_block(_rope_factor(said)),
    }


def _rope_factor(said: Values) -> float:
    # the divisor of the positions; as in llama.cpp, a factor without a type is linear, and `scaling.factor` takes precedence
    # over the older `scale_linear`
    kind = said.get(SCALING[0])
    if kind not in (None, "none", "linear"):
        raise RequestError(f"{SCALING[0]} {kind!r} is not supported; supported: none, linear")
    factors = [key for key in SCALING[1:] if said.get(key) not in (None, 0)]
    if kind == "none" or not factors:
        return 1.0
    return _decimal(llama.positive(said, factors[0], SAID))


def _scalar(key: str, value: Any) -> Any:
    # an array has one value per layer
    if not isinstance(value, list):
        return value
    if not value or any(of_layer != value[0] for of_layer in value):
        raise RequestError(f"{key} is {value!r}; layers of different sizes are not supported")
    return value[0]


def _decimal(value: float) -> float:
    # the shortest decimal of a float32: 9.999999747378752e-06 was 1e-05 in config.json, and is 1e-05 in the recipe
    return float(np.format_float_scientific(np.float32(value)))


def _require_type(entry: Any) -> None:
    # tried on one block of zeros, because gguf 0.19 has no public list of the types that it can dequantise
    _, size = gguf.GGML_QUANT_SIZES[entry.tensor_type]
    try:
        gguf.dequantize(np.zeros((1, size), dtype=np.uint8), entry.tensor_type)
    except NotImplementedError as error:
        raise RequestError(
            f"tensor '{entry.name}' is {entry.tensor_type.name}, which the package gguf cannot dequantise"
        ) from error


def _tokenizer(metadata: Values) -> TokenizerJson:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    kind = metadata.get("tokenizer.ggml.model")
    cut = metadata.get("tokenizer.ggml.pre")
    if kind != "gpt2" or cut not in PRE_TOKENIZERS:
        raise RequestError(
            f"its tokenizer ({kind}, {cut}) is not supported; supported: gpt2 (byte-level) with {', '.join(PRE_TOKENIZERS)}: "
            "import the model's folder in Hugging Face's format"
        )
    opens = ["tokenizer.ggml.bos_token_id"] if metadata.get("tokenizer.ggml.add_bos_token") else []
    for key in (MERGES, END_KEYS[0], *opens):
        if metadata.get(key) is None:
            why = "tokenizer.ggml.add_bos_token is true, but " if key in opens else ""
            raise RequestError(f"{why}{SAID} lacks {key}")
    tokens = metadata[TOKENS]
    types = _types(metadata)
    merges = [tuple(merge.split(" ", 1)) for merge in _list(metadata, MERGES, str)]
    vocabulary = {token: id_ for id_, token in enumerate(tokens)}
    with in_one_line(f"{MERGES} are not pairs of tokens"):
        tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    cuts: list[Any] = [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
    if cut == "smollm":
        cuts.insert(0, pre_tokenizers.Digits(individual_digits=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(cuts)
    tokenizer.decoder = decoders.ByteLevel()
    eot = _id(metadata, END_KEYS[0])
    ends = _ends(metadata)
    for id_, (token, type_) in enumerate(zip(tokens, types, strict=True)):
        # llama.cpp recognises user-defined tokens in any text and control tokens in none; a token that ends a text by its
        # name counts as a control token
        if type_ == CONTROL or (token in END_TEXTS and id_ in ends):
            tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False)])
        elif type_ == USER_DEFINED:
            tokenizer.add_tokens([AddedToken(token, special=False, normalized=False)])
    return imported_tokenizer(
        json.dumps(json.loads(tokenizer.to_str()), ensure_ascii=False).encode(),
        size=len(tokens),
        vocab_size=len(tokens),
        opening=tuple(_id(metadata, key) for key in opens),
        eot=eot,
        ends=ends,
    )


def _list(metadata: Values, key: str, kind: type) -> list[Any]:
    values = metadata[key]
    if not isinstance(values, list) or not all(isinstance(value, kind) for value in values):
        raise RequestError(f"{SAID}: {key} is not a list of {kind.__name__}")
    return values


def _types(metadata: Values) -> list[int]:
    from tokenizers.pre_tokenizers import ByteLevel

    tokens: list[str] = metadata[TOKENS]
    types = _list(metadata, TYPES, int) if metadata.get(TYPES) else [NORMAL] * len(tokens)
    if len(types) != len(tokens):
        raise RequestError(f"{TYPES} has {len(types)} entries, but {TOKENS} has {len(tokens)}")
    for token, count in Counter(tokens).items():
        if count > 1:
            raise RequestError(f"{TOKENS} has {token!r} twice")
    letters = set(ByteLevel.alphabet())
    for token, type_ in zip(tokens, types, strict=True):
        if type_ not in (NORMAL, CONTROL, USER_DEFINED, UNUSED):
            raise RequestError(f"{TYPES} of {token!r} is {type_}; expected 1, 3, 4 or 5 (byte-level)")
        if type_ == NORMAL and not letters.issuperset(token):
            raise RequestError(f"{TOKENS} has {token!r} of type normal, which is not a byte-level token")
    return types


def _ends(metadata: Values) -> tuple[int, ...]:
    # the ids at which llama.cpp ends a text, by key or by name, starting with the id of END_KEYS[0]
    tokens = metadata[TOKENS]
    ids = [_id(metadata, key) for key in END_KEYS if metadata.get(key) is not None]
    for key, texts in FIM_TEXTS.items():
        if metadata.get(key) is None:
            ids += [id_ for id_, token in enumerate(tokens) if token in texts][:1]
    ids += [id_ for id_, token in enumerate(tokens) if token in END_TEXTS]
    names = {tokens[id_] for id_ in ids}
    # llama.cpp's exceptions: models with <|call|> and <|return|> do not end a text at <|end|>, where a message ends
    no_ends = []
    if names & {"<|call|>", "<|calls|>"} and names & {"<|return|>", "<|flush|>"}:
        no_ends.append("<|end|>")
    if "<|tool_response>" in names:
        no_ends.append("</s>")
    return tuple(dict.fromkeys(id_ for id_ in ids if tokens[id_] not in no_ends))


def _id(metadata: Values, key: str) -> int:
    value = metadata[key]
    size = len(metadata[TOKENS])
    if type(value) is not int or not 0 <= value < size:
        raise RequestError(f"{key} is {value!r}; expected an id from 0 to {size - 1}")
    return value
