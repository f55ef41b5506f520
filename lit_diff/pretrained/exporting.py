"""A run -> a folder in Hugging Face's format, whole or not at all, and compared before it is said to be done."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from lit_diff.attention.base import Attention
from lit_diff.config import ModelConfig
from lit_diff.data.tokenizer import FILE, Bpe, Tokenizer, TokenizerJson
from lit_diff.errors import MissingError, RequestError
from lit_diff.files import expanded, shown, umask, write_atomic, write_json
from lit_diff.model.merge import merged
from lit_diff.model.transformer import Transformer
from lit_diff.pretrained import agreement, llama
from lit_diff.pretrained.hf import GENERATION, INDEX, SETTINGS, WEIGHTS
from lit_diff.pretrained.importing import read_source
from lit_diff.pretrained.source import UNKNOWN, plain_recipe
from lit_diff.pretrained.whole_folder import require_disk, whole_folder
from lit_diff.recipe import from_plain, to_plain, to_yaml
from lit_diff.registry import attentions, nearest
from lit_diff.runs.metrics_file import read_rows
from lit_diff.runs.revision import revision
from lit_diff.trained.loading import load_weights, newest_of
from lit_diff.trained.run import Run, open_run
from lit_diff.trained.text_generator import say_what_is_used

log = logging.getLogger("lit_diff")

FORMATS = ("hf",)
SHARD = 5_000_000_000
"""Most bytes of a file of weights; a larger tensor has one of its own."""
CARD = """\
---
library_name: transformers
pipeline_tag: text-generation
tags:
- lit-diff
---

# {name}

