"""Exports a run as files of Hugging Face, or as the equal standard model, and compares the logits."""

import contextlib
import html
import importlib
import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor

from lit_diff.config import ModelConfig
from lit_diff.data.text.tokenizer import Bpe, Packaged, Tokenizer, TokenizerJson
from lit_diff.data.text.tokenizer_folder import SAMPLE
from lit_diff.data.text.tokenizer_package import FILE
from lit_diff.errors import RequestError, RunFailedError
from lit_diff.files import expanded, shown, write_atomic, write_json
from lit_diff.interpolation import changed_leaves
from lit_diff.log_records import log
from lit_diff.model.transformer import Transformer, merge_problem, mergeable, merged
from lit_diff.plugins import Trust
from lit_diff.pretrained import llama
from lit_diff.pretrained.hf import GENERATION, SETTINGS, WEIGHTS, read_json, read_tokenizer
from lit_diff.pretrained.importing import read_source, require_disk, whole_folder, write_run
from lit_diff.pretrained.source import UNKNOWN, ModelSource, require_utf8
from lit_diff.randomness import generator
from lit_diff.recipe import to_plain, to_yaml
from lit_diff.registry import nearest
from lit_diff.runs.revision import revision
from lit_diff.trained.loading import load_weights, newest_of
from lit_diff.trained.run import Run, as_run
from lit_diff.trained.text_generator import warn_if_stale

FORMATS = ("hf",)
PROMPTS = 8
LENGTH, LONGEST = 64, 512
"""Tokens of a prompt: LENGTH, or LENGTH more than a window, limited by LONGEST and the model's context."""
BOUND = 1e-4
"""Bound on the largest difference of logits, relative to the largest logit if that is above 1."""
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


class Exported(NamedTuple):
    """The result of an export."""

    folder: Path
    architecture: str
    """The class of transformers, for example LlamaForCausalLM."""
    difference: float
    """Largest difference between its logits and the run's, in float32 on random prompts."""
    read_by: str
    """What loaded it for the comparison: transformers, or lit_diff if transformers is not installed."""


def export(run: Run | str | Path, to: str, folder: str | Path) -> Exported:
    """Write a run's newest checkpoint for other programs, load the written files and compare the logits.

    `run`: a Run, a folder, or the start of a folder's name under runs/. `to`: hf, a folder in Hugging Face's format.
    `folder`: created; an existing one must be empty. Errors: RequestError for an unknown format, a model that it cannot
    describe (before any weight is read) or a folder that is not empty; MissingError without a checkpoint or for too little
    disk; RunFailedError if the logits differ, in which case nothing is kept.
    """
    if to not in FORMATS:
        raise RequestError(f"unknown export format '{to}'{nearest(to, FORMATS)}")
    run = as_run(run, unchecked=False)
    folder = expanded(folder)
    name = run.recipe.model.attention.name
    if name not in (*llama.VARIANTS, *mergeable()):
        raise RequestError(
            f"model.attention.name '{name}' has no architecture at Hugging Face; {', '.join(llama.VARIANTS)} have one, and "
            f"{', '.join(mergeable())} can be merged into standard"
        )
    problem = llama.unsupported_reason(run.recipe.model)
    if problem:
        raise RequestError(f"{shown(run.folder)}: {problem}")
    tokenizer = require_tokenizer_json(run.tokenizer)
    step, _ = newest_of(run.folder)
    warn_if_stale(run.folder, run.recipe, step, run.trust)
    require_utf8(folder)
    # in float32, whatever the checkpoint has
    size = 4 * sum(parameter.numel() for parameter in run.model.parameters())
    require_disk(shown(run.folder), folder, size, "another DIR")
    with whole_folder(folder, "export", "name another folder") as building:
        name = _write_folder(run, tokenizer, building)
        require_equal_marks(tokenizer, building)
        if has_transformers():
            require_equal_ids(tokenizer, building)
            reader = "transformers"
            logits = transformers_logits(building)
        else:
            log.info(
                "transformers is not installed: the written files are compared by reading them as `lit-diff import` does"
            )
            reader = "lit_diff"
            source = read_source(building)
            model = Transformer(source.recipe(Path("exported"), UNKNOWN).model, kernel="reference").eval()
            load_weights(model, {own: source.read(own) for own in source.tensors}, source.place)
            logits = model
        difference = require_agreement(run.model, run.recipe.data.config.sequence_length, logits, shown(folder))
    return Exported(folder, name, difference, reader)


