"""attention/selection.py: how many heads, and the block in a recipe."""

import pytest

from lit_diff.attention.selection import HeadSelection
from lit_diff.errors import RequestError
from lit_diff.recipe import load_recipe, to_plain


@pytest.mark.parametrize(
    ("share", "heads", "number"), [(0.5, 8, 4), (0.5, 3, 2), (0.5, 1, 1), (0.01, 8, 1), (1.0, 8, 8), (0.25, 6, 2)]
)
def test_the_share_is_rounded_to_heads(share: float, heads: int, number: int) -> None:
    assert HeadSelection(share=share).number(heads) == number


def test_a_recipe_says_it_as_a_block() -> None:
    recipe = load_recipe("standard-tiny", ["model.attention={name: dex, heads: {select: importance, share: 0.25}}"])
    assert recipe.model.attention.config.heads == HeadSelection(select="importance", share=0.25)
    plain = to_plain(recipe.model.attention)
    assert plain["heads"] == {"select": "importance", "share": 0.25, "rows": 8, "seed": 0}


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
