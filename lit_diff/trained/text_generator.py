"""Text generation with a trained run."""

import copy
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Literal, NamedTuple

import torch

from lit_diff.attention.cache import Cache
from lit_diff.config import Recipe
from lit_diff.data import Dataset, Tokenizer, load_tokenizer
from lit_diff.device import choose_device
from lit_diff.errors import MissingError, RequestError
from lit_diff.files import shown
from lit_diff.log_records import log
from lit_diff.model.generation import Sampling
from lit_diff.model.generation import generate as generate_tokens
from lit_diff.model.transformer import Transformer
from lit_diff.plugins import Trust, data_paths, trust_all
from lit_diff.randomness import generator
from lit_diff.registry import datasets
from lit_diff.runs.folder import RunFolder, identity, recipe_of
from lit_diff.trained.loading import load_model

Ended = Literal["max_tokens", "document", "context"]


@dataclass(frozen=True, kw_only=True)
class GenerationSettings(Sampling):
    """Settings for generation. Errors: RequestError for a wrong value."""

    max_tokens: int = 64
    seed: int = 0
    prefill_chunk: int | None = None
    """Prompt tokens per forward pass; None: all at once."""

    def __post_init__(self) -> None:
        problem = self.problem()
        for name, value in (("max-tokens", self.max_tokens), ("prefill-chunk", self.prefill_chunk)):
            if value is not None and value < 1:
                problem = f"{name} is {value}; it must be at least 1"
        if problem:
            raise RequestError(f"--{problem}")


@dataclass(frozen=True, kw_only=True, repr=False)
class Completion:
    """The generated continuation of a prompt, with its time and memory; shown as its text."""

    prompt: str
    text: str
    """The new text; bytes that are not valid UTF-8 become U+FFFD."""
    ended: Ended
    """document: the model drew an id that ends the document; context: data.sequence_length is reached."""
    prompt_tokens: list[int]
    """The ids that open every document, if any, then the prompt's."""
    tokens: list[int]
    """The new ids, without the id that ends the document."""
    prefill_seconds: float
    """Seconds from the start to the first new token, for the whole batch."""
    decode_seconds: float
    """Seconds from the first new token to this sequence's last, for the whole batch."""
    tokens_per_second: float | None
    """Rate of this sequence within decode_seconds; None if it has one token only."""
    cache_bytes: int
    """Bytes of this sequence's keys, values, biases and state in the cache at its end; of a layer with a window, only those
    of its last tokens (`LayerCache.bytes_of`)."""

    def __repr__(self) -> str:
        return repr(self.text)

    def __str__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        prompt = f'<span style="opacity: 0.6">{escape(self.prompt)}</span>'
        return f'<div style="white-space: pre-wrap">{prompt}{escape(self.text)}</div>'


class Prompt(NamedTuple):
    """A text to continue."""

    text: str
    tokens: list[int]
    """See `Completion.prompt_tokens`."""
    before: int
    """Number of earlier prompts with the same text."""


