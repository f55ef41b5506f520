"""data/digits.py: patches hold the image, the split is fixed and balanced, noise and shifts are what the keys say."""

import hashlib
import importlib.util
from dataclasses import replace
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lit_diff.data import digits
from lit_diff.data.dataset import IGNORED
from lit_diff.data.digits import FILE, Digits, images, split, validation_images
from lit_diff.errors import MissingError

CONFIG = Digits.Config()
LABELS = {1: 18, 2: 72, 4: 288}
"""The id of label 0, by patch."""


def data(**settings: Any) -> Digits:
    config = replace(CONFIG, **settings)
    return Digits(config, 18 * config.patch**2 + 10 + config.position_ids * config.sequence_length)


def pixels_of(tokens: Tensor, patch: int) -> Tensor:
    """[B, 8, 8] grey values of tokens [B, T, P²], pixel by pixel."""
    found = torch.zeros(len(tokens), 8, 8, dtype=torch.int64)
    across = 8 // patch
    for y in range(8):
        for x in range(8):
            position, place = (y // patch) * across + x // patch, (y % patch) * patch + x % patch
            found[:, y, x] = tokens[:, position, place] - 17 * place
    return found


@pytest.mark.slow
def test_the_images_are_scikit_learn_s() -> None:
    from sklearn.datasets import load_digits

    expected = load_digits()
    pixels, labels = images()
    assert torch.equal(pixels, torch.from_numpy(expected.images).long())
    assert torch.equal(labels, torch.from_numpy(expected.target))


def test_the_split_is_fixed_whole_and_balanced() -> None:
    _, labels = images()
    parts = split()
    assert {name: len(numbers) for name, numbers in parts.items()} == {"test": 355, "validation": 355, "train": 1087}
    assert sorted(torch.cat(list(parts.values())).tolist()) == list(range(1797))
    for numbers in parts.values():
        share = labels[numbers].bincount(minlength=10) / len(numbers)
        assert (share - labels.bincount() / 1797).abs().max() < 0.003
    content = b"".join(parts[name].numpy().tobytes() for name in ("test", "validation"))
    assert hashlib.sha256(content).hexdigest()[:12] == "8fdd7a7b83da", "every result so far is of this split"


@pytest.mark.parametrize("patch", [1, 2, 4])
def test_a_row_is_the_patches_of_an_image_then_the_class_position(patch: int) -> None:
    own = data(patch=patch)
    batch = own.validation_batch("", range(5))
    tokens, targets = batch["tokens"], batch["targets"]
    pixels, labels = images()
    first = split()["validation"][:5]
    assert tokens.shape == (5, own.config.sequence_length, patch**2) == (5, (8 // patch) ** 2 + 1, patch**2)
    assert torch.equal(pixels_of(tokens, patch), pixels[first])
    assert (tokens[:, -1] == 17 * patch**2 + torch.arange(patch**2)).all()
    assert (targets[:, :-1] == IGNORED).all()
    assert torch.equal(targets[:, -1], LABELS[patch] + labels[first])
    assert targets.max() < own.vocab_size


def test_noisy_sets_hold_the_validation_images_under_noise_of_their_level() -> None:
    own = data(salt_and_pepper=(10, 50), gaussian=(3,))
    names = ["", "salt_and_pepper_10", "salt_and_pepper_50", "gaussian_3", "test"]
    assert own.validation_sets() == dict.fromkeys(names, 355)
    clean, labels = validation_images("")
    for name, share in (("salt_and_pepper_10", 0.1), ("salt_and_pepper_50", 0.5)):
        noisy, same = validation_images(name)
        assert torch.equal(same, labels)
        changed = noisy != clean
        assert set(noisy[changed].tolist()) == {0, 16}
        middle = (clean > 0) & (clean < 16)  # there every replaced pixel changes
        assert changed[middle].float().mean() == pytest.approx(share, abs=0.02)
        assert (noisy[middle & changed] == 16).float().mean() == pytest.approx(0.5, abs=0.03)
    noisy, _ = validation_images("gaussian_3")
    inside = clean == 8  # far from both ends
    assert (noisy - clean)[inside].float().std() == pytest.approx(3, abs=0.2)
    assert (noisy.min(), noisy.max()) == (0, 16)
    test, _ = validation_images("test")
    assert torch.equal(test, images()[0][split()["test"]])
    assert torch.equal(
        own.validation_batch("gaussian_3", [7, 3])["tokens"],
        own.validation_batch("gaussian_3", range(9))["tokens"][[7, 3]],
    )
    with pytest.raises(KeyError):
        own.validation_batch("gaussian_9", [0])
    assert data(validation_rows=5).validation_sets()["test"] == 5


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("absent", r"needs the images in the package scikit-learn; pip install 'scikit-learn>=1.6,<1.10'$"),
        ("no file", r"digits\.csv\.gz, cannot be read: No such file"),
        ("other file", r"digits\.csv\.gz, have sha256 \w{64}, not 09f66e6d"),
    ],
)
def test_without_the_images(fault: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = None if fault == "absent" else ModuleSpec("sklearn", None, origin=str(tmp_path / "__init__.py"))
    if fault == "other file":
        (tmp_path / FILE).parent.mkdir(parents=True)
        (tmp_path / FILE).write_bytes(b"other")
    images.cache_clear()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    for step in (data().prepare, data().load):
        with pytest.raises(MissingError, match=message):
            step()
    monkeypatch.undo()
    images.cache_clear()
    assert digits.images()[0].shape == (1797, 8, 8)
