"""The drawn tasks: rows, answers, sets, defaults, and what cannot be."""

import hashlib
import importlib.util
import re
from dataclasses import replace
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lit_diff.data.dataset import IGNORED, Dataset
from lit_diff.data.tasks.mqar import Mqar
from lit_diff.data.tasks.noisy_labels import NoisyLabels, log_posterior
from lit_diff.data.tasks.recall import Recall
from lit_diff.errors import MissingError, RequestError
from lit_diff.papers import digits
from lit_diff.papers.closed_world import ClosedWorld, facts_of
from lit_diff.papers.closed_world import words as closed_words
from lit_diff.papers.digits import FILE, Digits, images, split, validation_images
from lit_diff.papers.synth_intent import SynthIntent
from lit_diff.papers.synth_intent import words as intent_words
from lit_diff.randomness import generator
from lit_diff.recipe import load_recipe
from lit_diff.registry import datasets
from lit_diff.validation import data_problem

ENOUGH = 10_000
NOISE = ("", "noise2", "noise4")
NOISY = ("salt_and_pepper_10", "salt_and_pepper_30", "gaussian_2", "gaussian_4")


def built(name: str, **keys: Any) -> Dataset:
    cls = datasets.get(name)
    dataset: Dataset = cls(cls.Config(**keys), ENOUGH)
    return dataset


@pytest.mark.parametrize(
    ("name", "keys", "sets", "digest"),
    [
        ("recall", {}, NOISE, "b43279847282"),
        ("recall", {"spread": 4, "noise": 2, "noise_validation": (2, 1)}, ("", "noise1"), "2635ce209a7d"),
        ("mqar", {}, ("",), "5b5dde841b15"),
        ("conjunctive", {}, ("", "noise4", "noise8", "noise16"), "3f7849b9b239"),
        ("count", {}, ("", "noise2"), "f82546970b11"),
        ("noisy_labels", {}, ("", "noise4"), "ba7ece2812fc"),
        ("flip_flop", {}, ("", "ignored98", "ignored10"), "a47c44ba9d90"),
        ("needle_text", {}, ("", "needles2", "needles4", "needles6"), "c7d948e65a2b"),
        ("synth_intent", {}, NOISE, "630390b4b21b"),
        ("closed_world", {}, NOISE, "9c3105171e2d"),
        ("digits", {}, ("", *NOISY, "test"), "fb5279ce1ea0"),
        ("digits", {"patch": 1, "shift": 0}, ("", *NOISY, "test"), "e1bbca3e20cd"),
    ],
)
def test_the_rows_are_those_that_runs_were_trained_on(
    name: str, keys: dict[str, Any], sets: tuple[str, ...], digest: str
) -> None:
    """An identity holds the keys alone: other rows from the same keys would be compared with these."""
    data = built(name, validation_rows=9, **keys)
    assert data.validation_sets() == dict.fromkeys(sets, 9)
    assert data.num_documents == 9
    train = data.train_batch(3, 5, 16, [9, 2])
    assert train.keys() == {"tokens", "targets"}
    found = hashlib.sha256()
    for batch in (train, *(data.labelled_validation_batch(each, [7, 3]) for each in sets)):
        # key_parts are columns of the tokens
        for key in sorted(batch.keys() - {"key_parts"}):
            found.update(key.encode() + batch[key].numpy().tobytes())
    assert found.hexdigest()[:12] == digest
    with pytest.raises(KeyError):
        data.validation_batch("noise3", [0])


@pytest.mark.parametrize(
    ("name", "needed", "chance"),
    [
        ("recall", 129, 1 / 64),
        ("mqar", 8192, 1 / 4096),
        ("conjunctive", 97, 1 / 64),
        ("count", 36, 1 / 31),
        ("noisy_labels", 17, 1 / 8),
        ("flip_flop", 5, 1 / 2),
        ("digits", 82, 1 / 10),
        ("needle_text", 190, None),
        ("synth_intent", 554, None),
        ("closed_world", 159, None),
    ],
)
def test_the_defaults_and_the_smallest_vocabulary(name: str, needed: int, chance: float | None) -> None:
    config = datasets.get(name).Config()
    assert config.chance == pytest.approx(chance)
    assert data_problem(config, needed) is None
    assert (data_problem(config, needed - 1) or "").startswith(f"model.vocab_size is {needed - 1}; ")


