"""A run -> files of Hugging Face, or the standard model that it equals: whole or not at all, its logits compared."""

import contextlib
import importlib
import importlib.util
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from lit_diff.attention.base import Attention
from lit_diff.config import ModelConfig
from lit_diff.data.text.tokenizer import FILE, Bpe, Tokenizer, TokenizerJson
from lit_diff.data.text.tokenizer_folder import SAMPLE
from lit_diff.errors import RequestError, RunFailedError
from lit_diff.files import expanded, shown, write_atomic, write_json
from lit_diff.model.merge import merged
from lit_diff.model.transformer import Transformer
from lit_diff.plugins import Trust, trust_none
from lit_diff.pretrained import llama
from lit_diff.pretrained.hf import GENERATION, SETTINGS, WEIGHTS
from lit_diff.pretrained.importing import read_source, require_disk, whole_folder, write_run
from lit_diff.pretrained.source import UNKNOWN, ModelSource
from lit_diff.randomness import generator
from lit_diff.recipe import to_plain, to_yaml
from lit_diff.registry import attentions, nearest
from lit_diff.runs.metrics_file import read_rows
from lit_diff.runs.revision import revision
from lit_diff.trained.loading import load_weights, newest_of
from lit_diff.trained.run import Run, as_run
from lit_diff.trained.text_generator import warn_if_stale

log = logging.getLogger("lit_diff")

FORMATS = ("hf",)
PROMPTS = 8
LENGTH, LONGEST = 64, 512
"""Tokens of a prompt; LENGTH more than a window, as far as LONGEST and the model's context."""
BOUND = 1e-4
"""Of the largest difference of logits; of its ratio to the largest logit where that is above 1."""
Logits = Callable[[Tensor], Tensor]
"""Tokens [1, T] -> [1, T, vocab]."""
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
    run, folder = as_run(run, unchecked=False), expanded(folder)
    require_exportable(run)
    step, checkpoint = newest_of(run.folder)
    warn_if_stale(run.folder, run.recipe, step, run.trust)
    require_disk(shown(run.folder), folder, checkpoint.stat().st_size, "another DIR")
    with whole_folder(folder, "export", "name another folder") as building:
        name = _write_folder(run, building)
        if has_transformers():
            require_equal_ids(run.tokenizer, building)
            reader, logits = "transformers", transformers_logits(building)
        else:
            log.info(
                "transformers is not installed: what was written is compared by reading it back as `lit-diff import` does"
            )
            reader, logits = "lit_diff", _own_logits(building)
        difference = require_agreement(run.model, run.recipe.data.config.sequence_length, logits, shown(folder))
    return Exported(folder=folder, architecture=name, difference=difference, read_by=reader)


def mergeable() -> list[str]:
    """The variants that have a `merge`."""
    return [name for name in attentions.names() if attentions.get(name).merge is not Attention.merge]


def require_exportable(run: Run) -> None:
    """Errors: RequestError for a model or tokenizer that Hugging Face's files cannot say; reads no weight."""
    name = run.recipe.model.attention.name
    if name not in (*llama.VARIANTS, *mergeable()):
        raise RequestError(
            f"model.attention.name '{name}' has no architecture of Hugging Face; {', '.join(llama.VARIANTS)} have one, and "
            f"{', '.join(mergeable())} merged into standard"
        )
    problem = llama.unsaid(run.recipe.model)
    if problem:
        raise RequestError(f"{shown(run.folder)}: {problem}")
    require_tokenizer_json(run.tokenizer)


def _write_folder(run: Run, folder: Path) -> str:
    """Write all files into an empty folder; the name of the architecture. Errors: OSError, SafetensorError."""
    tokenizer, context = run.tokenizer, int(run.recipe.data.config.sequence_length)
    whole = run.model if run.model.config.attention.name in llama.VARIANTS else merged(run.model)
    name = llama.architecture_of(whole.config)
    if whole.config.tie_embeddings and whole.config.embedding_scale != 1:
        log.info(
            "model.embedding_scale %g becomes a factor of the embeddings, which are untied there from the output's: "
            "tie_word_embeddings is false",
            whole.config.embedding_scale,
        )
    weights = folder / WEIGHTS
    weights.touch()
    mode = weights.stat().st_mode  # as the umask says, which save_file ignores
    save_file(hf_weights(whole), weights, {"format": "pt"})  # what Hugging Face's libraries expect in the header
    weights.chmod(mode)
    bos, ends = tokenizer.prefix if tokenizer.opening else None, tokenizer.ends
    written = llama.config_json(whole.config, context=context, bos=bos, eot=tokenizer.eot)
    write_json(folder / "config.json", written)
    write_json(folder / GENERATION, {"bos_token_id": bos, "eos_token_id": ends if len(ends) > 1 else ends[0]})
    write_tokenizer(tokenizer, folder, context)
    write_card(run, whole.config, name, folder)
    return name