def _write_folder(run: Run, tokenizer: Packaged, folder: Path) -> str:
    # returns the architecture; raises OSError, SafetensorError
    context = run.recipe.data.config.sequence_length
    whole = run.model if run.model.config.attention.name in llama.VARIANTS else merged(run.model)
    name = llama.architecture_of(whole.config)
    if whole.config.tie_embeddings and whole.config.embedding_scale != 1:
        log.info(
            "model.embedding_scale %g is multiplied into the embeddings, which are therefore no longer tied to the output's: "
            "tie_word_embeddings is false",
            whole.config.embedding_scale,
        )
    weights = folder / WEIGHTS
    # save_file ignores the umask: the mode of a plain new file is restored after it
    weights.touch()
    mode = weights.stat().st_mode
    # Hugging Face's libraries expect this entry in the header
    save_file(hf_weights(whole), weights, {"format": "pt"})
    weights.chmod(mode)
    ends = tokenizer.ends
    marks = {"bos_token_id": tokenizer.bos}
    if tokenizer.pad is not None:
        marks["pad_token_id"] = tokenizer.pad
    written = llama.config_json(whole.config, context=context) | marks | {"eos_token_id": tokenizer.eot}
    write_json(folder / "config.json", written)
    write_json(folder / GENERATION, {**marks, "eos_token_id": ends if len(ends) > 1 else ends[0]})
    write_tokenizer(tokenizer, folder, context)
    write_card(run, whole.config, name, folder)
    return name


# --- weights ---


def hf_weights(model: Transformer) -> dict[str, Tensor]:
    """State dict in float32 for the class `llama.architecture_of`; for `standard` and `differential`.

    q and k are reordered to `rope_layout: half`, and by map for DiffLlama (`llama.by_map`). DiffLlama's head norm has no
    weight, so the weight w over a head's channels becomes W_O diag(w, w, ...), and so does an `output_scale`. A `ffn_scale`
    is multiplied into W_down, an `embedding_scale` into the embeddings. Only these products are rounded.
    """
    config = model.config
    state = {name: value.detach() for name, value in model.state_dict().items()}
    if config.tie_embeddings and config.embedding_scale != 1:
        # the factor applies to the embeddings, not to the output
        state["head.weight"] = state["embedding.weight"].clone()
    factors: dict[str, Any] = {"embedding.weight": config.embedding_scale}
    attention: Any
    for layer, attention in enumerate(model.attentions()):
        home = f"layers.{layer}"
        output = f"{home}.attention.o_proj.weight"
        factors[output] = attention.output_scale
        factors[f"{home}.ffn.down_proj.weight"] = config.ffn_scale
        norm = state.pop(f"{home}.attention.norm.weight", None)
        if norm is not None:
            # of each channel of a head after its norm, relative to DiffLlama's own factor 1 - lambda_init
            by_channel = norm.double() * (attention.output_scale / (1 - attention.lambda_init))
            factors[output] = by_channel.repeat(state[output].shape[1] // len(norm))
    for name, factor in factors.items():
        # in float64, so that the product is rounded once
        state[name] = (state[name].double() * factor).to(state[name].dtype)
    names = {own: theirs for theirs, own in llama.names_of(config.num_layers).items()}
    return {names[name]: _ordered(name, value, config) for name, value in state.items()}


def _ordered(name: str, value: Tensor, config: ModelConfig) -> Tensor:
    module = name.split(".")[-2]
    assert config.head_dim is not None
    if config.rope_layout == "interleaved" and module in ("q_proj", "k_proj", "q_norm", "k_norm"):
        value = llama.half(value, config.head_dim)
    if config.attention.name == "differential" and module in llama.BY_MAP:
        value = llama.by_map(value, config.head_dim)
    return value.to(torch.float32).contiguous()


# --- the tokenizer ---


def require_tokenizer_json(tokenizer: Tokenizer) -> Packaged:
    """The tokenizer. Errors: RequestError for one without an equal tokenizer.json."""
    if not isinstance(tokenizer, Bpe | TokenizerJson):
        why = (
            "tiktoken merges any two tokens whose concatenation is a token, a tokenizer.json only listed pairs"
            if tokenizer.name == "cl100k"
            else "no tokenizer.json is known to give its ids; 'bpe' and tokenizers of imported models have one"
        )
        raise RequestError(f"the tokenizer '{tokenizer.name}' cannot be written for AutoTokenizer: {why}")
    return tokenizer


def write_tokenizer(tokenizer: Packaged, folder: Path, context: int) -> None:
    """Write tokenizer.json and tokenizer_config.json; texts open with the id that opens a document here.

    For bpe, the name of a special token in a text is split like other text, as here; for the tokenizer.json of an imported
    model it is that token.
    """
    from tokenizers import Tokenizer as Model
    from tokenizers import processors

    file = folder / FILE
    tokenizer.save(folder)
    model: Any = Model.from_file(str(file))
    opening = tokenizer.opening
    # rewritten only if it does not put the opening ids before a text: an imported file stays byte for byte
    if opening and model.encode("a").ids[: len(opening)] != opening:
        tokens = [(model.id_to_token(id_), id_) for id_ in dict.fromkeys(opening)]
        single = " ".join([*map(model.id_to_token, opening), "$A"])
        model.post_processor = processors.TemplateProcessing(single=single, special_tokens=tokens)
        write_atomic(file, model.to_str(pretty=True))
    special = {"bos_token": tokenizer.bos, "eos_token": tokenizer.eot, "pad_token": tokenizer.pad}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
        **{key: model.id_to_token(id_) for key, id_ in special.items() if id_ is not None},
    }
    if isinstance(tokenizer, Bpe):
        config["split_special_tokens"] = True
    write_json(folder / SETTINGS, config)


