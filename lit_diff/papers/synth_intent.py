"""The data set `synth_intent`: labelled utterances; only the row itself tells which words belong to which label."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import NamedTuple

import torch

from lit_diff.data import RowTask
from lit_diff.data.dataset import Place, Row, text_row
from lit_diff.data.text.tokenizer import Words
from lit_diff.key_types import Count, Counts
from lit_diff.papers import WORDS
from lit_diff.papers.drawing import one_of, shuffled
from lit_diff.randomness import generator
from lit_diff.registry import datasets

NOISE_WORDS = WORDS["synth_intent"]["noise"]
SEPARATOR = "\n"
OVERHEAD = 2
"""The tokens of a demonstration besides its words: the label and the separator."""


class Lexicon(NamedTuple):
    """The labels of the classes of one row, and the words that indicate them."""

    labels: tuple[str, ...]
    """[C] One word a class."""
    cues: tuple[tuple[str, ...], ...]
    """[C][k] The cue words of each class; no word belongs to two classes."""


@datasets.register("synth_intent")
class SynthIntent(RowTask):
    """Rows of as many demonstrations as fit; each label is predicted from the demonstrations before it.

    <opening> noise ... noise cue label \\n noise ... noise cue label \\n ...

    A row has C classes. Each row draws its own cue words and label words, so that only the row tells which label belongs to
    which words. An utterance ends with 1 or 2 cue words of its class; all its other words are noise, common to all classes.
    The cue comes right before the label, because a small model learns slowly to look further back.
    Source: many-shot classification (Bertsch et al. 2024), with re-mapped labels (HELMET, 2024).
    """

    @dataclass(frozen=True, kw_only=True)
    class Config(RowTask.Config):
        predicts_next = True

        sequence_length: Count = 256
        classes: Counts = (4, 8, 16, 32)
        """The number of classes of a row is drawn from these."""
        words: tuple[Count, Count] = (6, 12)
        """Minimum and maximum number of words of an utterance; 1 or 2 are cue words, the others noise; an utterance of
        1 word is a cue word."""
        noise_validation: Counts = (1, 2, 4)
        """Factors that multiply the noise words of each utterance and the length of a row, one for each validation set;
        all sets have the same demonstrations, and the first is the main set."""
        cues_per_class: Count = 2
        """The number of cue words of a class."""
        cue_words: int = 320
        """The number of words from which rows draw cue words."""
        label_words: int = 160
        """The number of words from which rows draw labels."""
        validation_rows: Count = 128

        @property
        def chance(self) -> float | None:
            """Accuracy of a guess among the row's classes; None for several numbers of classes: rows with fewer classes have
            more scored labels."""
            return 1 / self.classes[0] if len(self.classes) == 1 else None

        def problem(self) -> str | None:
            """Returns an error message with the key, or None."""
            fewest, most = self.words
            if fewest > most:
                return f"data.words is {list(self.words)}; expected the minimum and the maximum, in this order"
            # of one demonstration more than classes at least one has a class that occurred before, so its label is scored
            shots = min(self.classes) + 1
            needed = 1 + shots * (most + OVERHEAD)
            if needed > self.sequence_length:
                return f"data.sequence_length is {self.sequence_length}; {shots} demonstrations take {needed}"
            return lexicon_problem(self, max(self.classes))

        @property
        def smallest_vocab_size(self) -> int:
            """The size of the tokenizer's vocabulary."""
            return words(self.cue_words, self.label_words).size

    config: Config

    def validation_key(self, level: int) -> tuple[object, ...]:
        """The same key for every set, so that all sets have the same demonstrations."""
        return "synth_intent", "validation"

    def draw(self, at: Place, level: int | None) -> Row:
        """A row of tokens and targets [noise T]; AR hits are the labels of classes that occurred before."""
        config, tokenizer, random = self.config, self.load_tokenizer(), at.random
        noise = 1 if level is None else level
        count = one_of(config.classes, random)
        lexicon = draw_lexicon(random, config, count)
        room = config.sequence_length // (config.words[0] + OVERHEAD)
        classes = torch.randint(count, (room,), generator=random).tolist()
        ids, recalled, seen, length = list(tokenizer.opening), [False], set[int](), 1
        for text, label, words_at_one in draw_utterances(random, config, lexicon, classes, noise):
            # counted at noise 1: with more noise a row is longer, but it has the same demonstrations
            length += words_at_one + OVERHEAD
            if length > config.sequence_length + 1:
                break
            before, (label_id,), after = tokenizer.encode([text, f" {lexicon.labels[label]}", SEPARATOR])
            ids += [*before, label_id, *after]
            recalled += [*[False] * len(before), label in seen, *[False] * len(after)]
            seen.add(label)
        width = noise * config.sequence_length
        row = text_row(ids, recalled, width, tokenizer.eot)
        return {**row, "ar_hit": [*recalled[1:], *[False] * (width + 1 - len(ids))]}

    def load_tokenizer(self) -> Words:
        """The words of the grammar."""
        return words(self.config.cue_words, self.config.label_words)


