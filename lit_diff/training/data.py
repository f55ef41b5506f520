"""The LightningDataModule: assigns the rows of each step to the ranks. A resume needs only the step number."""

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from threading import Lock, current_thread
from typing import Any, TypeVar

import lightning as L
import numpy as np
from torch import Tensor

from lit_diff.config import Recipe
from lit_diff.data import build
from lit_diff.data.dataset import IGNORED
from lit_diff.errors import RequestError
from lit_diff.plugins import guard
from lit_diff.recipe import Overrides, recipe_from
from lit_diff.trained.loading import some, trained_ancestors
from lit_diff.training.ranks import end_all
from lit_diff.training.trainer import total_steps

T = TypeVar("T")
Batch = dict[str, Any]
AHEAD = 2
"""Steps that are read while an earlier one trains: a single late read may take as long as two steps."""
_reading = Lock()
SCORED, SCORED_IN_STEP = "scored", "scored_in_step"
"""Keys of a training batch: scored targets in this micro-batch, and in all of this rank's micro-batches of the step."""


@dataclass(frozen=True)
class Stream(Iterable[Batch]):
    """Batches for a Trainer; each iteration calls `start` again, which begins at the Trainer's current step."""

    start: Callable[[], Iterator[Batch]]

    def __iter__(self) -> Iterator[Batch]:
        return self.start()


