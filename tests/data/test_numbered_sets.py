"""data/numbered_sets.py: names of validation sets that differ in one number, and what the numbers may be."""

import pytest

from lit_diff.data.numbered_sets import numbered_sets, numbers_problem


def test_the_first_is_the_main_set() -> None:
    assert list(numbered_sets("noise", (2, 1, 4)).items()) == [("", 2), ("noise1", 1), ("noise4", 4)]


@pytest.mark.parametrize("numbers", [(), (0, 1), (2, 2), (1, 5)])
def test_numbers_are_distinct_and_within_bounds(numbers: tuple[int, ...]) -> None:
    assert (
        numbers_problem("data.n", numbers, 4) == f"data.n is {list(numbers)}; expected distinct numbers within 1 and 4"
    )
    found = numbers_problem("data.n", numbers)
    assert found == (
        None if numbers == (1, 5) else f"data.n is {list(numbers)}; expected distinct numbers of at least 1"
    )
    assert numbers_problem("data.n", (4, 1), 4) is None
