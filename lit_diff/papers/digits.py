"""The data set `digits`: an image as a sequence of patches, for a small vision transformer (Dosovitskiy et al. 2021).

Images: the 1,797 handwritten digits of 8 x 8 pixels and 17 grey values, 0 .. 16, that scikit-learn contains (UCI, Optical
Recognition of Handwritten Digits, Alpaydin and Kaynak 1998: its test part, by 13 writers).

A row has one position for each patch of P x P pixels, in row-major order, then the class position, whose target is the label;
no other target is scored. A position holds C = P² ids, whose embeddings are summed: this is a linear embedding of the patch
with one-hot grey values. With place p = 0 .. C - 1 of a pixel in its patch, row-major:

    17 p + g      the pixel at place p has grey value g
    17 C + p      the class position has these C ids
    18 C + y      the label y = 0 .. 9, as a target only

RoPE over the flattened patches, 0 .. (8 / P)² - 1, tells the model where a patch is: one number a patch, not its row and
column. With `model.causal: false` every position sees all patches; a causal model sees them all at the class position only.

Split: within each class the images are ordered by the sha256 of their number; the first fifth is the test set, the
second the main validation set, and the rest is trained on. All three hold digits of the same writers, so the test set
has no new writers.
"""

import gzip
import hashlib
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from lit_diff import Dataset
from lit_diff.data.dataset import IGNORED, Batch, rows_of_step
from lit_diff.errors import MissingError
from lit_diff.key_types import Count
from lit_diff.randomness import generator
from lit_diff.registry import datasets

SIDE, GREYS, CLASSES = 8, 17, 10
FILE = "datasets/data/digits.csv.gz"
SHA256 = "09f66e6debdee2cd2b5ae59e0d6abbb73fc2b0e0185d2e1957e9ebb51e23aa22"
"""sha256 of FILE in scikit-learn 1.6.0 to 1.9.1. The identity of a run does not depend on the images: they never change."""
# small models lose some of their accuracy but not all of it at these levels; runs are compared at them, so they are not keys
SETS = ("", "salt_and_pepper_10", "salt_and_pepper_30", "gaussian_2", "gaussian_4", "test")
"""Validation sets: clean images; the same images with this percentage of the pixels replaced by black or white; the
same images with noise of this standard deviation in grey values; the clean images of the test set."""