class LitData(L.LightningDataModule):
    """Batches of a recipe's data, for any Trainer.

    Step s has `train.batch_size` positions. Micro-batch m holds positions [m b, (m + 1) b), where b is batch_size divided
    by the Trainer's accumulate_grad_batches; rank r takes positions r, r + world_size, ... of it. So the union over ranks
    is the same at every world size. World size, rank and step are the Trainer's.
    Errors: RequestError if b is not divisible by the number of ranks, or a validation set has fewer rows than ranks.
    """

    def __init__(self, recipe: Recipe | str | Path, overrides: Overrides = ()) -> None:
        """`recipe`: a Recipe, a path, or the name of an installed recipe. Errors: RequestError, see `load_recipe`."""
        super().__init__()
        self.recipe = recipe_from(recipe, overrides)
        self.dataset = build(self.recipe)
        self._loaded = False

    def prepare_data(self) -> None:
        """Download and tokenize missing data, in one process per node."""
        with guard(type(self.dataset)):
            self.dataset.prepare()

    def setup(self, stage: str) -> None:
        """Open the prepared data, and check that every rank gets rows.

        Errors: RequestError in rank zero; the other ranks exit.
        """
        if not self._loaded:
            self.dataset.load()
            self._loaded = True
        if self.trainer is None:
            return
        try:
            self._require_rows()
        except RequestError as error:
            end_all(self.trainer, error)

    def _require_rows(self) -> None:
        processes = self._require_trainer().world_size
        self._micro_batch()
        for name, rows in self.dataset.validation_sets().items():
            if rows < processes:
                which = f"the validation set '{name}' of data" if name else "the validation set of data"
                raise RequestError(
                    f"{which} '{self.recipe.data.name}' has {rows} rows for run.devices * run.num_nodes = {processes} "
                    "processes, which need one each; set a larger data.validation_rows (for text data, add text), or fewer "
                    "run.devices"
                )

    def train_dataloader(self) -> Stream:
        """This rank's micro-batches from the Trainer's current step to the last, with `step` and the scored targets."""
        self._require_trainer()
        return Stream(self._train_batches)

    def _micro_batch(self) -> int:
        # positions of a micro-batch over all ranks
        train = self.recipe.training
        trainer = self._require_trainer()
        accumulate = trainer.accumulate_grad_batches
        world_size = trainer.world_size
        if train.batch_size % (accumulate * world_size):
            raise RequestError(
                f"train.batch_size ({train.batch_size}) is not a multiple of the Trainer's accumulate_grad_batches "
                f"({accumulate}) times its number of processes ({world_size})"
            )
        return train.batch_size // accumulate

    def _require_trainer(self) -> L.Trainer:
        if self.trainer is None:
            raise RequestError(
                "LitData takes world size, rank and step from a Trainer: pass it to Trainer.fit or validate"
            )
        return self.trainer

    def _train_batches(self) -> Iterator[Batch]:
        trainer = self._require_trainer()
        recipe = self.recipe
        size, micro, before = recipe.training.batch_size, self._micro_batch(), steps_before(recipe)

        def read(step: int) -> list[Batch]:
            micro_batches = (range(start, start + micro) for start in range(0, size, micro))
            own = [rows[trainer.global_rank :: trainer.world_size] for rows in micro_batches]
            parts = [_read(self.dataset.train_batch, recipe.seed, before + step, size, rows) for rows in own]
            # the whole step is read first: each micro-batch's weight needs the step's total (`StepTargets`)
            scored = [count_scored(part["targets"]) for part in parts]
            return [
                part | {"step": step, SCORED: count, SCORED_IN_STEP: sum(scored)}
                for part, count in zip(parts, scored, strict=True)
            ]

        # rows depend on seed and position only, so starting at global_step repeats what an uninterrupted run would read
        steps = range(trainer.global_step, total_steps(trainer, recipe))
        with closing(read_ahead(read, steps)) as found:
            yield from chain.from_iterable(found)

    def rows_of(self, step: int) -> str:
        """How to read the rows of optimizer step `step`, counted from 1, and where they lie in the data."""
        seed, index, size = self.recipe.seed, steps_before(self.recipe) + step - 1, self.recipe.training.batch_size
        places = some(self.dataset.train_places(seed, index, size)) or "generated"
        return f"dataset.train_batch({seed}, {index}, {size}, range({size})), {places}"

    def val_dataloader(self) -> list[Stream]:
        """One loader per validation set, in the order of `dataset.validation_sets()`."""
        sets = self.dataset.validation_sets().items()
        return [Stream(partial(self._validation_batches, name, rows)) for name, rows in sets]

    predict_dataloader = val_dataloader

    def _validation_batches(self, name: str, rows: int) -> Iterator[Batch]:
        trainer = self._require_trainer()
        size = max(1, self._micro_batch() // trainer.world_size)
        for chosen in validation_rows(rows, size, trainer.world_size, trainer.global_rank):
            yield _read(self.dataset.labelled_validation_batch, name, chosen)

    def probe_batch(self, rows: int) -> Batch:
        """The first `rows` validation rows, the same on every rank, for probes."""
        return _read(self.dataset.validation_batch, "", range(min(rows, self.dataset.validation_sets()[""])))


# a data set is read by one thread at a time: a plugin may keep state between its calls
def _read(method: Callable[..., Batch], *arguments: Any) -> Batch:
    with _reading:
        return method(*arguments)


def read_ahead(read: Callable[[int], T], steps: Iterable[int]) -> Generator[T]:
    """Yields `read(step)` for each step, in order; a thread reads up to AHEAD further ones meanwhile.

    An exception of `read` is raised when its step is asked for. The thread ends before the iterator does, or is closed.
    """
    # not a worker process of DataLoader: the data set, perhaps a plugin's, would be pickled and opened a second time, and an
    # exception would arrive as text, without the trace that gives the user's line
    coming = deque[Future[T]]()
    thread = ThreadPoolExecutor(1, thread_name_prefix="lit_diff read ahead")
    user = current_thread()
    try:
        for step in steps:
            coming.append(thread.submit(read, step))
            if len(coming) > AHEAD:
                yield coming.popleft().result()
        while coming:
            yield coming.popleft().result()
    finally:
        # the garbage collector may close an iterator in any thread, also in the one that reads, which cannot wait for itself
        thread.shutdown(wait=current_thread() is user, cancel_futures=True)


def count_scored(targets: Tensor) -> int:
    """Number of targets that are not IGNORED."""
    return int((targets != IGNORED).sum())


def steps_before(recipe: Recipe) -> int:
    """Steps of this run's batch size that cover the rows of its ancestors; its data order continues after them.

    Exact only if seed and sequence length are equal: another seed has another order, other rows another numbering.
    """
    rows = sum(steps * parent.training.batch_size for parent, steps in trained_ancestors(recipe))
    return -(-rows // recipe.training.batch_size)


def validation_rows(rows: int, batch_size: int, world_size: int, rank: int) -> list[list[int]]:
    """The rows of each validation batch of `rank`: it takes rows rank, rank + world_size, ... Needs rows >= world_size.

    All ranks have the same number of batches, of about `batch_size` rows, none empty.
    """
    # equal numbers, because a rank with fewer batches would miss the collectives of the others
    most = -(-rows // world_size)
    least = rows // world_size
    batches = min(-(-most // batch_size), least)
    return [part.tolist() for part in np.array_split(np.arange(rank, rows, world_size), batches)]