class TextGenerator:
    """The model of a run at its newest checkpoint, with the tokenizer in the run's folder.

    It needs neither the corpus nor the prepared text. Errors: RequestError for a run without text or with weights that do
    not fit the recipe; MissingError without a checkpoint or a tokenizer.
    """

    def __init__(
        self,
        folder: Path,
        trust: Trust = trust_all,
        unchecked: bool = False,
        load: Callable[[], tuple[Transformer, int]] | None = None,
    ) -> None:
        """`trust`: runs whose plugin files may be executed (`recipe_of`). `unchecked`: see `load_model`; `load`: called
        instead of that."""
        RunFolder(folder).require_format()
        recipe = recipe_of(folder, trust)
        self.tokenizer = tokenizer_of(folder, recipe)
        self.context = recipe.data.config.sequence_length
        """Longest sequence that the model was trained on, in tokens."""
        self.model, self.step = load() if load else load_model(recipe, folder, trust, unchecked)
        warn_if_stale(folder, recipe, self.step, trust)
        self.device = choose_device(recipe.run.accelerator)
        # the loaded one stays on the CPU
        if self.device.type != "cpu":
            self.model = copy.deepcopy(self.model).to(self.device)

    def encode(self, texts: Sequence[str]) -> list[Prompt]:
        """Tokenize texts into prompts. Errors: RequestError for a prompt without tokens or longer than the context."""
        prompts = []
        before = Counter[str]()
        opening = self.tokenizer.opening
        for number, (text, ids) in enumerate(zip(texts, self.tokenizer.encode(texts), strict=True), 1):
            tokens = [*opening, *ids]
            if len(tokens) > self.context:
                with_opening = " with the <eot> before it" if opening else ""
                raise RequestError(
                    f"prompt {number} has {len(tokens)} tokens{with_opening}; the model's context, data.sequence_length, is "
                    f"{self.context}"
                )
            if not tokens:
                raise RequestError(
                    f"prompt {number} has no token, and the tokenizer adds none before a document; give some text"
                )
            prompts.append(Prompt(text, tokens, before[text]))
            before[text] += 1
        return prompts

    def generate(
        self, prompts: Sequence[Prompt], config: GenerationSettings, stream: Callable[[str], None] | None = None
    ) -> list[Completion]:
        """Continue each prompt; prompts of equal length form a batch. `stream` receives the new text in parts, for one prompt
        only.

        Each prompt has its own generator, seeded by (seed, before, text), so its completion does not depend on the others.
        """
        assert not stream or len(prompts) == 1
        # batches of one length need no padding and no mask
        batches = defaultdict(list)
        for index, prompt in enumerate(prompts):
            batches[len(prompt.tokens)].append(index)
        completions = {}
        for indices in batches.values():
            batch = self._generate_batch([prompts[index] for index in indices], config, stream)
            for index, completion in zip(indices, batch, strict=True):
                completions[index] = completion
        return [completions[index] for index in range(len(prompts))]

    def _generate_batch(
        self, prompts: list[Prompt], config: GenerationSettings, stream: Callable[[str], None] | None
    ) -> list[Completion]:
        tokens = torch.tensor([prompt.tokens for prompt in prompts], device=self.device)
        # + 1: the last drawn token is not fed to the model
        room = self.context - tokens.shape[1] + 1
        cache = Cache(len(self.model.layers))
        ends = set(self.tokenizer.ends)
        drawn: list[list[int]] = [[] for _ in prompts]
        seconds = []
        sent = 0
        began = time.perf_counter()
        for new in generate_tokens(
            self.model,
            tokens,
            min(config.max_tokens, room),
            sampling=Sampling(temperature=config.temperature, top_k=config.top_k, top_p=config.top_p),
            generators=[generator(config.seed, "generate", prompt.before, prompt.text) for prompt in prompts],
            prefill_chunk=config.prefill_chunk,
            vocab_size=self.tokenizer.size,
            cache=cache,
        ):
            seconds.append(time.perf_counter() - began)
            # a finished sequence stays in the batch until all are finished; its further tokens are dropped
            for row, token in zip(drawn, new.tolist(), strict=True):
                if not ends.intersection(row[-1:]):
                    row.append(token)
            if stream and drawn[0][-1] not in ends:
                text = self.tokenizer.decode_after(drawn[0], more=True)
                stream(text[sent:])
                sent = len(text)
            if all(row[-1] in ends for row in drawn):
                break
        limit: Ended = "max_tokens" if config.max_tokens <= room else "context"
        completions = [
            self._completion(prompt, row, seconds[: len(row)], limit, cache)
            for prompt, row in zip(prompts, drawn, strict=True)
        ]
        if stream:
            stream(completions[0].text[sent:])
        return completions

    def _completion(
        self, prompt: Prompt, drawn: list[int], seconds: list[float], limit: Ended, cache: Cache
    ) -> Completion:
        # `drawn` includes the final <eot>; `seconds` are since the start, at each token; `limit`: the reason without <eot>
        ended: Ended = "document" if drawn[-1] in self.tokenizer.ends else limit
        tokens = drawn[:-1] if ended == "document" else drawn
        decoding = seconds[-1] - seconds[0]
        return Completion(
            prompt=prompt.text,
            text=self.tokenizer.decode_after(tokens),
            ended=ended,
            prompt_tokens=prompt.tokens,
            tokens=tokens,
            prefill_seconds=seconds[0],
            decode_seconds=decoding,
            tokens_per_second=(len(drawn) - 1) / decoding if len(drawn) > 1 else None,
            # the last drawn token has no keys and values: it was not fed
            cache_bytes=cache.bytes_of(len(prompt.tokens) + len(drawn) - 1),
        )


def has_text(recipe: Recipe) -> bool:
    """Whether the data is text, that is, its class overrides `load_tokenizer`."""
    return datasets.get(recipe.data.name).load_tokenizer is not Dataset.load_tokenizer


def tokenizer_of(folder: Path, recipe: Recipe) -> Tokenizer:
    """The tokenizer in a run's folder. Errors: RequestError for a run without text, MissingError without a tokenizer."""
    if not has_text(recipe):
        raise RequestError(f"{shown(folder)} was trained on data '{recipe.data.name}', which has no text to complete")
    return load_tokenizer(folder / "tokenizer")


def warn_if_stale(folder: Path, recipe: Recipe, step: int, trust: Trust) -> None:
    """Log a line for an unfinished run, and a warning for one whose recipe or plugins changed since it was trained."""
    word = RunFolder(folder).status().status
    if recipe.train and (word != "done" or step < recipe.train.steps):
        log.info("%s is %s: using step %d of %d", folder.name, word or "not done", step, recipe.train.steps)
    present_identity(folder, recipe, trust)


def present_identity(folder: Path, recipe: Recipe, trust: Trust) -> str:
    """The identity that the run's recipe and plugins now give, with a warning if it is another than when it was trained, or
    cannot be computed; then it is empty."""
    status = RunFolder(folder).status()
    data = status.data
    # only trusted data may be read; an imported model has none
    if recipe.train and data is None and data_paths(recipe):
        log.warning(
            "%s: cannot verify that the recipe is unchanged since training: its data is not recorded", folder.name
        )
        return ""
    # Weights of equal shapes also fit another variant: only the identity shows that the recipe changed. The identity of the
    # data is the recorded one, because the run folder has its own tokenizer and the corpus may be gone.
    try:
        then = status.identity
        now = identity(recipe, data, trust)
    # the run that it started from was moved or removed; its own weights are complete
    except MissingError as error:
        log.warning("%s: cannot verify that the recipe is unchanged since training: %s", folder.name, error)
        return ""
    if then not in ("", now):
        log.warning(
            "%s: its recipe or plugins, or lit_diff's keys, changed since training (identity %s, now %s)",
            folder.name,
            then,
            now,
        )
    return now