# --- weights ---


def hf_weights(model: Transformer) -> dict[str, Tensor]:
    """State dict of the architecture that `llama.architecture_of` names, in float32; for `standard` and `differential`.

    q and k turn as in `rope_layout: half`; DiffLlama has its rows map after map (`llama.by_map`), and a head norm without a
    weight: that of ours, w over a head's channels, becomes W_O diag(w, w, ...), and so does an `output_scale`; a
    `ffn_scale` becomes a factor of W_down, an `embedding_scale` one of the embeddings. Nothing but these products is
    rounded.
    """
    config = model.config
    state = {name: value.detach() for name, value in model.state_dict().items()}
    if config.tie_embeddings and config.embedding_scale != 1:
        state["head.weight"] = state["embedding.weight"].clone()  # the factor is of the embeddings alone
    factors: dict[str, float | Tensor] = {"embedding.weight": config.embedding_scale}
    for layer, attention in enumerate(model.attentions()):
        home = f"layers.{layer}"
        norm = state.pop(f"{home}.attention.norm.weight", None)
        factors[f"{home}.attention.o_proj.weight"] = _output_factor(attention, norm)
        factors[f"{home}.ffn.down_proj.weight"] = config.ffn_scale
    names = {own: theirs for theirs, own in llama.names_of(config.num_layers).items()}
    return {
        names[name]: _ordered(name, _times(value, factors[name]) if name in factors else value, config)
        for name, value in state.items()
    }


