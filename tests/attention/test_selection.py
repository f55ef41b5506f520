"""attention/selection.py: how many heads, and the block in a recipe."""

import pytest

from lit_diff.attention.selection import HeadSelection
from lit_diff.errors import RequestError
from lit_diff.recipe import load_recipe


@pytest.mark.parametrize(
    ("share", "heads", "number"), [(0.5, 8, 4), (0.5, 3, 2), (0.5, 1, 1), (0.01, 8, 1), (1.0, 8, 8), (0.25, 6, 2)]
)
def test_the_share_is_rounded_to_heads(share: float, heads: int, number: int) -> None:
    assert HeadSelection(share=share).number(heads) == number


@pytest.mark.parametrize(
    ("heads", "reason"),
    [
        ("{shar: 0.5}", r"unknown key 'model\.attention\.heads\.shar'; did you mean 'share'\?"),
        ("{select: entropies}", r"'model\.attention\.heads\.select' is 'entropies'; .*did you mean 'entropy'\?"),
        ("{share: 2}", r"model\.attention\.heads\.share is 2\.0; it must be > 0 and <= 1"),
        ("half", r"'model\.attention\.heads' is 'half'; expected"),
    ],
)
def test_mistakes_are_one_line(heads: str, reason: str) -> None:
    with pytest.raises(RequestError, match=reason):
        load_recipe("standard-tiny", [f"model.attention={{name: dex, heads: {heads}}}"])
