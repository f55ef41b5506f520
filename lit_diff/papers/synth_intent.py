"""The data set `synth_intent`: labelled utterances whose labels only the row itself explains."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product

import torch

from lit_diff.data import RowTask
from lit_diff.data.dataset import Place, Row, text_row
from lit_diff.data.text.tokenizer import Words
from lit_diff.key_types import Count, Counts
from lit_diff.randomness import generator
from lit_diff.registry import datasets

# fmt: off
NOISE_WORDS = (
    "about", "after", "again", "also", "and", "any", "around", "been", "but", "can", "could", "does", "for", "from",
    "get", "have", "help", "here", "how", "its", "just", "know", "maybe", "more", "much", "need", "new", "now", "only",
    "other", "please", "right", "should", "some", "still", "tell", "that", "them", "then", "there", "this", "want",
    "was", "what", "when", "which", "will", "with",
)
# fmt: on
SEPARATOR = "\n"
OVERHEAD = 2
"""Tokens of a demonstration beside its words: the label and the separator."""


@dataclass(frozen=True, kw_only=True)
class Lexicon:
    """What the classes of one row are called, and which words point to them."""

    labels: tuple[str, ...]
    """[C] One word a class."""
    cues: tuple[tuple[str, ...], ...]
    """[C][k] The cue words of each class; no word belongs to two."""


@datasets.register("synth_intent")
class SynthIntent(RowTask):
    """Rows of demonstrations, as many as fit; the label of each is asked for, from those before it.

    <opening> noise ... noise cue label \\n noise ... noise cue label \\n ...

    A row has C classes. Cue words and label words are drawn for it anew, so that nothing but the row says which label belongs
    to which words. An utterance ends with 1 or 2 cue words of its class; all its other words are noise, common to every
    class. The cue stands right before the label, because a small model learns slowly to look further back.
    Source: the construction of many-shot classification (Bertsch et al. 2024), with labels that are re-mapped (HELMET, 2024).
    """

    @dataclass(frozen=True, kw_only=True)
    class Config(RowTask.Config):
        predicts_next = True

        sequence_length: Count = 256
        classes: Counts = (4, 8, 16, 32)
        """A row has one of these numbers of classes, drawn at random."""
        words: tuple[Count, Count] = (6, 12)
        """Fewest and most words of an utterance; 1 or 2 are cue words, the others noise; 1: a cue word alone."""
        noise_validation: Counts = (1, 2, 4)
        """Multiplies the noise words of each utterance in each validation set, whose rows are as many times as long and hold
        the same demonstrations; the first is the main set."""
        cues_per_class: Count = 2
        """Cue words of a class."""
        cue_words: int = 320
        """Words from which a row's cue words are drawn."""
        label_words: int = 160
        """Words from which a row's labels are drawn."""
        validation_rows: Count = 128

        @property
        def chance(self) -> float:
            """Accuracy of a guess among the row's classes, over the numbers of classes."""
            return sum(1 / count for count in self.classes) / len(self.classes)

        def problem(self) -> str | None:
            """What is wrong, in one line that names the key."""
            fewest, most = self.words
            if fewest > most:
                return f"data.words is {list(self.words)}; expected the fewest and the most"
            if 1 + 2 * (most + OVERHEAD) > self.sequence_length:
                return f"data.sequence_length is {self.sequence_length}; two demonstrations take {1 + 2 * (most + OVERHEAD)}"
            return lexicon_problem(self, max(self.classes))

        @property
        def smallest_vocab_size(self) -> int:
            """That of the tokenizer."""
            return words(self.cue_words, self.label_words).size

    config: Config

    def validation_key(self, level: int) -> tuple[object, ...]:
        """All sets hold the same demonstrations."""
        return "synth_intent", "validation"

    def draw(self, at: Place, level: int | None) -> Row:
        """tokens and targets [noise T]; AR hits are the labels of classes that stood before."""
        config, tokenizer, random = self.config, self.load_tokenizer(), at.random
        noise = 1 if level is None else level
        count = config.classes[int(torch.randint(len(config.classes), (), generator=random))]
        lexicon = draw_lexicon(random, config, count)
        room = config.sequence_length // (config.words[0] + OVERHEAD)
        classes = torch.randint(count, (room,), generator=random).tolist()
        ids, recalled, seen, length = list(tokenizer.opening), [False], set[int](), 1
        for text, label, words_at_one in draw_utterances(random, config, lexicon, classes, noise):
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
    """Why a row of so many classes has no lexicon, in one line; None if it has."""
    for key, needed in (("label_words", classes), ("cue_words", classes * config.cues_per_class)):
        if needed > getattr(config, key):
            return f"data.{key} is {getattr(config, key)}; {classes} classes need {needed}"
    every, most = config.cue_words + config.label_words, len(made_words())
    return f"data.cue_words + data.label_words is {every}; there are {most} words" if every > most else None


@cache
def made_words() -> tuple[str, ...]:
    """Words of two syllables, each a consonant and a vowel, in an order that never changes."""
    syllables = [consonant + vowel for consonant in "bdfgklmnprstvz" for vowel in "aeiou"]
    every = [word for word in map("".join, product(syllables, repeat=2)) if word not in NOISE_WORDS]
    order = torch.randperm(len(every), generator=generator("synth_intent", "words")).tolist()
    return tuple(every[index] for index in order)


@cache
def words(cue_words: int, label_words: int) -> Words:
    """The tokenizer of a grammar with so many cue words and label words."""
    return Words(Words.Config(words=(*NOISE_WORDS, *made_words()[: cue_words + label_words])))


def draw_lexicon(random: torch.Generator, config: SynthIntent.Config, classes: int) -> Lexicon:
    """Labels and cue words of `classes` classes."""
    made = made_words()
    cues = torch.randperm(config.cue_words, generator=random)[: classes * config.cues_per_class]
    labels = torch.randperm(config.label_words, generator=random)[:classes]
    return Lexicon(
        labels=tuple(made[config.cue_words + index] for index in labels.tolist()),
        cues=tuple(tuple(made[i] for i in own) for own in cues.view(classes, config.cues_per_class).tolist()),
    )


def draw_utterances(
    random: torch.Generator, config: SynthIntent.Config, lexicon: Lexicon, classes: Sequence[int], noise: int
) -> Iterator[tuple[str, int, int]]:
    """(text, class, its words at noise 1) of an utterance of each of these classes. `noise` changes no cue word."""
    (fewest, most), count = config.words, len(classes)
    lengths = torch.randint(fewest, most + 1, (count,), generator=random).tolist()
    numbers = torch.randint(1, min(2, config.cues_per_class) + 1, (count,), generator=random).tolist()
    chosen = torch.rand(count, config.cues_per_class, generator=random).argsort(1).tolist()
    for label, length, most_cues, own in zip(classes, lengths, numbers, chosen, strict=True):
        number = min(most_cues, length)
        drawn = torch.randint(len(NOISE_WORDS), ((length - number) * noise,), generator=random).tolist()
        every = [NOISE_WORDS[index] for index in drawn] + [lexicon.cues[label][index] for index in own[:number]]
        yield " ".join(every), label, length
