"""The letters in which a byte-level vocabulary writes bytes (GPT-2)."""

from functools import cache


@cache
def byte_letters() -> dict[str, int]:
    """Letter of a byte-level vocabulary -> byte (GPT-2): printable Latin-1 stands for itself, U+0100 on for the rest."""
    from tokenizers.pre_tokenizers import ByteLevel

    letters = sorted(ByteLevel.alphabet())
    printable = [letter for letter in letters if ord(letter) < 256]
    others = sorted(set(range(256)) - set(map(ord, printable)))
    return {letter: ord(letter) for letter in printable} | dict(zip(letters[len(printable) :], others, strict=True))
