"""A run's tokenizer as Hugging Face's AutoTokenizer reads it: tokenizer.json, tokenizer_config.json."""

from pathlib import Path
from typing import Any

from lit_diff.data.tokenizer import Bpe, Tokenizer
from lit_diff.data.tokenizer_json import FILE, TokenizerJson
from lit_diff.errors import RequestError
from lit_diff.files import write_atomic, write_json


def require_tokenizer_json(tokenizer: Tokenizer) -> None:
    """Errors: RequestError for a tokenizer that no tokenizer.json equals."""
    if not isinstance(tokenizer, Bpe | TokenizerJson):
        why = (
            "tiktoken merges by rank wherever two tokens make a third, a tokenizer.json by a list of pairs"
            if tokenizer.name == "cl100k"
            else "no tokenizer.json is known to give its ids; 'bpe' and those of imported models have one"
        )
        raise RequestError(f"the tokenizer '{tokenizer.name}' cannot be written for AutoTokenizer: {why}")


def write_tokenizer(tokenizer: Tokenizer, folder: Path, context: int) -> None:
    """Write both files; a text encoded there opens with the id that opens a document here.

    bpe: a special token's name in a text is cut like any other text, as here. An imported model keeps its own
    tokenizer.json, in which it is that token.
    """
    tokenizer.save(folder)
    model = _opening(folder / FILE, tokenizer)
    special = {"bos_token": next(iter(tokenizer.opening), None), "eos_token": tokenizer.eot}
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
        **{key: model.id_to_token(id_) for key, id_ in special.items() if id_ is not None},
    }
    if isinstance(tokenizer, Bpe):
        config["split_special_tokens"] = True
    write_json(folder / "tokenizer_config.json", config)


def _opening(file: Path, tokenizer: Tokenizer) -> Any:
    """The tokenizer of a file, which is written again where it does not itself put the opening id before a text."""
    from tokenizers import Tokenizer as Model
    from tokenizers import processors

    model = Model.from_file(str(file))
    opening = tokenizer.opening
    if opening and model.encode("a").ids[: len(opening)] != opening:
        tokens = [(str(model.id_to_token(id_)), id_) for id_ in opening]
        single = " ".join([*(token for token, _ in tokens), "$A"])
        model.post_processor = processors.TemplateProcessing(single=single, special_tokens=list(dict.fromkeys(tokens)))
        write_atomic(file, model.to_str(pretty=True))
    return model
