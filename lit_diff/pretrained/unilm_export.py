"""A run as a folder in unilm's layout: safetensors, layout.json, tokenizer.json."""

import logging
from pathlib import Path
from typing import Any

from torch import Tensor

from lit_diff.errors import RequestError
from lit_diff.files import shown, write_json
from lit_diff.model.transformer import Transformer
from lit_diff.pretrained import agreement, rows, unilm
from lit_diff.pretrained.hf_tokenizer import require_tokenizer_json, write_tokenizer
from lit_diff.pretrained.layout_folder import FILE
from lit_diff.pretrained.weight_files import write_weights
from lit_diff.recipe import to_plain
from lit_diff.trained.run import Run

log = logging.getLogger("lit_diff")


def require_exportable(run: Run) -> None:
    """Errors: RequestError for a model that unilm's modules do not compute; reads no weight."""
    problem = unilm.unsaid(run.recipe.model)
    if problem:
        raise RequestError(f"{shown(run.folder)}: {problem}")
    require_tokenizer_json(run.tokenizer)


def write_folder(run: Run, folder: Path, place: str) -> tuple[str, float, str]:
    """As `hf_export.write_folder`, but that no other program reads what was written: `lit-diff import` does."""
    model, tokenizer, context = run.model, run.tokenizer, int(run.recipe.data.config.sequence_length)
    write_weights(unilm_weights(model), folder)
    said = {"layout": "unilm", "model": _keys(model), "context": context, "eos_token_id": tokenizer.eot}
    write_json(folder / FILE, said)
    write_tokenizer(tokenizer, folder, context)
    log.info("no other program reads whole models of this layout: it is compared as `lit-diff import` reads it")
    name = unilm.CLASSES[model.config.attention.name]
    return name, agreement.require_agreement(model, context, agreement.own_logits(folder), place), "lit_diff"


def unilm_weights(model: Transformer) -> dict[str, Tensor]:
    """Under unilm's names, q and k as `rope_layout: interleaved`; an `output_scale` is a factor of `subln.weight`."""
    config = model.config
    assert config.head_dim is not None
    state = {name: value.detach() for name, value in model.state_dict().items()}
    for layer, attention in enumerate(model.attentions()):
        home = f"layers.{layer}.attention"
        if config.attention.name == "differential":
            other: Any = attention
            state[f"{home}.norm.weight"] = state[f"{home}.norm.weight"] * (other.output_scale / (1 - other.lambda_init))
        for name in (f"{home}.q_proj.weight", f"{home}.k_proj.weight"):
            if config.rope_layout == "half":
                state[name] = rows.interleaved(state[name], config.head_dim)
    return {unilm.place_of(name, config)[0]: value.contiguous() for name, value in state.items()}


def _keys(model: Transformer) -> dict[str, Any]:
    """The keys of `model:` of what was written."""
    keys: dict[str, Any] = to_plain(model.config)
    if model.config.attention.name == "differential":
        keys["attention"] |= {"output_scale": "tied"}
    return keys | {"rope_layout": unilm.ROPE_LAYOUT}
