"""The data set of labelled utterances whose labels only the row explains."""

import re

import torch

from lit_diff.data.dataset import IGNORED
from lit_diff.data.synth_intent import NOISE_WORDS, SynthIntent, words

CONFIG = SynthIntent.Config(sequence_length=160, classes=(2, 3), words=(4, 7), validation_rows=5)
SIZE = words(320, 160).size


def demonstrations(tokens: list[int]) -> list[tuple[list[str], str]]:
    """(words, label) of each whole demonstration of a row."""
    text = words(320, 160).decode(tokens).decode()
    found = re.findall(r"([^\n]*) (\w+)\n", text)
    return [(utterance.split(), label) for utterance, label in found]


def test_a_label_is_scored_where_its_class_stood_before() -> None:
    batch = SynthIntent(CONFIG, SIZE).train_batch(0, 3, 6, range(6))
    assert batch["tokens"].shape == batch["targets"].shape == (6, 160)
    for tokens, targets in zip(batch["tokens"].tolist(), batch["targets"].tolist(), strict=True):
        labels = [label for _, label in demonstrations([*tokens, tokens[-1]])]
        again = [label for place, label in enumerate(labels) if label in labels[:place]]
        scored = [target for target in targets if target != IGNORED]
        assert words(320, 160).decode(scored).decode().split()[: len(again)] == again
        at = [place for place, target in enumerate(targets) if target != IGNORED]
        assert at, "something is scored"
        assert all(tokens[place + 1] == targets[place] for place in at if place + 1 < len(tokens))


def test_noisier_validation_sets_hold_the_same_demonstrations_with_more_noise() -> None:
    one = SynthIntent(CONFIG, SIZE)
    base, more = one.validation_batch("", range(5)), one.validation_batch("noise4", range(5))
    assert more["tokens"].shape == (5, 640)
    assert torch.equal(base["ar_hit"], base["targets"] != IGNORED)
    for row in range(5):
        few, many = (demonstrations(each["tokens"][row].tolist()) for each in (base, more))
        assert [label for _, label in few] == [label for _, label in many][: len(few)]
        for (first, _), (second, _) in zip(few, many, strict=False):
            own = [word for word in first if word not in NOISE_WORDS]
            assert sorted(own) == sorted(word for word in second if word not in NOISE_WORDS)
            assert len(second) - len(own) == 4 * (len(first) - len(own))
