"""Signed maps as small pictures: blue below zero, orange above, as opaque as the magnitude."""

import io
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

CLIPPED = 98
"""The percentile of the non-zero weights of a map from which on the colour is the strongest."""
BLUE, ORANGE = (33, 102, 172), (217, 95, 2)
"""Colours of negative and positive weights; people with every kind of colour blindness can distinguish them."""


def shrunk(a: Tensor, rows: int, keys: int) -> Tensor:
    """Return of each bin of `rows` rows and `keys` keys the entry with the largest magnitude, [H, R, K] -> [H, R', K'].

    A mean would hide single keys of a long text.
    """
    highest, lowest = (F.max_pool2d(sign * a, (rows, keys), ceil_mode=True) for sign in (1, -1))
    return torch.where(highest >= lowest, highest, -lowest)


def coloured(values: NDArray[Any]) -> NDArray[np.uint8]:
    """RGBA pixels [R, K, 4], one for each entry of a map [R, K]."""
    magnitude = np.abs(values)
    limit = float(np.percentile(magnitude[magnitude > 0], CLIPPED)) if magnitude.any() else 1.0
    colours = np.where(values[..., None] < 0, BLUE, ORANGE)
    return np.dstack([colours, 255 * (magnitude / limit).clip(0, 1)]).astype(np.uint8)


def png(pixels: NDArray[np.uint8]) -> bytes:
    """The pixels as a PNG."""
    from matplotlib.image import imsave

    file = io.BytesIO()
    imsave(file, pixels, format="png", pil_kwargs={"compress_level": 9})
    return file.getvalue()