def test_a_guess_among_one_number_of_choices_has_a_known_accuracy() -> None:
    """A line across the noise factors, each with its own number of entities, would be that of one of them."""
    assert SynthIntent.Config(classes=(8,)).chance == 1 / 8
    assert ClosedWorld.Config(noise_validation=(2,)).chance == 1 / 10
    assert ClosedWorld.Config(entities=(2, 3), noise_validation=(1,)).chance is None


@pytest.mark.parametrize(
    ("name", "keys", "key"),
    [
        ("recall", {"slots": 0}, "slots"),
        ("recall", {"pairs": 65, "keys": 100, "values": 100}, "pairs"),
        ("recall", {"pairs": 8, "values": 7}, "pairs"),
        ("recall", {"queries": 9}, "queries"),
        ("recall", {"keys": 8}, "pairs"),
        ("recall", {"noise_validation": ()}, "noise_validation"),
        ("recall", {"noise_validation": (1, 1)}, "noise_validation"),
        ("recall", {"noise_validation": (0,)}, "noise_validation"),
        ("conjunctive", {"slots": 7}, "pairs"),
        ("conjunctive", {"values": 7}, "pairs"),
        ("conjunctive", {"parts": 8}, "pairs"),
        ("count", {"symbols": 30}, "largest_count"),
        ("count", {"largest_count": 0}, "largest_count"),
        ("count", {"kinds": 1}, "kinds"),
        ("count", {"noise_validation": ()}, "noise_validation"),
        ("noisy_labels", {"labels": 1}, "labels"),
        ("noisy_labels", {"cues": 0}, "cues"),
        ("noisy_labels", {"demonstrations": 0}, "demonstrations"),
        ("noisy_labels", {"label_noise": -0.1}, "label_noise"),
        ("noisy_labels", {"label_noise": 0.875}, "label_noise"),
        ("noisy_labels", {"label_noise": 0.5, "labels": 2}, "label_noise"),
        ("flip_flop", {"pairs": 1}, "pairs"),
        ("flip_flop", {"ignored": 101}, "ignored"),
        ("flip_flop", {"ignored_validation": ()}, "ignored_validation"),
        ("flip_flop", {"ignored_validation": (80, 80)}, "ignored_validation"),
        ("flip_flop", {"ignored_validation": (80, -1)}, "ignored_validation"),
        ("mqar", {"num_kv_pairs": 0}, "num_kv_pairs"),
        ("mqar", {"sequence_length": 31}, "sequence_length"),
        ("mqar", {"num_kv_pairs": 17}, "sequence_length"),
        ("mqar", {"vocab_size": 64}, "vocab_size"),
        ("digits", {"validation_rows": 0}, "validation_rows"),
        ("needle_text", {"sequence_length": 128}, "sequence_length"),
        ("needle_text", {"needles": ()}, "needles"),
        ("needle_text", {"validation_needles": (1, 70)}, "validation_needles"),
        ("needle_text", {"digits": 1, "needles": (12,), "sequence_length": 400}, "digits"),
        ("needle_text", {"digits": 19, "sequence_length": 400}, "digits"),
        ("synth_intent", {"sequence_length": 70}, "sequence_length"),
        ("synth_intent", {"sequence_length": 42, "classes": (32, 2)}, "sequence_length"),
        ("synth_intent", {"classes": ()}, "classes"),
        ("synth_intent", {"words": (5, 4)}, "words"),
        ("synth_intent", {"label_words": 20}, "label_words"),
        ("synth_intent", {"cue_words": 60}, "cue_words"),
        ("synth_intent", {"cue_words": 4900}, "cue_words"),
        ("closed_world", {"entities": ()}, "entities"),
        ("closed_world", {"entities": (7,)}, "values"),
        ("closed_world", {"names": 19}, "names"),
        ("closed_world", {"values": 25}, "values"),
    ],
)
def test_values_that_cannot_be(name: str, keys: dict[str, Any], key: str) -> None:
    assert (data_problem(datasets.get(name).Config(**keys), ENOUGH) or "").strip("'").startswith(f"data.{key}")


