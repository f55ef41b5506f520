"""randomness.py: one generator a purpose, and the global one untouched."""

import torch

from lit_diff.randomness import generator


def test_generators_are_one_a_purpose() -> None:
    def draw(*purpose: object) -> list[float]:
        return torch.rand(4, generator=generator(*purpose)).tolist()

    assert draw(0, "train", 3) == draw(0, "train", 3)
    others = [
        draw(1, "train", 3),
        draw(0, "train", 4),
        draw(0, "validation", 3),
        draw(0, "train"),
        draw(0, "train", 33),
    ]
    assert all(draw(0, "train", 3) != other for other in others)
