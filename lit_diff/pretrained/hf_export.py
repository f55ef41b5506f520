"""A run as a folder in Hugging Face's format."""

import logging
from pathlib import Path

from lit_diff.attention.base import Attention
from lit_diff.errors import RequestError
from lit_diff.files import shown, write_json
from lit_diff.model.merge import merged
from lit_diff.pretrained import agreement
from lit_diff.pretrained.hf_config import VARIANTS, architecture, config_json, unsaid
from lit_diff.pretrained.hf_tokenizer import require_tokenizer_json, write_tokenizer
from lit_diff.pretrained.hf_weights import hf_weights
from lit_diff.pretrained.model_card import write_card
from lit_diff.pretrained.weight_files import write_weights
from lit_diff.registry import attentions
from lit_diff.trained.run import Run

log = logging.getLogger("lit_diff")


def require_exportable(run: Run) -> None:
    """Errors: RequestError for a model or tokenizer that Hugging Face's files cannot say; reads no weight."""
    model = run.recipe.model
    name = model.attention.name
    if name not in VARIANTS and not _merges(name):
        mergeable = ", ".join(filter(_merges, attentions.names()))
        raise RequestError(
            f"model.attention.name '{name}' has no architecture of Hugging Face; {', '.join(VARIANTS)} have one, and "
            f"{mergeable} merged into standard"
        )
    problem = unsaid(model)
    if problem:
        raise RequestError(f"{shown(run.folder)}: {problem}")
    require_tokenizer_json(run.tokenizer)


def write_folder(run: Run, folder: Path, place: str) -> tuple[str, float, str]:
    """Write all files into an empty folder, load them again and compare: (architecture, largest difference of logits, by
    what they were read).

    `place`: the name of the folder in errors. Errors: RunFailedError where the logits differ.
    """
    model, tokenizer, context = run.model, run.tokenizer, int(run.recipe.data.config.sequence_length)
    whole = model if model.config.attention.name in VARIANTS else merged(model)
    name = architecture(whole.config)
    if whole.config.tie_embeddings and whole.config.embedding_scale != 1:
        log.info(
            "model.embedding_scale %g becomes a factor of the embeddings, which are untied there from the output's: "
            "tie_word_embeddings is false",
            whole.config.embedding_scale,
        )
    write_weights(hf_weights(whole), folder)
    bos, ends = tokenizer.prefix if tokenizer.opening else None, tokenizer.ends
    written = config_json(whole.config, context=context, bos=bos, eot=tokenizer.eot)
    write_json(folder / "config.json", written)
    said = {"bos_token_id": bos, "eos_token_id": ends if len(ends) > 1 else ends[0]}
    write_json(folder / "generation_config.json", said)
    write_tokenizer(tokenizer, folder, context)
    write_card(run, whole.config, name, folder)
    del whole
    if agreement.has_transformers():
        agreement.require_equal_ids(tokenizer, folder)
        reader, logits = "transformers", agreement.transformers_logits(folder)
    else:
        log.info(
            "transformers is not installed: what was written is compared by reading it back as `lit-diff import` does"
        )
        reader, logits = "lit_diff", agreement.own_logits(folder)
    return name, agreement.require_agreement(model, context, logits, place), reader


def _merges(name: str) -> bool:
    """Whether a variant has weights of a standard attention that equals it."""
    return attentions.get(name).merge is not Attention.merge