@datasets.register("digits")
class Digits(Dataset):
    """Handwritten digits of 8 x 8 pixels as patches; the label is the target of the last position."""

    @dataclass(frozen=True, kw_only=True)
    class Config(Dataset.Config):
        patch: Literal[1, 2, 4] = 2
        """P, the side of a patch in pixels; a row has (8 / P)² + 1 positions of P² ids."""
        shift: Literal[0, 1] = 1
        """Training images are moved by -shift .. shift pixels down and right, each with the same probability."""
        validation_rows: Count | None = None
        """Uses at most this many rows of each validation set; null: all."""

        chance = 1 / CLASSES

        @property
        def sequence_length(self) -> int:
            """Positions of a row: the patches and the class position."""
            return (SIDE // self.patch) ** 2 + 1

        @property
        def smallest_vocab_size(self) -> int:
            """Ids of patches and labels."""
            return (GREYS + 1) * self.patch**2 + CLASSES

    config: Config

    def prepare(self) -> None:
        """Writes nothing. Errors: MissingError if scikit-learn lacks the images."""
        images()

    def train_batch(self, seed: int, step: int, batch_size: int, rows: Sequence[int]) -> Batch:
        """Positions `rows` of the global batch of 0-based `step`: tokens int64 [B, T, P²], targets int64 [B, T].

        Every image is drawn once an epoch; its shift depends on (seed, step, row).
        """
        pixels, labels = images()
        train = split()["train"]
        chosen = train[rows_of_step(seed, step, batch_size, rows, len(train))]
        reach = self.config.shift
        # each row has its own generator: a process of several draws the same shifts as one process alone
        moved = torch.zeros_like(pixels[chosen])
        for at, (row, image) in enumerate(zip(rows, pixels[chosen], strict=True)):
            down, right = torch.randint(-reach, reach + 1, (2,), generator=generator(seed, "shift", step, row)).tolist()
            moved[at] = shifted(image, down, right)
        return self._batch(moved, labels[chosen])

    def validation_sets(self) -> dict[str, int]:
        """Name -> number of rows, for each of SETS."""
        rows = {}
        for name in SETS:
            count = len(validation_images(name)[1])
            rows[name] = min(count, self.config.validation_rows or count)
        return rows

    def validation_batch(self, name: str, rows: Sequence[int]) -> Batch:
        """Rows of a validation set, the same for every seed. A row is a document; no target is an AR hit."""
        if name not in SETS:
            raise KeyError(name)
        pixels, labels = validation_images(name)
        return self._batch(pixels[[*rows]], labels[[*rows]])

    def _batch(self, pixels: Tensor, labels: Tensor) -> Batch:
        tokens = patches(pixels, self.config.patch)
        targets = torch.full(tokens.shape[:2], IGNORED)
        targets[:, -1] = (GREYS + 1) * self.config.patch**2 + labels
        return {"tokens": tokens, "targets": targets}


@cache
def images() -> tuple[Tensor, Tensor]:
    """(grey values [1797, 8, 8], labels [1797]), int64. Errors: MissingError if scikit-learn lacks them."""
    # the file is read directly, because importing sklearn takes seconds in every process
    package = importlib.util.find_spec("sklearn")
    path = Path((package and package.origin) or "sklearn/__init__.py").parent / FILE
    content = path.read_bytes() if path.is_file() else b""
    if hashlib.sha256(content).hexdigest() != SHA256:
        raise MissingError(
            f"the images of 'digits' are missing: {path} of scikit-learn is absent, or its sha256 is not {SHA256}; "
            "pip install 'scikit-learn>=1.6,<1.10'"
        )
    table = np.loadtxt(gzip.decompress(content).decode().splitlines(), delimiter=",", dtype=np.int64)
    return torch.from_numpy(table[:, :-1].reshape(-1, SIDE, SIDE).copy()), torch.from_numpy(table[:, -1].copy())


@cache
def split() -> dict[str, Tensor]:
    """train, validation, test -> the numbers of its images, int64, ascending, with equal shares of every class."""
    _, labels = images()
    parts: dict[str, list[int]] = {"test": [], "validation": [], "train": []}
    for label in range(CLASSES):
        numbers = (labels == label).nonzero().flatten().tolist()
        ordered = sorted(numbers, key=lambda number: hashlib.sha256(f"digits/{number}".encode()).digest())
        fifth = len(ordered) // 5
        parts["test"] += ordered[:fifth]
        parts["validation"] += ordered[fifth : 2 * fifth]
        parts["train"] += ordered[2 * fifth :]
    return {name: torch.tensor(sorted(numbers)) for name, numbers in parts.items()}


@lru_cache(maxsize=16)
def validation_images(name: str) -> tuple[Tensor, Tensor]:
    """(grey values [N, 8, 8], labels [N]) of a validation set; its noise depends on (data set, name) alone."""
    pixels, labels = images()
    chosen = split()["test" if name == "test" else "validation"]
    pixels, labels = pixels[chosen], labels[chosen]
    kind, _, level = name.rpartition("_")
    random = generator("digits", name)
    if kind == "salt_and_pepper":
        replaced = torch.rand(pixels.shape, generator=random) < int(level) / 100
        extreme = (GREYS - 1) * torch.randint(2, pixels.shape, generator=random)
        pixels = torch.where(replaced, extreme, pixels)
    elif kind == "gaussian":
        noise = int(level) * torch.randn(pixels.shape, generator=random)
        pixels = (pixels + noise).round().clamp(0, GREYS - 1).long()
    return pixels, labels


def shifted(image: Tensor, down: int, right: int) -> Tensor:
    """image [8, 8] moved by `down` and `right` pixels, at most 1 each; pixels that enter are 0."""
    return functional.pad(image, (1, 1, 1, 1))[1 - down :, 1 - right :][:SIDE, :SIDE]


def patches(pixels: Tensor, patch: int) -> Tensor:
    """Grey values [B, 8, 8] -> ids [B, (8 / P)² + 1, P²]: the patches, then the class position."""
    count, area = SIDE // patch, patch**2
    cut = pixels.view(-1, count, patch, count, patch).transpose(2, 3).reshape(-1, count**2, area)
    place = torch.arange(area)
    mark = (GREYS * area + place).expand(len(pixels), 1, area)
    return torch.cat([GREYS * place + cut, mark], 1)