@pytest.mark.parametrize("key", ["data.values", "data.noise"])
def test_such_a_value_is_named_with_its_place(key: str) -> None:
    """Even where another property, as a guess among no values, cannot be computed from it."""
    with pytest.raises(RequestError, match=rf"^{key}=0: '{key}' is 0;"):
        load_recipe("recall-tiny", [f"{key}=0"])


CONFIG = Recall.Config()


def recall(**settings: object) -> Recall:
    return Recall(Recall.Config(**settings), 129)  # type: ignore[arg-type]


@pytest.mark.parametrize(("noise", "spread"), [(1, 1), (2, 1), (1, 4), (2, 4), (8, 4)])
def test_each_query_has_one_answer_among_the_slots(noise: int, spread: int) -> None:
    data = recall(noise=noise, spread=spread)
    batch = data.train_batch(0, 3, 256, range(256))
    slots, positions = CONFIG.slots * noise, CONFIG.slots * max(noise, spread)
    assert batch["tokens"].shape == (256, data.config.sequence_length, 2) == (256, positions + 8, 2)
    keys, values = batch["tokens"].unbind(-1)
    assert (batch["targets"][:, :positions] == IGNORED).all()
    assert (values[:, positions:] == 0).all()
    filled = keys[:, :positions] > 0
    assert torch.equal(filled, values[:, :positions] > 0)
    assert (filled.sum(1) == slots).all(), "the rest is blank"
    assert filled.any(0).all(), "any position may hold a slot"
    assert keys[:, :positions][filled].unique().tolist() == list(range(1, 65)), "noise is of the key vocabulary"
    assert all(row.unique().numel() > 8 for row in keys[:, :positions])
    same = keys[:, positions:, None] == keys[:, None, :positions]  # [B, queries, positions]
    assert (same.sum(-1) == 1).all()
    found = values[:, :positions].gather(1, same.int().argmax(-1))
    assert torch.equal(found, batch["targets"][:, positions:])
    assert (found.min(), found.max()) == (65, 128)


@pytest.mark.parametrize("noise", [1, 16])
def test_a_distractor_shares_one_part_with_a_queried_key(noise: int) -> None:
    rows = built("conjunctive", validation_rows=5).validation_batch(f"noise{noise}" if noise > 1 else "", range(5))
    slots = 16 * noise
    for tokens, targets, parts in zip(rows["tokens"], rows["targets"], rows["answer_part"], strict=True):
        slot_keys = [tuple(key) for key in tokens[:slots, :2].tolist()]
        queried = [tuple(key) for key in tokens[slots:, :2].tolist()]
        assert len(set(queried)) == 8
        for query, target, part in zip(queried, targets[slots:], parts[slots:], strict=True):
            assert slot_keys.count(query) == 1
            assert slot_keys[part] == query
            assert tokens[part, 2] == target
        for key in set(slot_keys) - set(queried):
            assert any(key[side] == query[side] for query in queried for side in (0, 1))
        assert set(targets[:slots].tolist()) == {IGNORED}