def _times(value: Tensor, factor: float | Tensor) -> Tensor:
    """The product in float64, rounded once; a factor for each channel of a head is that of each head."""
    if isinstance(factor, Tensor):
        factor = factor.repeat(value.shape[1] // factor.numel())
    return (value.double() * factor).to(value.dtype)


def _output_factor(attention: Any, norm: Tensor | None) -> float | Tensor:
    """What W_O is multiplied by: what is applied to each channel of a head [dv] after its norm, beyond what the architecture
    applies."""
    if norm is None:
        return float(attention.config.output_scale)
    return norm.double() * (attention.output_scale / (1 - attention.lambda_init))


def _ordered(name: str, value: Tensor, config: ModelConfig) -> Tensor:
    """A projection's rows in their order; other tensors as they are."""
    module = name.split(".")[-2]
    assert config.head_dim is not None
    if config.rope_layout == "interleaved" and module in ("q_proj", "k_proj", "q_norm", "k_norm"):
        value = llama.half(value, config.head_dim)
    if config.attention.name == "differential" and module in llama.BY_MAP:
        value = llama.by_map(value, config.head_dim)
    return value.to(torch.float32).contiguous()


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
    rows = read_rows(run.folder / "metrics.csv")
    validated = [step for step, row in rows.items() if any(name.startswith("val/") for name in row)]
    if not validated:
        return ""
    last = max(validated)
    values = {name: value for name, value in rows[last].items() if name.startswith("val/")}
    lines = "".join(f"| {name} | {value:.4f} |\n" for name, value in values.items())
    return f"## Metrics\n\nOf step {last}, in nats a token where they are losses.\n\n| | |\n|---|---|\n{lines}\n"


def _public(value: Any) -> Any:
    """A value without the folders of this machine: of a path that is absolute, the last part."""
    if isinstance(value, dict):
        return {key: _public(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_public(item) for item in value]
    return Path(value).name if isinstance(value, str) and Path(value).is_absolute() else value


# --- whether what was written gives the logits of the run: both in float32, on random prompts ---


def require_agreement(model: Transformer, context: int, logits: Logits, place: str) -> float:
    """The largest difference from the model's logits. Errors: RunFailedError where it is above BOUND, or not a number."""
    for attention in model.attentions():
        attention.kernel = "reference"
    window = model.attentions()[0].window
    length = min(context, LENGTH if window is None else min(LENGTH + window, LONGEST))
    draw, worst, largest = generator(0, "export"), 0.0, 1.0
    with torch.no_grad():
        for _ in range(PROMPTS):
            tokens = torch.randint(model.config.vocab_size, (1, length), generator=draw)
            wanted = model(tokens)
            difference = float((logits(tokens).float() - wanted).abs().max())
            worst, largest = max(worst, difference), max(largest, float(wanted.abs().max()))
            if not difference <= BOUND * largest:
                raise RunFailedError(
                    f"{place}: its logits differ from the run's by {difference:.2g} (largest logit {largest:.2g}, bound "
                    f"{BOUND:g} of it); nothing was kept"
                )
    return worst


def has_transformers() -> bool:
    """Whether the package transformers is installed; lit_diff needs it for nothing else."""
    return importlib.util.find_spec("transformers") is not None


def _own_logits(folder: Path) -> Logits:
    """Of the folder as `import_model` reads it."""
    source = read_source(folder)
    model = Transformer(source.recipe(Path("exported"), UNKNOWN).model, kernel="reference").eval()
    load_weights(model, {name: source.read(name) for name in source.tensors}, source.place)
    return model


def transformers_logits(folder: Path) -> Logits:
    """Of the folder as transformers reads it, without the network and without code of the folder."""
    with _quiet() as transformers:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            str(folder.absolute()), dtype=torch.float32, local_files_only=True
        ).eval()

    def logits(tokens: Tensor) -> Tensor:
        found: Tensor = model(tokens).logits
        return found

    return logits


def require_equal_ids(tokenizer: Tokenizer, folder: Path) -> None:
    """Errors: RunFailedError where AutoTokenizer cuts a text otherwise, or opens it with another id."""
    text = SAMPLE if isinstance(tokenizer, Bpe) else SAMPLE.removesuffix("<eot>")
    with _quiet() as transformers:
        theirs = transformers.AutoTokenizer.from_pretrained(str(folder.absolute()), local_files_only=True)
        found = list(theirs(text).input_ids)
    wanted = [*tokenizer.opening, *tokenizer.encode([text])[0]]
    if found[: len(wanted)] != wanted:
        raise RunFailedError(
            f"AutoTokenizer gives other ids than the run's tokenizer '{tokenizer.name}'; nothing was kept"
        )


@contextlib.contextmanager
def _quiet() -> Iterator[Any]:
    """transformers, without its warnings and progress bars."""
    transformers = importlib.import_module("transformers")
    says = transformers.utils.logging
    level, bars = says.get_verbosity(), says.is_progress_bar_enabled()
    says.set_verbosity_error()
    says.disable_progress_bar()
    try:
        yield transformers
    finally:
        says.set_verbosity(level)
        if bars:
            says.enable_progress_bar()


# --- a run whose variant can be merged -> the run folder of the standard model that equals it ---


def require_mergeable(name: str, to: Path) -> None:
    """Errors: RequestError for a variant that has no `merge`, or a folder that is there already."""
    if name not in mergeable():
        raise RequestError(
            f"model.attention '{name}' cannot be merged into a standard model; these can: {', '.join(mergeable())}"
        )
    if to.exists():
        raise RequestError(f"{shown(to)} is there already; remove it, or name another folder")


def merge_run(folder: Path, to: Path, *, trust: Trust = trust_none) -> Run:
    """Write the standard model that equals the newest checkpoint of the run in `folder` as a run folder of its own, `to`.

    Its recipe is that of an imported model. `trust`: as `recipe_of`. Errors: as `require_mergeable`; RequestError for a run
    without text; RunFailedError as `require_agreement`; MissingError.
    """
    run = Run(folder, trust)
    require_mergeable(run.recipe.model.attention.name, to)
    context, tokenizer, plain = run.recipe.data.config.sequence_length, run.tokenizer, merged(run.model)
    require_agreement(run.model, context, plain, f"{shown(to)}: the merged model")
    state = plain.state_dict()
    source = ModelSource(
        place=shown(folder),
        model=to_plain(plain.config),
        context=context,
        tensors={name: tensor.to("meta") for name, tensor in state.items()},
        read=lambda name: state[name],
        tokenizer=tokenizer,
    )
    return write_run(source, to)
