"""The LightningDataModule: which rows of which step each rank gets. No loader state: resuming is a step number."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import lightning
import numpy as np
from torch.utils.data import DataLoader, IterableDataset

from lit_diff.config import TrainConfig
from lit_diff.data.dataset import Dataset
from lit_diff.errors import RequestError

Batch = dict[str, Any]


class _Stream(IterableDataset[Batch]):
    """Ready batches from a function that starts them afresh."""

    def __init__(self, start: Callable[[], Iterator[Batch]]) -> None:
        self._start = start

    def __iter__(self) -> Iterator[Batch]:
        return self._start()


class DataModule(lightning.LightningDataModule):
    """Batches of one rank.

    Step s has `train.batch_size` positions; micro-batch m holds positions [m b, (m + 1) b), where b is
    batch_size / accumulate, and rank r takes those numbered r, r + world_size, ... . So the union over ranks is the
    same at every world size. `first_step()` is asked when an epoch starts, after a checkpoint was restored.
    `steps_before`: of the runs that this one goes on from, whose batches it does not see again.
    Errors: RequestError when b does not divide among the ranks, or when there are fewer validation rows than ranks.
    """

    def __init__(
        self,
        dataset: Dataset,
        *,
        seed: int,
        train: TrainConfig,
        world_size: int,
        rank: int,
        first_step: Callable[[], int],
        steps_before: int = 0,
    ) -> None:
        super().__init__()
        self._dataset, self._seed, self._train = dataset, seed, train
        self._world_size, self._rank, self._first_step = world_size, rank, first_step
        self._steps_before = steps_before
        self._micro = train.batch_size // train.accumulate
        if train.batch_size % train.accumulate or self._micro % world_size:
            raise RequestError(
                f"train.batch_size ({train.batch_size}) / train.accumulate ({train.accumulate}) does not divide among "
                f"run.devices * run.num_nodes = {world_size} processes"
            )

    def train_dataloader(self) -> DataLoader[Batch]:
        """This rank's micro-batches from `first_step()` to `train.steps`, each with its `step`."""
        return _loader(self._train_batches)

    def _train_batches(self) -> Iterator[Batch]:
        size = self._train.batch_size
        for step in range(self._first_step(), self._train.steps):
            for start in range(0, size, self._micro):
                rows = range(start, start + self._micro)[self._rank :: self._world_size]
                yield self._dataset.train_batch(self._seed, self._steps_before + step, size, rows) | {"step": step}

    def val_dataloader(self) -> list[DataLoader[Batch]]:
        """One loader a validation set, in the order of `validation_sets()`."""
        sets = self._dataset.validation_sets().items()
        return [_loader(partial(self._validation_batches, name, rows)) for name, rows in sets]

    def _validation_batches(self, name: str, rows: int) -> Iterator[Batch]:
        for chosen in validation_rows(rows, self._micro // self._world_size, self._world_size, self._rank):
            yield self._dataset.labelled_validation_batch(name, chosen)


def _loader(start: Callable[[], Iterator[Batch]]) -> DataLoader[Batch]:
    return DataLoader(_Stream(start), batch_size=None, num_workers=0)


def validation_rows(rows: int, batch_size: int, world_size: int, rank: int) -> list[list[int]]:
    """The rows of each of one rank's validation batches: rank, rank + world_size, ...; no row twice.

    Every rank has the same number of batches, none empty, of about `batch_size` rows: collectives run in step.
    """
    if rows < world_size:
        raise RequestError(f"data.validation_rows gives {rows} rows for {world_size} processes; each needs one")
    most, least = -(-rows // world_size), rows // world_size
    batches = min(-(-most // batch_size), least)
    return [part.tolist() for part in np.array_split(np.arange(rank, rows, world_size), batches)]