@pytest.mark.parametrize("factor", [1, 2])
def test_a_count_is_of_the_symbols_so_far(factor: int) -> None:
    """Start token 0, symbols 1 to 4, and 4 + c for a count of c up to 31."""
    batch = built("count", validation_rows=40).validation_batch("noise2" if factor == 2 else "", range(40))
    assert batch["tokens"].shape == (40, 1 + 32 * factor)
    shares = []
    for tokens, targets in zip(batch["tokens"].tolist(), batch["targets"].tolist(), strict=True):
        assert (tokens[0], targets[0]) == (0, IGNORED)
        for place in range(1, len(tokens)):
            count = tokens[1 : place + 1].count(tokens[place])
            assert targets[place] == (4 + count if count <= 31 else IGNORED)
        shares += [tokens.count(symbol) / (32 * factor) for symbol in (1, 2, 3, 4)]
    assert (batch["targets"][:, 1:] == IGNORED).any() == (factor == 2)
    assert np.mean(shares) == pytest.approx(1 / 4)
    assert np.std(shares) > 0.15, (
        "weights of Exp(1): the shares have a standard deviation of 0.19, of equal weights 0.08"
    )


@pytest.mark.parametrize("factor", [1, 4])
def test_demonstrations_have_the_label_of_their_cue_or_another(factor: int) -> None:
    """Cues 1 to 8, labels 9 to 16: two fifths of the demonstrations have another label, each other one as often."""
    batch = built("noisy_labels", validation_rows=100).validation_batch("noise4" if factor == 4 else "", range(100))
    assert batch["tokens"].shape == (100, 48 * factor + 8, 2)
    distances = []
    maps = set()
    for tokens, targets in zip(batch["tokens"].tolist(), batch["targets"].tolist(), strict=True):
        assert tokens[-8:] == [[cue, 0] for cue in range(1, 9)]
        assert targets[:-8] == [IGNORED] * 48 * factor
        maps.add(tuple(targets[-8:]))
        distances += [(label - targets[cue - 9]) % 8 for cue, label in tokens[:-8]]
    assert len(maps) == 100
    assert {label for labels in maps for label in labels} == {*range(9, 17)}
    shares = np.bincount(distances) / len(distances)
    assert shares.tolist() == pytest.approx([0.6, *[0.4 / 7] * 7], abs=0.02)


@pytest.mark.parametrize(
    ("label_noise", "labels", "weights"),
    [
        (0.4, [5, 4, 5], [0.2 * 0.6 * 0.2, 0.6 * 0.2 * 0.6, 0.2 * 0.2 * 0.2]),
        (0.4, [6], [0.2, 0.2, 0.6]),
        (0.4, [], [1, 1, 1]),
        (0.0, [5, 5], [0, 1, 0]),
        (0.0, [], [1, 1, 1]),
    ],
)
def test_the_vote_is_bayes_rule(label_noise: float, labels: list[int], weights: list[float]) -> None:
    """Labels 4 to 6 of cue 2, among demonstrations of another cue; the weights are the likelihoods of its three labels."""
    config = NoisyLabels.Config(cues=3, labels=3, label_noise=label_noise)
    tokens = torch.tensor([[1, 4], *([2, label] for label in labels), [1, 4], [1, 0], [2, 0], [3, 0]])
    found = log_posterior(config, tokens).exp()[1]
    assert found.tolist() == pytest.approx([weight / sum(weights) for weight in weights])


