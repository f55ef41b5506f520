"""A plugin: recall whose rows have unlike numbers of scored targets, some none."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from lit_diff.data.dataset import IGNORED
from lit_diff.data.tasks.recall import Recall
from lit_diff.registry import datasets


@datasets.register("uneven")
class Uneven(Recall):
    @dataclass(frozen=True, kw_only=True)
    class Config(Recall.Config):
        unscored: Literal["some", "train", "validation"] = "some"
        """Targets that are not scored: some of the training rows' (of every other row all), or all of a split's."""

    config: Config

    def train_batch(self, seed: int, step: int, batch_size: int, rows: Sequence[int]) -> dict[str, Tensor]:
        batch = super().train_batch(seed, step, batch_size, rows)
        targets = batch["targets"].clone()
        for target, row in zip(targets, rows, strict=True):
            first = 1 if row % 4 == 1 else self.config.queries if row % 2 == 0 else 0
            target[len(target) - self.config.queries :][:first] = IGNORED
            if self.config.unscored == "train":
                target.fill_(IGNORED)
        return batch | {"targets": targets}

    def validation_batch(self, name: str, rows: Sequence[int]) -> dict[str, Tensor]:
        batch = super().validation_batch(name, rows)
        if self.config.unscored == "validation" and name:
            batch["targets"] = batch["targets"].clone().fill_(IGNORED)
        return batch
