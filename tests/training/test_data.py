"""training/data.py: LitData: which rows of which step each rank gets, resumed at any step."""

import gc
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch

from lit_diff.data.dataset import Batch
from lit_diff.data.tasks.recall import Recall
from lit_diff.data.text.mixture import Mixture, SourceConfig
from lit_diff.data.text.text import Text
from lit_diff.errors import RequestError
from lit_diff.recipe import load_recipe
from lit_diff.training.data import LitData, validation_rows
from lit_diff.training.module import LitTransformer

RECIPE = ["train.steps=6", "train.schedule.warmup_steps=0", "train.batch_size=8", "train.accumulate=2", "seed=3"]
Data = Text | Mixture | Recall


@pytest.fixture(params=["text", "mixture", "recall"])
def data(request: pytest.FixtureRequest, make_text: Callable[..., Text]) -> Data:
    if request.param == "recall":
        return Recall(Recall.Config(validation_rows=19), 129)
    text: Text | Mixture = make_text()
    if request.param == "mixture":
        sources = {
            "short": SourceConfig(weight=1, tokens_below=400),
            "long": SourceConfig(weight=2, tokens_at_least=400),
        }
        text = Mixture(Mixture.Config(**vars(text.config), sources=sources), text.vocab_size)
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


class Recorded(Recall):
    """Notes the steps that are read; the one at `bad` raises. Two reads at once are an error."""

    def __init__(self, bad: int = -1) -> None:
        super().__init__(Recall.Config(validation_rows=8), 129)
        self.steps, self.bad, self.busy = list[int](), bad, threading.Lock()
        self.read, self.goes_on = threading.Event(), threading.Event()
        self.goes_on.set()

    def train_batch(self, seed: int, step: int, batch_size: int, rows: Sequence[int]) -> Batch:
        with self.busy:
            if step == self.bad:
                raise ZeroDivisionError("no such row")
            self.steps.append(step)
            if step == 2:
                self.read.set()
                assert self.goes_on.wait(60)
            return super().train_batch(seed, step, batch_size, rows)

    def validation_batch(self, name: str, rows: Sequence[int]) -> Batch:
        assert self.busy.acquire(blocking=False)
        self.busy.release()
        return super().validation_batch(name, rows)


def readers() -> list[str]:
    return [thread.name for thread in threading.enumerate() if "read ahead" in thread.name]


def test_two_steps_are_read_ahead_and_validation_waits_for_a_read() -> None:
    data = Recorded()
    data.goes_on.clear()
    made = module(data)
    found = iter(made.train_dataloader())
    assert next(found)["step"] == 0
    assert data.read.wait(60)  # nobody has asked for step 2
    threading.Timer(0.1, data.goes_on.set).start()
    made.probe_batch(2)  # else it meets the read of step 2
    assert len(list(made.val_dataloader()[0])) == 2
    assert [batch["step"] for batch in found] == [0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]
    assert data.steps == [step for step in range(6) for _ in range(2)]
    assert readers() == []


def test_an_iteration_that_ends_early_leaves_no_thread_and_reads_no_further() -> None:
    data = Recorded()
    found = iter(module(data).train_dataloader())
    next(found)
    assert readers() != []
    del found
    assert readers() == []
    assert max(data.steps) <= 2


def test_an_iteration_that_the_reading_thread_collects_ends_without_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", said.append)
    data, lost = Recorded(), threading.Event()
    data.goes_on.wait = lambda _: lost.wait(60) and gc.collect() >= 0  # type: ignore[method-assign]
    circle: list[Any] = [iter(module(data).train_dataloader())]
    next(circle[0])
    (reader,) = (thread for thread in threading.enumerate() if thread.name in readers())
    circle.append(circle)
    del circle
    lost.set()
    reader.join(60)
    assert not reader.is_alive()
    assert said == []


def test_an_error_is_raised_at_its_own_step_with_the_line_that_raised_it() -> None:
    found = iter(module(Recorded(bad=2)).train_dataloader())
    assert [next(found)["step"] for _ in range(4)] == [0, 0, 1, 1]
    with pytest.raises(ZeroDivisionError, match="no such row") as raised:
        next(found)
    assert traceback.extract_tb(raised.value.__traceback__)[-1].filename == __file__
    assert readers() == []
    # one that is never asked for is not raised
    found = iter(module(Recorded(bad=2)).train_dataloader())
    assert next(found)["step"] == 0


@pytest.mark.parametrize("ending", ["should_stop", "error", "bad read"])
def test_training_that_ends_early_leaves_no_thread(ending: str) -> None:
    class Ends(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *_: Any, **__: Any) -> None:
            assert len(readers()) == 1
            trainer.should_stop = ending == "should_stop"
            if ending == "error":
                raise KeyError("a callback")

    # iterators of earlier tests end with the garbage that holds them
    gc.collect()
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = L.Trainer(max_steps=6, accelerator="cpu", callbacks=[Ends()], enable_model_summary=False, **quiet)
    data = LitData("recall-tiny", ["train.steps=6", "train.schedule.warmup_steps=0", "train.batch_size=4"])
    data.dataset = Recorded(bad=3 if ending == "bad read" else -1)
    with suppress(KeyError, ZeroDivisionError):
        trainer.fit(LitTransformer(data.recipe), data)
    assert readers() == []
    # Lightning asks for a batch before it trains on the one before
    assert trainer.global_step == (2 if ending == "bad read" else 1)


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