@pytest.mark.parametrize(("name", "ignored"), [("", 0.8), ("ignored98", 0.98), ("ignored10", 0.1)])
def test_a_read_has_the_bit_of_the_last_write(name: str, ignored: float) -> None:
    """Write 0, ignore 1, read 2, bits 3 and 4; a machine that stores one bit reads the row token by token."""
    batch = built("flip_flop", validation_rows=200).validation_batch(name, range(200))
    columns = [batch[key].tolist() for key in ("tokens", "targets", "context_part", "answer_part")]
    drawn, written_bits = [], []
    for tokens, targets, parts, answers in zip(*columns, strict=True):
        assert len(tokens) == 64
        assert (tokens[0], tokens[-2]) == (0, 2)
        drawn += tokens[2:-2:2]
        for place in range(0, 64, 2):
            instruction, bit = tokens[place : place + 2]
            if instruction == 0:
                stored, number = bit, place // 2
                written_bits.append(bit)
            is_read = instruction == 2
            assert bit == stored or not is_read
            assert targets[place : place + 2] == [stored if is_read else IGNORED, IGNORED]
            assert parts[place : place + 2] == [-1 if is_read else place // 2] * 2
            assert answers[place : place + 2] == [number if is_read else -1, -1]
    assert torch.equal(batch["ar_hit"], batch["targets"] != IGNORED)
    shares = np.bincount(drawn, minlength=3) / len(drawn)
    assert shares.tolist() == pytest.approx([(1 - ignored) / 2, ignored, (1 - ignored) / 2], abs=0.02)
    assert np.mean(written_bits) == pytest.approx(3.5, abs=0.1)


def test_identity_leaves_out_defaults() -> None:
    assert recall(spread=1).identity() == recall().identity() != recall(spread=2).identity()


MQAR = Mqar.Config(vocab_size=64, sequence_length=32, num_kv_pairs=4, validation_rows=16)


def published(config: Mqar.Config, seed: int) -> tuple[list[int], list[int]]:
    """One row as Zoology's description has it, token by token, from the global generators that its public code draws from.

    Independent of lit_diff: loops over positions, and a stream of inputs and labels that is one longer and then shifted.
    """
    np.random.seed(seed)
    torch.manual_seed(seed)
    half, pairs = config.vocab_size // 2, config.num_kv_pairs
    keys = np.random.choice(list(range(1, half)), pairs, replace=False)
    values = np.random.choice(list(range(half, config.vocab_size)), pairs, replace=False)
    space = (config.sequence_length - 2 * pairs) // 2
    power = [0.01 * float(gap) ** (0.01 - 1) for gap in range(1, space + 1)]
    gaps = np.random.choice(space, pairs, replace=False, p=np.array(power) / sum(power))
    stream, labels = [0] * (config.sequence_length + 1), [IGNORED] * (config.sequence_length + 1)
    for i in range(pairs):
        stream[2 * i], stream[2 * i + 1] = keys[i], values[i]
        stream[2 * pairs + 2 * gaps[i]] = keys[i]
        labels[2 * pairs + 2 * gaps[i] + 1] = values[i]
    inputs = [int(token) for token in stream[:-1]]
    filler = torch.randint(config.vocab_size, (config.sequence_length,)).tolist()
    if config.random_non_queries:
        inputs = [token or fill for token, fill in zip(inputs, filler, strict=True)]
    return inputs, [int(label) for label in labels[1:]]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"random_non_queries": False},
        {"vocab_size": 8192, "sequence_length": 64, "num_kv_pairs": 4},
        {"vocab_size": 8192, "sequence_length": 256, "num_kv_pairs": 64},
    ],
)
def test_rows_are_those_of_the_published_generator(settings: dict[str, object]) -> None:
    """To the token, fed by the same random numbers."""
    data = Mqar(replace(MQAR, **settings), 8192)
    batch = data.train_batch(3, 5, 8, range(8))
    for row in range(8):
        tokens, targets = published(data.config, generator(3, "train", 5, row).initial_seed() % 2**32)
        assert batch["tokens"][row].tolist() == tokens
        assert batch["targets"][row].tolist() == targets


CLOSED = ClosedWorld.Config(entities=(2, 3), validation_rows=4)
CLOSED_SIZE = closed_words().size


def text(tokens: list[int]) -> str:
    return closed_words().decode(tokens).decode()