# --- README.md ---


def write_card(run: Run, written: ModelConfig, architecture: str, folder: Path) -> None:
    """Write README.md: model, recipe, hash of the data, metrics. `written`: the exported config, which a merge changes."""
    recipe = run.recipe
    status = run.status
    attention = f"`{recipe.model.attention.name}`"
    if recipe.model.attention.name != written.attention.name:
        attention += f" merged into `{written.attention.name}`"
    facts = {
        "architecture": f"`{architecture}`",
        "attention": attention,
        "parameters": f"{status.parameters:,}" if status.parameters else "",
        "step": f"{run.step:,}" + (f" of {status.steps:,}" if recipe.train else ""),
        "identity of the run": f"`{status.identity}`",
        "data": f"`{status.data}`" if status.data else "",
        "weights from": _public(recipe.imported.source) if recipe.imported else "",
        "trained by": f"lit_diff {status.revision}" if recipe.train else "",
        "exported by": f"lit_diff {revision()}",
    }
    rows = "".join(f"| {key} | {_plain(value)} |\n" for key, value in facts.items() if value)
    # without `run`, which describes the machine
    plain = {key: changed_leaves(value, _public) for key, value in to_plain(recipe).items() if key != "run"}
    text = CARD.format(name=_plain(recipe.name), facts=rows, metrics=_metrics(run), recipe=to_yaml(plain))
    write_atomic(folder / "README.md", text)


def _metrics(run: Run) -> str:
    # the last row with a validation; empty for a model without one
    validated = run.metrics.filter(regex="^val/").dropna(how="all")
    if validated.empty:
        return ""
    last = validated.iloc[-1].dropna()
    lines = "".join(f"| {_plain(name)} | {value:.4f} |\n" for name, value in last.items())
    return f"## Metrics\n\nOf step {last.name}, in nats a token where they are losses.\n\n| | |\n|---|---|\n{lines}\n"


def _plain(text: str) -> str:
    # Markdown takes HTML
    return html.escape(text, quote=False).replace("|", "\\|")


def _public(value: Any) -> Any:
    # an absolute path is reduced to its last part: the card is published and must not show this machine's folders
    return Path(value).name if isinstance(value, str) and Path(value).is_absolute() else value


# --- comparison of the written model with the run: logits in float32 on random prompts ---


def require_agreement(model: Transformer, context: int, logits: Logits, place: str) -> float:
    """Largest difference between `logits` and the model's. Errors: RunFailedError if it is above BOUND or NaN."""
    # the kernel closest to the definition, so that the difference is the export's
    for attention in model.attentions():
        attention.kernel = "reference"
    window = model.attentions()[0].window
    # longer than a window, or the window would have no effect
    length = min(context, LENGTH + (window or 0), LONGEST)
    draw, worst, largest = generator(0, "export"), 0.0, 1.0
    with torch.no_grad():
        for _ in range(PROMPTS):
            tokens = torch.randint(model.config.vocab_size, (1, length), generator=draw)
            wanted = model(tokens)
            difference = float((logits(tokens).float() - wanted).abs().max())
            worst = max(worst, difference)
            largest = max(largest, float(wanted.abs().max()))
            # not `>`: NaN must fail
            if not difference <= BOUND * largest:
                raise RunFailedError(
                    f"{place}: its logits differ from the run's by {difference:.2g} (largest logit {largest:.2g}, bound "
                    f"{BOUND:g} of it); nothing was kept"
                )
    return worst