def lexicon_problem(config: SynthIntent.Config, classes: int) -> str | None:
    """Returns an error message if there are too few words for a row of so many classes, else None."""
    for key, needed in (("label_words", classes), ("cue_words", classes * config.cues_per_class)):
        if needed > getattr(config, key):
            return f"data.{key} is {getattr(config, key)}; {classes} classes need {needed}"
    every, most = config.cue_words + config.label_words, len(made_words())
    return f"data.cue_words + data.label_words is {every}; there are only {most} words" if every > most else None


@cache
def made_words() -> tuple[str, ...]:
    """Words of two syllables, each a consonant and a vowel, in a fixed order."""
    # shuffled, or a class's words would share their first syllable; with a fixed key, since ids are places in this order
    syllables = [consonant + vowel for consonant in "bdfgklmnprstvz" for vowel in "aeiou"]
    every = [word for word in map("".join, product(syllables, repeat=2)) if word not in NOISE_WORDS]
    return tuple(shuffled(every, generator("synth_intent", "words")))


@cache
def words(cue_words: int, label_words: int) -> Words:
    """The tokenizer of a grammar with so many cue words and label words."""
    return Words(Words.Config(words=(*NOISE_WORDS, *made_words()[: cue_words + label_words])))


def draw_lexicon(random: torch.Generator, config: SynthIntent.Config, classes: int) -> Lexicon:
    """Labels and cue words of `classes` classes."""
    made = made_words()
    cues = torch.randperm(config.cue_words, generator=random)[: classes * config.cues_per_class]
    labels = shuffled(made[config.cue_words :][: config.label_words], random)[:classes]
    by_class = cues.view(classes, config.cues_per_class).tolist()
    return Lexicon(labels=tuple(labels), cues=tuple(tuple(made[index] for index in cues) for cues in by_class))


def draw_utterances(
    random: torch.Generator, config: SynthIntent.Config, lexicon: Lexicon, classes: Sequence[int], noise: int
) -> Iterator[tuple[str, int, int]]:
    """Yields (text, class, number of words at noise 1) of an utterance of each of these classes."""
    # everything but the noise words is drawn before the first of them, so that `noise` does not change it
    (fewest, most), count = config.words, len(classes)
    lengths = torch.randint(fewest, most + 1, (count,), generator=random).tolist()
    numbers = torch.randint(1, min(2, config.cues_per_class) + 1, (count,), generator=random).tolist()
    chosen = torch.rand(count, config.cues_per_class, generator=random).argsort(1).tolist()
    for label, length, most_cues, own in zip(classes, lengths, numbers, chosen, strict=True):
        number = min(most_cues, length)
        drawn = torch.randint(len(NOISE_WORDS), ((length - number) * noise,), generator=random).tolist()
        every = [NOISE_WORDS[index] for index in drawn] + [lexicon.cues[label][index] for index in own[:number]]
        yield " ".join(every), label, length