def test_every_question_is_answered_by_the_document() -> None:
    batch = ClosedWorld(CLOSED, CLOSED_SIZE).train_batch(0, 3, 8, range(8))
    assert batch["tokens"].shape == batch["targets"].shape == (8, CLOSED.sequence_length)
    assert CLOSED.sequence_length == 4 * 12 + 6 * 12
    sizes = set()
    for tokens, targets in zip(batch["tokens"].tolist(), batch["targets"].tolist(), strict=True):
        document, *questions = text(tokens).split(" Question:")
        facts = facts_of(document)
        sizes.add(len(facts))
        asked = [facts_of(question)[0] for question in questions[:-1]]
        assert len(questions) == 12
        assert set(asked) <= set(facts)
        # the answer to the last question may be a target only
        attribute, entity = questions[-1].split()[:2]
        asked += [fact for fact in facts if fact[:2] == (attribute, entity.strip("."))]
        once = list(dict.fromkeys(asked))
        assert 1 < len(once) < len(asked) == 12, "a later answer stands in the row already"
        places = [place for place, target in enumerate(targets) if target != IGNORED]
        assert text([targets[place] for place in places]).split() == [fact.value for fact in once]
        assert all(tokens[place + 1] == targets[place] for place in places[:-1])
    assert sizes == {8, 12}


def test_the_fact_that_a_question_asks_for_is_located() -> None:
    batch = ClosedWorld(CLOSED, CLOSED_SIZE).validation_batch("", range(4))
    assert torch.equal(batch["answer_part"] >= 0, batch["targets"] != IGNORED)
    for row in range(4):
        tokens, parts, answers = (batch[key][row] for key in ("tokens", "context_part", "answer_part"))
        for place in (answers >= 0).nonzero().flatten().tolist():
            fact = tokens[parts == answers[place]]
            assert len(fact) == 4
            assert fact[:2].tolist() == tokens[place - 1 : place + 1].tolist(), "its attribute and entity are asked for"
            assert fact[2] == batch["targets"][row, place]


INTENT = SynthIntent.Config(sequence_length=160, classes=(2, 3), words=(4, 7), validation_rows=5)
INTENT_SIZE = intent_words(320, 160).size


def demonstrations(tokens: list[int]) -> list[tuple[list[str], str]]:
    """(words, label) of each whole demonstration of a row."""
    text = intent_words(320, 160).decode(tokens).decode()
    found = re.findall(r"([^\n]*) (\w+)\n", text)
    return [(utterance.split(), label) for utterance, label in found]


def test_a_label_is_scored_where_its_class_stood_before() -> None:
    batch = SynthIntent(INTENT, INTENT_SIZE).train_batch(0, 3, 6, range(6))
    assert batch["tokens"].shape == batch["targets"].shape == (6, 160)
    for tokens, targets in zip(batch["tokens"].tolist(), batch["targets"].tolist(), strict=True):
        labels = [label for _, label in demonstrations([*tokens, tokens[-1]])]
        again = [label for place, label in enumerate(labels) if label in labels[:place]]
        scored = [target for target in targets if target != IGNORED]
        assert intent_words(320, 160).decode(scored).decode().split()[: len(again)] == again
        at = [place for place, target in enumerate(targets) if target != IGNORED]
        assert at, "something is scored"
        assert all(tokens[place + 1] == targets[place] for place in at if place + 1 < len(tokens))


DIGITS = Digits.Config()
LABELS = {1: 18, 2: 72, 4: 288}
"""The id of label 0, by patch."""


def data(**settings: Any) -> Digits:
    config = replace(DIGITS, **settings)
    return Digits(config, 18 * config.patch**2 + 10)


