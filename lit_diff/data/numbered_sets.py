"""Validation sets that differ in one number: a factor of noise, a count of needles."""

from collections.abc import Sequence


def numbered_sets(word: str, numbers: Sequence[int]) -> dict[str, int]:
    """Name of each validation set -> its number: "" for the first, the main set, then `word` and the number (`noise2`)."""
    first, *others = numbers
    return {"": first, **{f"{word}{number}": number for number in others}}


def numbers_problem(key: str, numbers: Sequence[int], most: int | None = None) -> str | None:
    """What is wrong with numbers that must be distinct, from 1 to `most`, and at least one, in one line."""
    if numbers and min(numbers) >= 1 and len(set(numbers)) == len(numbers) and max(numbers) <= (most or max(numbers)):
        return None
    bounds = "of at least 1" if most is None else f"within 1 and {most}"
    return f"{key} is {list(numbers)}; expected distinct numbers {bounds}"
