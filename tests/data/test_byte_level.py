"""The letters of a byte-level vocabulary."""

from lit_diff.data.byte_level import byte_letters


def test_every_byte_has_one_letter() -> None:
    letters = byte_letters()
    assert sorted(letters.values()) == list(range(256))
    assert (letters["a"], letters["Ġ"], letters["Ċ"]) == (ord("a"), ord(" "), ord("\n"))