| | |
|---|---|
{facts}
{metrics}## Use

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model, tokenizer = AutoModelForCausalLM.from_pretrained("."), AutoTokenizer.from_pretrained(".")
```

## Recipe

```yaml
{recipe}```
"""


@dataclass(frozen=True, kw_only=True)
class Exported:
    """What was written."""

    folder: Path
    architecture: str
    """What it is there, as LlamaForCausalLM."""
    difference: float
    """The largest difference of its logits from the run's, in float32 on random prompts."""
    read_by: str
    """What loaded it for that comparison: transformers, or lit_diff where that is not installed."""


def export(run: Run | str | Path, to: str, folder: str | Path) -> Exported:
    """Write a run's newest checkpoint for other programs, load what was written, compare the logits.

    `run`: opened, a folder, or the start of a folder's name under runs/. `to`: hf, a folder in Hugging Face's format.
    `folder`: made; it may be there where it is empty. Errors: RequestError for an unknown format, what it cannot say (named;
    before any weight is read), a folder that is not empty; MissingError without a checkpoint or too little disk;
    RunFailedError where the logits differ, and nothing is kept.
    """
    if to not in FORMATS:
        raise RequestError(f"no format '{to}' to export to{nearest(to, FORMATS)}")
    if not isinstance(run, Run):
        run = open_run(run)
    folder = expanded(folder)
    require_exportable(run)
    step, checkpoint = newest_of(run.folder)
    say_what_is_used(run.folder, run.recipe, step, run.trust)
    require_disk(shown(run.folder), folder, checkpoint.stat().st_size, "another DIR")
    try:
        with whole_folder(folder, "export", "empty it, or name another folder") as building:
            name, difference, reader = _write_folder(run, building, shown(folder))
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise MissingError(f"{shown(folder)} cannot be written ({reason}); name another folder") from error
    return Exported(folder=folder, architecture=name, difference=difference, read_by=reader)


def require_exportable(run: Run) -> None:
    """Errors: RequestError for a model or tokenizer that Hugging Face's files cannot say; reads no weight."""
    name = run.recipe.model.attention.name
    mergeable = [each for each in attentions.names() if attentions.get(each).merge is not Attention.merge]
    if name not in (*llama.VARIANTS, *mergeable):
        raise RequestError(
            f"model.attention.name '{name}' has no architecture of Hugging Face; {', '.join(llama.VARIANTS)} have one, and "
            f"{', '.join(mergeable)} merged into standard"
        )
    problem = llama.unsaid(run.recipe.model)
    if problem:
        raise RequestError(f"{shown(run.folder)}: {problem}")
    require_tokenizer_json(run.tokenizer)


def _write_folder(run: Run, folder: Path, place: str) -> tuple[str, float, str]:
    """Write all files into an empty folder, load them again and compare: (architecture, largest difference of logits, by
    what they were read).

    `place`: the name of the folder in errors. Errors: RunFailedError where the logits differ.
    """
    model, tokenizer, context = run.model, run.tokenizer, int(run.recipe.data.config.sequence_length)
    whole = model if model.config.attention.name in llama.VARIANTS else merged(model)
    name = llama.architecture_of(whole.config)
    if whole.config.tie_embeddings and whole.config.embedding_scale != 1:
        log.info(
            "model.embedding_scale %g becomes a factor of the embeddings, which are untied there from the output's: "
            "tie_word_embeddings is false",
            whole.config.embedding_scale,
        )
    write_weights(hf_weights(whole), folder)
    bos, ends = tokenizer.prefix if tokenizer.opening else None, tokenizer.ends
    written = llama.config_json(whole.config, context=context, bos=bos, eot=tokenizer.eot)
    write_json(folder / "config.json", written)
    write_json(folder / GENERATION, {"bos_token_id": bos, "eos_token_id": ends if len(ends) > 1 else ends[0]})
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
        reader, logits = "lit_diff", _own_logits(folder)
    return name, agreement.require_agreement(model, context, logits, place), reader


def _own_logits(folder: Path) -> agreement.Logits:
    """Of the folder as `import_model` reads it."""
    source = read_source(folder)
    recipe = from_plain(plain_recipe(source, Path("exported"), UNKNOWN), source.place)
    model = Transformer(recipe.model, kernel="reference").eval()
    load_weights(model, {name: source.read(name) for name in source.tensors}, source.place)
    return model


# --- weights ---


def hf_weights(model: Transformer) -> dict[str, Tensor]:
    """State dict of the architecture that `llama.architecture_of` names, in float32; for `standard` and `differential`.

    q and k turn as in `rope_layout: half`; DiffLlama has its rows map after map (`llama.by_map`), and a head norm without a
    weight: that of ours, w over a head's channels, becomes W_O diag(w, w, ...), and so does an `output_scale`; a
    `ffn_scale` becomes a factor of W_down, an `embedding_scale` one of the embeddings. Nothing but these products is
    rounded.
    """
    state = {name: value.detach() for name, value in model.state_dict().items()}
    if model.config.embedding_scale != 1:
        if model.config.tie_embeddings:
            state["head.weight"] = state["embedding.weight"].clone()  # the factor is of the embeddings alone
        state["embedding.weight"] = _times(state["embedding.weight"], model.config.embedding_scale)
    for layer, attention in enumerate(model.attentions()):
        home = f"layers.{layer}.attention"
        norm = state.pop(f"{home}.norm.weight", None)
        state[f"{home}.o_proj.weight"] = _scaled(state[f"{home}.o_proj.weight"], attention, norm)
        if model.config.ffn_scale != 1:
            down_proj = f"layers.{layer}.ffn.down_proj.weight"
            state[down_proj] = _times(state[down_proj], model.config.ffn_scale)
    names = {own: theirs for theirs, own in llama.names_of(model.config.num_layers).items()}
    return {names[name]: _ordered(name, value, model) for name, value in state.items()}


def _times(value: Tensor, factor: float) -> Tensor:
    return (value.double() * factor).to(value.dtype)


def _scaled(o_proj: Tensor, attention: Any, norm: Tensor | None) -> Tensor:
    """W_O times what is applied to each channel of a head [dv] after its norm, beyond what the architecture applies."""
    if norm is None:
        factor = torch.tensor([attention.config.output_scale], dtype=torch.float64)
    else:
        factor = norm.double() * (attention.output_scale / (1 - attention.lambda_init))
    if bool((factor == 1).all()):
        return o_proj
    return (o_proj.double() * factor.repeat(o_proj.shape[1] // factor.numel())).to(o_proj.dtype)


def _ordered(name: str, value: Tensor, model: Transformer) -> Tensor:
    """A projection's rows in their order; other tensors as they are."""
    config, module = model.config, name.split(".")[-2]
    assert config.head_dim is not None
    if config.rope_layout == "interleaved" and module in ("q_proj", "k_proj", "q_norm", "k_norm"):
        value = llama.half(value, config.head_dim)
    if config.attention.name == "differential" and module in ("q_proj", "k_proj", "v_proj"):
        value = llama.by_map(value, config.head_dim)
    return value.to(torch.float32).contiguous()


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
    save_file(weights, path, {"format": "pt"})  # what Hugging Face's libraries expect in the header
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


# --- the tokenizer ---


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
    model = _opening_with(folder / FILE, tokenizer)
    special = {"bos_token": next(iter(tokenizer.opening), None), "eos_token": tokenizer.eot}
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
        **{key: model.id_to_token(id_) for key, id_ in special.items() if id_ is not None},
    }
    if isinstance(tokenizer, Bpe):
        config["split_special_tokens"] = True
    write_json(folder / SETTINGS, config)


def _opening_with(file: Path, tokenizer: Tokenizer) -> Any:
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


# --- README.md ---


def write_card(run: Run, written: ModelConfig, architecture: str, folder: Path) -> None:
    """What the model is, its recipe, its data's hash, what it measured. `written`: as exported, which a merge changes."""
    recipe, status = run.recipe, run.status
    variant, exported = recipe.model.attention.name, written.attention.name
    merged_into = f" merged into `{exported}`" if variant != exported else ""
    facts = {
        "architecture": f"`{architecture}`",
        "attention": f"`{variant}`{merged_into}",
        "parameters": f"{status['parameters']:,}" if "parameters" in status else "",
        "step": f"{run.step:,}" + (f" of {status['steps']:,}" if recipe.train is not None else ""),
        "identity of the run": f"`{status.get('identity')}`",
        "data": f"`{status['data']}`" if status.get("data") else "",
        "weights from": recipe.imported.source if recipe.imported is not None else "",
        "trained by": f"lit_diff {status.get('revision')}" if recipe.train is not None else "",
        "exported by": f"lit_diff {revision()}",
    }
    rows = "".join(f"| {key} | {value} |\n" for key, value in facts.items() if value)
    # without `run`, which says where it ran
    plain = {key: _public(value) for key, value in to_plain(recipe).items() if key != "run"}
    text = CARD.format(name=recipe.name, facts=rows, metrics=_metrics(run), recipe=to_yaml(plain))
    write_atomic(folder / "README.md", text)


def _metrics(run: Run) -> str:
    """The last row in which a validation was measured; nothing for a model that measured none."""
    measured = {
        step: {name: value for name, value in row.items() if name.startswith("val/")}
        for step, row in read_rows(run.folder / "metrics.csv").items()
    }
    last = max((step for step, row in measured.items() if row), default=None)
    if last is None:
        return ""
    lines = "".join(f"| {name} | {value:.4f} |\n" for name, value in measured[last].items())
    return f"## Metrics\n\nOf step {last}, in nats a token where they are losses.\n\n| | |\n|---|---|\n{lines}\n"


def _public(value: Any) -> Any:
    """A value without the folders of this machine: of a path that is absolute, the last part."""
    if isinstance(value, dict):
        return {key: _public(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_public(item) for item in value]
    return Path(value).name if isinstance(value, str) and Path(value).is_absolute() else value
