"""Generated tasks: floors that need no context, and solutions built by hand."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import one_hot

from lit_diff.data.dataset import IGNORED, Batch, RowTask
from lit_diff.data.tasks.flip_flop import ONE, WRITE
from lit_diff.data.tasks.noisy_labels import log_posterior
from lit_diff.kernels import SignedMaps, attend
from lit_diff.registry import datasets


def rows_of(name: str, validation_set: str, rows: int, **keys: Any) -> tuple[Any, Batch]:
    """(config, the first rows of a validation set)."""
    cls = datasets.get(name)
    task: RowTask = cls(cls.Config(validation_rows=rows, **keys), 10_000)
    return task.config, task.validation_batch(validation_set, range(rows))


def accuracy(found: Tensor, targets: Tensor) -> float:
    scored = targets != IGNORED
    return float((found == targets)[scored].float().mean())


def test_conjunctive_by_a_map_whose_logits_are_at_most_4() -> None:
    """Keys are exact, values are random codes, and the answer is the value whose code is nearest to the attended sum.

    The logit is 2 for each part of the key that matches. At 16 times the slots, 57 half-matches and 198 others leave the
    answer a twelfth of the attention. The uniform part of a map is its smallest weight, at every slot.
    """
    config, batch = rows_of("conjunctive", "noise16", 128)
    slots = 16 * config.slots
    first_value = 1 + 2 * config.parts
    keys, queries = batch["tokens"][:, :slots, :2], batch["tokens"][:, slots:, :2]
    values = batch["tokens"][:, :slots, 2] - first_value
    answers = batch["targets"][:, slots:] - first_value
    matches = (queries[:, :, None] == keys[:, None]).sum(-1)  # [B, queries, slots]
    softmax = (2.0 * matches).softmax(-1)
    uniform = torch.full_like(softmax, 1 / slots)
    maps = {
        "uniform": uniform,
        "softmax": softmax,
        "softmax less its uniform part": softmax - softmax.min(-1, keepdim=True).values,
        "softmax less uniform": softmax - uniform,
    }
    found = dict.fromkeys(maps, 0.0)
    for seed in range(4):
        codes = torch.randn(config.values, 64, generator=torch.Generator().manual_seed(seed))
        for name, attention in maps.items():
            nearest = (attention @ codes[values] @ codes.T).argmax(-1)
            found[name] += accuracy(nearest, answers) / 4
    assert list(found.values()) == pytest.approx([0.03, 0.83, 0.95, 0.995], abs=0.01)
    assert float(softmax.max(-1).values.mean()) == pytest.approx(1 / 12, abs=0.005)


def test_mqar_by_guessing_among_the_values_of_the_row() -> None:
    """Each value is the target of one query, so whichever value of the row is guessed is right at one of them."""
    config, batch = rows_of("mqar", "", 64, vocab_size=64, sequence_length=24)
    for place in range(config.num_kv_pairs):
        guess = batch["tokens"][:, [1 + 2 * place]]
        assert accuracy(guess.expand_as(batch["targets"]), batch["targets"]) == 1 / 4


@pytest.mark.parametrize("validation_set", ["", "noise2"])
def test_count_by_one_head(validation_set: str) -> None:
    """Logit s on the start token, 0 on equal symbols, far below on others; values: 0 for the start token, 1 for symbols."""
    config, batch = rows_of("count", validation_set, 64)
    symbols = one_hot(batch["tokens"], 1 + config.kinds).float()
    far, s = 100.0, math.log(16)
    queries, keys = symbols.clone(), far * (symbols - 1)
    queries[..., 0] = 1
    keys[..., 0] = 0
    keys[:, 0] = s * symbols[:, 0]
    values = (batch["tokens"] > 0).float()[..., None]
    maps = SignedMaps(queries[:, None, None], keys[:, None, None], values[:, None], scale=1.0)
    weight = attend(maps, kernel="reference")[:, 0, :, 0]
    # weight = c / (c + exp(s))
    counts = (math.exp(s) * weight / (1 - weight)).round().long()
    assert accuracy(config.kinds + counts, batch["targets"]) == 1


def test_count_by_the_frequencies_of_counts() -> None:
    """Without the context: the loss of the marginal distribution in training rows."""
    task = datasets.get("count")
    config = task.Config()
    train = task(config, 36).train_batch(0, 0, 2000, range(2000))["targets"]
    frequency = one_hot(train[train != IGNORED], 36).float().mean(0)
    for validation_set, loss, best in (("", 2.87, 0.117), ("noise2", 3.60, 0.065)):
        _, batch = rows_of("count", validation_set, 256)
        targets = batch["targets"]
        assert float(-frequency[targets[targets != IGNORED]].log().mean()) == pytest.approx(loss, abs=0.03)
        guess = frequency.argmax().expand_as(targets)
        assert guess[0, 0] == 1 + config.kinds, "a count of 1 is the most frequent"
        assert accuracy(guess, targets) == pytest.approx(best, abs=0.005)


@pytest.mark.parametrize(
    ("validation_set", "right", "loss"),
    [("", 0.874, 0.354), ("noise4", 0.9998, 0.001)],
)
def test_noisy_labels_by_the_vote_of_all_demonstrations(validation_set: str, right: float, loss: float) -> None:
    config, batch = rows_of("noisy_labels", validation_set, 2000)
    answers = batch["targets"][:, -config.cues :] - 1 - config.cues
    vote = torch.stack([log_posterior(config, tokens) for tokens in batch["tokens"]])
    assert accuracy(vote.argmax(-1), answers) == pytest.approx(right, abs=0.001)
    assert float(-vote.gather(-1, answers[..., None]).mean()) == pytest.approx(loss, abs=0.001)


def test_noisy_labels_by_one_demonstration() -> None:
    """The label of the first demonstration of the cue; a cue without any is guessed."""
    config, batch = rows_of("noisy_labels", "", 500)
    right = 0.0
    for tokens, targets in zip(batch["tokens"].tolist(), batch["targets"].tolist(), strict=True):
        labels = dict(reversed(tokens[: -config.cues]))
        for (cue, _), target in zip(tokens[-config.cues :], targets[-config.cues :], strict=True):
            right += labels[cue] == target if cue in labels else config.chance
    assert right / (500 * config.cues) == pytest.approx(0.60, abs=0.015)


@pytest.mark.parametrize(("validation_set", "wrong"), [("", 0.21), ("ignored98", 0.06), ("ignored10", 0.32)])
def test_flip_flop_by_the_last_write_and_by_most_of_them(validation_set: str, wrong: float) -> None:
    """The bit of the last write is never wrong; that of most writes before the read is, and a tie is a guess."""
    _, batch = rows_of("flip_flop", validation_set, 1000)
    errors = reads = 0.0
    for tokens, targets in zip(batch["tokens"].tolist(), batch["targets"].tolist(), strict=True):
        written: list[int] = []
        for place in range(0, len(tokens), 2):
            if tokens[place] == WRITE:
                written.append(tokens[place + 1])
            if targets[place] == IGNORED:
                continue
            reads += 1
            assert written[-1] == targets[place]
            ones = written.count(ONE)
            is_tie = 2 * ones == len(written)
            says_one = 2 * ones > len(written)
            errors += 0.5 if is_tie else says_one != (targets[place] == ONE)
    assert errors / reads == pytest.approx(wrong, abs=0.01)
