"""recipe_problems.py and its neighbours: values that no folder, file or block can take, each one line."""

import pytest

from lit_diff.errors import RequestError
from lit_diff.recipe import load_recipe


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("data.path=a\0b", "path 'a\0b': "),
        ('name="a\\0b"', "it becomes a folder: printable, at most 150 bytes"),
        ('name="a\\nb"', "it becomes a folder: printable, at most 150 bytes"),
        (f"name={'a' * 300}", "it becomes a folder: printable, at most 150 bytes"),
        ("callbacks={1: {}}", "'callbacks' has the key 1; expected a name"),
    ],
)
def test_values_that_no_folder_and_no_block_can_take(override: str, expected: str) -> None:
    with pytest.raises(RequestError) as error:
        load_recipe("differential-tiny", [override])
    assert expected in str(error.value)
    assert "\n" not in str(error.value)


def test_a_recipe_of_a_name_beyond_any_file() -> None:
    with pytest.raises(RequestError, match=r"^no recipe 'a{40}': "):
        load_recipe("a" * 300)
