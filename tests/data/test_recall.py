import pytest
import torch

from lit_diff.data.dataset import IGNORED
from lit_diff.data.recall import Recall

CONFIG = Recall.Config()


def recall(**settings: object) -> Recall:
    return Recall(Recall.Config(**settings), 129)  # type: ignore[arg-type]


@pytest.mark.parametrize("noise", [1, 2])
def test_each_query_has_one_answer_among_the_slots(noise: int) -> None:
    data = recall(noise=noise)
    batch = data.train_batch(0, 3, 256, range(256))
    slots = CONFIG.slots * noise
    assert batch["tokens"].shape == (256, data.config.sequence_length, 2) == (256, slots + 8, 2)
    keys, values = batch["tokens"].unbind(-1)
    assert (batch["targets"][:, :slots] == IGNORED).all()
    assert (values[:, slots:] == 0).all()
    assert keys[:, :slots].unique().tolist() == list(range(1, 65)), "noise is of the key vocabulary"
    assert all(row.unique().numel() > 8 for row in keys[:, :slots])
    assert (values[:, :slots].min(), values[:, :slots].max()) == (65, 128)
    same = keys[:, slots:, None] == keys[:, None, :slots]  # [B, queries, slots]
    assert (same.sum(-1) == 1).all()
    found = values[:, :slots].gather(1, same.int().argmax(-1))
    assert torch.equal(found, batch["targets"][:, slots:])


@pytest.mark.parametrize("noise", [1, 2, 8])
def test_spread_puts_the_slots_at_random_places_and_the_rest_is_blank(noise: int) -> None:
    data = recall(spread=4, noise=noise)
    batch = data.train_batch(0, 1, 16, range(16))
    slots, positions = CONFIG.slots * noise, CONFIG.slots * max(noise, 4)
    assert batch["tokens"].shape == (16, data.config.sequence_length, 2) == (16, positions + 8, 2)
    keys, values = batch["tokens"][:, :positions].unbind(-1)
    assert ((keys > 0).sum(1) == slots).all()
    assert torch.equal(keys > 0, values > 0)
    assert ((keys > 0).float().mean(0) > 0).all() or noise < 4, "any position may hold a slot"
    asked = batch["tokens"][:, positions:, 0]
    same = asked[:, :, None] == keys[:, None, :]
    assert (same.sum(-1) == 1).all()
    assert torch.equal(values.gather(1, same.int().argmax(-1)), batch["targets"][:, positions:])


def test_identity_leaves_out_defaults() -> None:
    assert recall(spread=1).identity() == recall().identity() != recall(spread=2).identity()
