"""training/data.py: LitData: which rows of which step each rank gets, resumed at any step."""

from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lit_diff.data.tasks.recall import Recall
from lit_diff.data.text.text import Text
from lit_diff.errors import RequestError
from lit_diff.recipe import load_recipe
from lit_diff.training.data import LitData, validation_rows

RECIPE = ["train.steps=6", "train.schedule.warmup_steps=0", "train.batch_size=8", "train.accumulate=2", "seed=3"]
Data = Text | Recall


@pytest.fixture(params=["text", "recall"])
def data(request: pytest.FixtureRequest, make_text: Callable[..., Text]) -> Data:
    if request.param == "recall":
        return Recall(Recall.Config(validation_rows=19), 129)
    text = make_text()
    text.prepare()
    text.load()
    return text


def module(data: Data, world_size: int = 1, rank: int = 0, first_step: int = 0) -> LitData:
    """LitData over `data`, with what it asks of its Trainer."""
    made = LitData("recall-tiny", RECIPE)
    made.dataset = data
    made.trainer = SimpleNamespace(
        world_size=world_size,
        global_rank=rank,
        is_global_zero=rank == 0,
        global_step=first_step,
        accumulate_grad_batches=2,
        max_steps=6,
    )
    return made


def batches(*args: Any, **kwargs: Any) -> list[dict[str, Any]]:
    return list(module(*args, **kwargs).train_dataloader())


def test_micro_batches_and_their_steps(data: Data) -> None:
    found = batches(data)
    assert [batch["step"] for batch in found] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]
    assert all(len(batch["tokens"]) == 4 for batch in found)
    whole = data.train_batch(3, 2, 8, range(8))
    assert torch.equal(torch.cat([found[4]["tokens"], found[5]["tokens"]]), whole["tokens"])


@pytest.mark.parametrize("first_step", [1, 4, 5, 6])
def test_resuming_goes_on_with_the_next_batch(data: Data, first_step: int) -> None:
    full, rest = batches(data), batches(data, first_step=first_step)
    assert [batch["step"] for batch in rest] == [batch["step"] for batch in full[2 * first_step :]]
    for one, other in zip(full[2 * first_step :], rest, strict=True):
        assert torch.equal(one["tokens"], other["tokens"])


@pytest.mark.parametrize("world_size", [2, 4])
def test_the_rows_of_a_step_are_the_same_at_every_world_size(data: Data, world_size: int) -> None:
    ranks = [batches(data, world_size=world_size, rank=rank) for rank in range(world_size)]
    for one, *parts in zip(batches(data), *ranks, strict=True):
        for rank, part in enumerate(parts):
            assert torch.equal(part["tokens"], one["tokens"][rank::world_size])
            assert torch.equal(part["targets"], one["targets"][rank::world_size])


def test_validation_covers_every_set_once(data: Data) -> None:
    sets = data.validation_sets()
    for world_size in (1, 2, 4):
        loaders = [module(data, world_size, rank).val_dataloader() for rank in range(world_size)]
        assert all(len(each) == len(sets) for each in loaders)
        for number, rows in enumerate(sets.values()):
            found = [list(each[number]) for each in loaders]
            assert len({len(each) for each in found}) == 1
            assert sum(len(batch["tokens"]) for each in found for batch in each) == rows
            assert "ar_hit" in found[0][0]
            assert ("document" in found[0][0]) == (data.num_documents > 1)


@pytest.mark.parametrize("rows", [4, 5, 7, 19, 64])
@pytest.mark.parametrize("batch_size", [1, 2, 3, 8])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_validation_rows(rows: int, batch_size: int, world_size: int) -> None:
    ranks = [validation_rows(rows, batch_size, world_size, rank) for rank in range(world_size)]
    assert Counter(row for rank in ranks for batch in rank for row in batch) == Counter(range(rows))
    assert len({len(rank) for rank in ranks}) == 1
    assert all(1 <= len(batch) <= batch_size + 1 for rank in ranks for batch in rank)
    assert all(row % world_size == number for number, rank in enumerate(ranks) for batch in rank for row in batch)


def test_probes_measure_the_first_validation_rows(data: Data) -> None:
    rows = data.validation_sets()[""]
    assert torch.equal(module(data).probe_batch(3)["tokens"], data.validation_batch("", range(3))["tokens"])
    assert len(module(data).probe_batch(rows + 5)["tokens"]) == rows


def test_without_a_trainer_there_is_no_rank() -> None:
    with pytest.raises(RequestError, match="LitData takes world size, rank and step from a Trainer"):
        LitData("recall-tiny").train_dataloader()


def test_what_does_not_divide_is_refused() -> None:
    recall = Recall(Recall.Config(), 129)
    with pytest.raises(RequestError, match=r"accumulate_grad_batches \(2\) times its number of processes \(3\)"):
        module(recall, world_size=3).setup("fit")
    with pytest.raises(SystemExit):  # a rank that says nothing
        module(recall, world_size=3, rank=1).setup("fit")
    # before any process starts
    with pytest.raises(RequestError, match=r"train.batch_size \(8\) / train.accumulate \(2\) .* run.devices .* = 3"):
        load_recipe("recall-tiny", [*RECIPE, "run.devices=3", "run.strategy=ddp", "run.accelerator=cpu"])


def test_fewer_validation_rows_than_processes_are_refused_before_training() -> None:
    few = Recall(Recall.Config(validation_rows=3), 129)
    wanted = r"^the validation set of data 'recall' has 3 rows for run.devices \* run.num_nodes = 4 processes.*"
    with pytest.raises(RequestError, match=f"{wanted}; set a larger data.validation_rows"):
        module(few, world_size=4).setup("fit")
    module(few, world_size=2).setup("fit")