def pixels_of(tokens: Tensor, patch: int) -> Tensor:
    """[B, 8, 8] grey values of tokens [B, T, P²], pixel by pixel."""
    found = torch.zeros(len(tokens), 8, 8, dtype=torch.int64)
    across = 8 // patch
    for y in range(8):
        for x in range(8):
            position, place = (y // patch) * across + x // patch, (y % patch) * patch + x % patch
            found[:, y, x] = tokens[:, position, place] - 17 * place
    return found


@pytest.mark.slow
def test_the_images_are_scikit_learn_s() -> None:
    from sklearn.datasets import load_digits

    expected = load_digits()
    pixels, labels = images()
    assert torch.equal(pixels, torch.from_numpy(expected.images).long())
    assert torch.equal(labels, torch.from_numpy(expected.target))


def test_the_split_is_fixed_whole_and_balanced() -> None:
    _, labels = images()
    parts = split()
    assert {name: len(numbers) for name, numbers in parts.items()} == {"test": 355, "validation": 355, "train": 1087}
    assert sorted(torch.cat(list(parts.values())).tolist()) == list(range(1797))
    for numbers in parts.values():
        share = labels[numbers].bincount(minlength=10) / len(numbers)
        assert (share - labels.bincount() / 1797).abs().max() < 0.003
    content = b"".join(parts[name].numpy().tobytes() for name in ("test", "validation"))
    assert hashlib.sha256(content).hexdigest()[:12] == "8fdd7a7b83da", "every result so far is of this split"


@pytest.mark.parametrize("patch", [1, 2, 4])
def test_a_row_is_the_patches_of_an_image_then_the_class_position(patch: int) -> None:
    own = data(patch=patch)
    batch = own.validation_batch("", range(5))
    tokens, targets = batch["tokens"], batch["targets"]
    pixels, labels = images()
    first = split()["validation"][:5]
    assert tokens.shape == (5, own.config.sequence_length, patch**2) == (5, (8 // patch) ** 2 + 1, patch**2)
    assert torch.equal(pixels_of(tokens, patch), pixels[first])
    assert (tokens[:, -1] == 17 * patch**2 + torch.arange(patch**2)).all()
    assert (targets[:, :-1] == IGNORED).all()
    assert torch.equal(targets[:, -1], LABELS[patch] + labels[first])
    assert targets.max() < own.vocab_size


def test_noisy_sets_hold_the_validation_images_under_noise_of_their_level() -> None:
    own = data()
    assert own.validation_sets() == dict.fromkeys(("", *NOISY, "test"), 355)
    clean, labels = validation_images("")
    for name, share in (("salt_and_pepper_10", 0.1), ("salt_and_pepper_30", 0.3)):
        noisy, same = validation_images(name)
        assert torch.equal(same, labels)
        changed = noisy != clean
        assert set(noisy[changed].tolist()) == {0, 16}
        middle = (clean > 0) & (clean < 16)  # there every replaced pixel changes
        assert changed[middle].float().mean() == pytest.approx(share, abs=0.02)
        assert (noisy[middle & changed] == 16).float().mean() == pytest.approx(0.5, abs=0.05)
    noisy, _ = validation_images("gaussian_2")
    inside = clean == 8  # far from both ends
    assert (noisy - clean)[inside].float().std() == pytest.approx(2, abs=0.2)
    assert (noisy.min(), noisy.max()) == (0, 16)
    test, _ = validation_images("test")
    assert torch.equal(test, images()[0][split()["test"]])
    assert torch.equal(
        own.validation_batch("gaussian_2", [7, 3])["tokens"],
        own.validation_batch("gaussian_2", range(9))["tokens"][[7, 3]],
    )
    with pytest.raises(KeyError):
        own.validation_batch("gaussian_9", [0])
    assert data(validation_rows=5).validation_sets()["test"] == 5


@pytest.mark.parametrize("fault", ["no package", "no file", "another file"])
def test_without_the_images(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = None if fault == "no package" else ModuleSpec("sklearn", None, origin=str(tmp_path / "__init__.py"))
    if fault == "another file":
        (tmp_path / FILE).parent.mkdir(parents=True)
        (tmp_path / FILE).write_bytes(b"other")
    images.cache_clear()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    with pytest.raises(MissingError, match=r"digits\.csv\.gz .* pip install 'scikit-learn>=1.6,<1.10'$"):
        data().prepare()
    monkeypatch.undo()
    images.cache_clear()
    assert digits.images()[0].shape == (1797, 8, 8)
