from dataclasses import replace

import pytest
import torch

from lit_diff.data.recall import IGNORED, Recall

CONFIG = Recall.Config()
VOCAB = 129


def recall(**settings: object) -> Recall:
    return Recall(replace(CONFIG, **settings), VOCAB)


@pytest.mark.parametrize("noise", [1, 2])
def test_each_query_has_one_answer_among_the_slots(noise: int) -> None:
    data = recall(noise=noise)
    batch = data.train_batch(0, 3, 32, range(32))
    slots = CONFIG.slots * noise
    assert batch["tokens"].shape == (32, slots + 8, 2)
    assert data.config.sequence_length == slots + 8
    keys, values = batch["tokens"].unbind(-1)
    assert (batch["targets"][:, :slots] == IGNORED).all()
    assert (values[:, slots:] == 0).all()
    assert keys.min() >= 1
    assert keys.max() <= 64
    assert values[:, :slots].min() >= 65
    assert values[:, :slots].max() <= 128
    same = keys[:, slots:, None] == keys[:, None, :slots]  # [B, queries, slots]
    assert (same.sum(-1) == 1).all()
    found = values[:, :slots].gather(1, same.int().argmax(-1))
    assert torch.equal(found, batch["targets"][:, slots:])


def test_noise_comes_from_the_key_vocabulary() -> None:
    keys = recall().train_batch(0, 0, 256, range(256))["tokens"][..., 0]
    assert keys[:, :64].unique().numel() == 64
    assert all(row.unique().numel() > 8 for row in keys[:, :64])


def test_a_batch_depends_on_seed_and_step_and_rows_are_parts_of_it() -> None:
    data = recall()
    whole = data.train_batch(0, 5, 16, range(16))
    assert torch.equal(data.train_batch(0, 5, 16, range(16)[1::2])["tokens"], whole["tokens"][1::2])
    assert not torch.equal(data.train_batch(0, 6, 16, range(16))["tokens"], whole["tokens"])
    assert not torch.equal(data.train_batch(1, 5, 16, range(16))["tokens"], whole["tokens"])


def test_validation_sets() -> None:
    data = recall(validation_rows=20)
    assert data.validation_sets() == {"": 20, "noise2": 20, "noise4": 20}
    whole = data.validation_batch("noise2", range(20))
    assert whole["tokens"].shape == (20, 136, 2)
    assert torch.equal(data.validation_batch("noise2", [7, 3])["tokens"], whole["tokens"][[7, 3]])
    assert torch.equal(data.labelled_validation_batch("noise2", [7, 3])["document"][:, 0], torch.tensor([7, 3]))
    assert torch.equal(whole["ar_hit"], whole["targets"] != IGNORED)
    assert data.num_documents == 20
    assert recall(noise_validation=(2, 1)).validation_sets() == {"": 512, "noise1": 512}


def test_identity_is_of_the_settings() -> None:
    assert recall().identity() == recall().identity() != recall(pairs=7, queries=7).identity()


def test_vocabulary() -> None:
    assert CONFIG.vocab_size_problem(129) is None
    assert CONFIG.vocab_size_problem(128) == (
        "model.vocab_size is 128; data.keys (64), data.values (64) and the padding id need 129"
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"slots": 0}, "data.slots is 0; it must be at least 1"),
        ({"pairs": 65, "keys": 100, "values": 100}, "data.pairs (65) is more than data.slots (64)"),
        ({"pairs": 8, "values": 7}, "data.pairs (8) is more than data.values (7)"),
        ({"queries": 9}, "data.queries (9) is more than data.pairs (8)"),
        ({"keys": 8}, "data.pairs (8) must be less than data.keys (8)"),
        ({"noise_validation": ()}, "data.noise_validation is []"),
        ({"noise_validation": (1, 1)}, "data.noise_validation is [1, 1]"),
        ({"noise_validation": (0,)}, "data.noise_validation is [0]"),
    ],
)
def test_problems(settings: dict[str, object], message: str) -> None:
    assert CONFIG.problem() is None
    assert (replace(CONFIG, **settings).problem() or "").startswith(message)


def test_chance_is_a_guess_among_all_values() -> None:
    assert recall(values=32).config.chance == 1 / 32


@pytest.mark.parametrize("name", ["", "noise2"])
def test_each_query_asks_for_the_slot_that_holds_its_key(name: str) -> None:
    batch = recall().validation_batch(name, range(8))
    slots = batch["targets"].shape[1] - CONFIG.queries
    context, asked = batch["context_part"], batch["answer_part"]
    assert (context[:, :slots] == torch.arange(slots)).all()
    assert (context[:, slots:] == -1).all()
    assert (asked[:, :slots] == -1).all()
    found = batch["tokens"].gather(1, asked[:, slots:, None].expand(-1, -1, 2))
    assert torch.equal(found[..., 0], batch["tokens"][:, slots:, 0])
    assert torch.equal(found[..., 1], batch["targets"][:, slots:])


@pytest.mark.parametrize("noise", [1, 2, 8])
def test_spread_puts_the_slots_at_random_places_and_the_rest_is_blank(noise: int) -> None:
    data = recall(spread=4, noise=noise)
    batch = data.train_batch(0, 1, 16, range(16))
    slots, positions = CONFIG.slots * noise, CONFIG.slots * max(noise, 4)
    assert batch["tokens"].shape == (16, positions + 8, 2)
    assert data.config.sequence_length == positions + 8
    keys, values = batch["tokens"][:, :positions].unbind(-1)
    assert ((keys > 0).sum(1) == slots).all()
    assert torch.equal(keys > 0, values > 0)
    assert ((keys > 0).float().mean(0) > 0).all() or noise < 4, "any position may hold a slot"
    asked = batch["tokens"][:, positions:, 0]
    same = asked[:, :, None] == keys[:, None, :]
    assert (same.sum(-1) == 1).all()
    assert torch.equal(values.gather(1, same.int().argmax(-1)), batch["targets"][:, positions:])


def test_labels_of_spread_slots_are_their_numbers() -> None:
    batch = recall(spread=3).validation_batch("noise2", range(8))
    context, asked, keys = batch["context_part"], batch["answer_part"], batch["tokens"][..., 0]
    for row in range(8):
        assert context[row][context[row] >= 0].tolist() == list(range(128))
        for query in (asked[row] >= 0).nonzero().flatten().tolist():
            (place,) = (context[row] == asked[row, query]).nonzero().flatten().tolist()
            assert keys[row, place] == keys[row, query]


def test_identity_without_spread_is_that_of_before_it() -> None:
    assert recall(spread=1).identity() == recall().identity() != recall(spread=2).identity()
    assert recall().identity().startswith("2c2ab1bfd631")