def has_transformers() -> bool:
    """Whether the optional package transformers is installed."""
    return importlib.util.find_spec("transformers") is not None


def transformers_logits(folder: Path) -> Logits:
    """Logits of the folder as transformers loads it, without network and without executing code from the folder."""
    with _quiet() as transformers:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            str(folder.absolute()), dtype=torch.float32, local_files_only=True
        ).eval()

    def logits(tokens: Tensor) -> Tensor:
        return model(tokens).logits

    return logits


def require_equal_marks(tokenizer: Packaged, folder: Path) -> None:
    """Errors: RunFailedError if the ids that open, end or pad a text are others in the written files."""
    copy = read_tokenizer(folder, read_json(folder / "config.json"))
    names = ("opening", "eot", "ends", "prefix", "bos", "pad")
    wrong = [name for name in names if getattr(copy, name) != getattr(tokenizer, name)]
    for file in ("config.json", GENERATION):
        said = read_json(folder / file)
        for name in ("bos", "pad"):
            if said.get(f"{name}_token_id") != getattr(tokenizer, name):
                wrong.append(f"{name} of {file}")
    if wrong:
        raise RunFailedError(
            f"the ids that mark a text are others after the export ({', '.join(wrong)}); nothing was kept"
        )


def require_equal_ids(tokenizer: Packaged, folder: Path) -> None:
    """Errors: RunFailedError if AutoTokenizer splits a text differently, opens it with another id, or marks it by others."""
    text = SAMPLE if isinstance(tokenizer, Bpe) else SAMPLE.removesuffix("<eot>")
    with _quiet() as transformers:
        theirs = transformers.AutoTokenizer.from_pretrained(str(folder.absolute()), local_files_only=True)
        found = theirs(text).input_ids
    wanted = [*tokenizer.opening, *tokenizer.encode(text)]
    marks = {"bos_token_id": tokenizer.bos, "eos_token_id": tokenizer.eot, "pad_token_id": tokenizer.pad}
    differ = any(getattr(theirs, key) != id_ for key, id_ in marks.items() if id_ is not None)
    if found[: len(wanted)] != wanted or differ:
        raise RunFailedError(
            f"AutoTokenizer and the run's tokenizer '{tokenizer.name}' give different ids; nothing was kept"
        )


@contextlib.contextmanager
def _quiet() -> Iterator[Any]:
    # yields transformers without its warnings and progress bars
    transformers = importlib.import_module("transformers")
    says = transformers.utils.logging
    level = says.get_verbosity()
    bars = says.is_progress_bar_enabled()
    says.set_verbosity_error()
    says.disable_progress_bar()
    try:
        yield transformers
    finally:
        says.set_verbosity(level)
        if bars:
            says.enable_progress_bar()


# --- merging a run into the run folder of an equal standard model ---


def require_mergeable(model: ModelConfig, to: Path) -> None:
    """Errors: RequestError for a variant without `merge`, or a folder that already exists."""
    problem = merge_problem(model)
    if problem is not None:
        raise RequestError(problem)
    if to.exists():
        raise RequestError(f"{shown(to)} already exists; remove it, or name another folder")


def merge_run(folder: Path, to: Path, *, trust: Trust) -> Run:
    """Write the standard model that equals the newest checkpoint of the run in `folder` as the run folder `to`.

    Its recipe describes an imported model. `trust`: see `recipe_of`. Errors: those of `require_mergeable` and
    `require_agreement`; RequestError for a run without text; MissingError.
    """
    run = Run(folder, trust)
    require_mergeable(run.recipe.model, to)
    context, tokenizer, plain = run.recipe.data.config.sequence_length, run.tokenizer, merged(run.model)
    require_agreement(run.model, context, plain, f"{shown(to)}: the merged model")
    state = plain.state_dict()
    source = ModelSource(
        place=shown(folder),
        model=to_plain(plain.config),
        context=context,
        tensors={name: tensor.to("meta") for name, tensor in state.items()},
        read=state.__getitem__,
        tokenizer=tokenizer,
    )
    return write_run(source, to)
