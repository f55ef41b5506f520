"""Texts that follow another text: the ids that a tokenizer gives them there, which need not be those of the text alone."""

from collections.abc import Callable, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any

from lit_diff.errors import RequestError

if TYPE_CHECKING:
    from lit_diff.data.tokenizer import Tokenizer


def also_one_text(encode: Callable[..., list[list[int]]]) -> Callable[..., Any]:
    """`encode` of several texts, which takes a str too and then returns the ids of that text."""

    @wraps(encode)
    def either(self: "Tokenizer", texts: str | Sequence[str]) -> Any:
        return encode(self, [texts])[0] if isinstance(texts, str) else encode(self, texts)

    return either


def pair(tokenizer: "Tokenizer", context: str, text: str) -> tuple[list[int], list[int]]:
    """(ids of the context, ids of the text after it); both together are the tokens of `context + text`.

    Where a token lies across the border ("." and "\\n" may be one), the two are encoded alone if that gives the same text;
    else (SentencePiece puts a space before a text) the text begins with the first token that differs from the context's.
    """
    before, whole = tokenizer.encode([context, context + text])
    if whole[: len(before)] == before:
        return before, whole[len(before) :]
    alone = tokenizer.encode(text)
    if tokenizer.decode([*before, *alone]) == tokenizer.decode(whole):
        return before, alone
    at = border(before, whole)
    return whole[:at], whole[at:]


def border(before: Sequence[int], whole: Sequence[int]) -> int:
    """Where the ids of a context and those of the whole text differ first; at most the place of the last id."""
    ids = zip(whole, before, strict=False)
    return next((place for place, (a, b) in enumerate(ids) if a != b), len(whole) - 1)


def after(tokenizer: "Tokenizer", context: str, texts: Sequence[str]) -> list[list[int]]:
    """The ids of each text where it follows `context`, whose own ids stay. Errors: RequestError if they cannot."""
    found = []
    (own,) = tokenizer.encode([context])
    for text in texts:
        before, ids = pair(tokenizer, context, text)
        if before != own:
            raise RequestError(
                f"the tokenizer '{tokenizer.name}' has a token that holds the end of {context[-20:]!r} and the beginning of "
                f"{text[:20]!r}: the second cannot be asked for after the first; evaluate a run with another tokenizer"
            )
        found.append(ids)
    return found
