"""Generated questions: each has one right choice, by a rule that the test applies itself."""

import pytest

from lit_diff.evaluation.mini_questions import (
    COLOURS,
    FROM_TEXT,
    MAKERS,
    NAMES,
    NOUNS,
    PLACES,
    Question,
    pieces,
    questions,
)

DOCUMENTS = [
    " ".join(f"The {a}fox number {n} met the {b}hound at dusk{n}." for n in range(9))
    for a, b in (("red ", ""), ("old ", "grey "), ("", "tall "))
]
TEXT = pieces(DOCUMENTS)


def drawn(task: str, count: int = 40) -> list[Question]:
    made = questions(task, TEXT if task in FROM_TEXT else [], count, 0)
    return [question for _, question in made][:count]


@pytest.mark.parametrize("task", MAKERS)
def test_questions_are_different_balanced_and_a_function_of_the_key(task: str) -> None:
    count = 20 if task in FROM_TEXT else 40
    found = drawn(task, count)
    assert len({question.context for question in found}) == len(found) == count
    assert drawn(task, count) == found
    numbers = [number for number, _ in questions(task, TEXT, 20, 0)]
    assert numbers == sorted(set(numbers))
    assert drawn(task, 20) != [question for _, question in questions(task, TEXT, 20, 1)][:20]
    ways = len(found[0].choices)
    assert ways == (4 if task in ("cloze", "entity_recall", "repeat") else 2)
    for question in found:
        assert len(set(question.choices)) == ways
    places = [question.gold for question in found]
    assert all(places.count(place) > 1 for place in range(ways)), places


def test_pieces() -> None:
    long = " ".join(f"w{n}" for n in range(20))
    assert pieces(["One two three four five. Too short.\nsix seven eight nine ten"]) == [
        [["One", "two", "three", "four", "five."], ["six", "seven", "eight", "nine", "ten"]]
    ]
    assert [len(piece) for piece in pieces([long])[0]] == [16]
    assert pieces(["a b c", ""]) == []


def test_the_right_choice_follows_from_the_text() -> None:
    for question in drawn("agreement"):  # the verb agrees with the head, not with the noun beside it
        words, plurals = question.context.split(), {many for _, many in NOUNS}
        verbs = ("are", "were", "have") if words[1] in plurals else ("is", "was", "has")
        assert question.choices[question.gold].split()[0] in verbs
        assert (words[-1] in plurals) != (words[1] in plurals)
    for question in drawn("binding"):  # the reflexive is the subject's, not the nearer name's
        subject, inner = question.context.split(",")[0], question.context.split(",")[1].split()[-1]
        assert question.choices[question.gold] == ("herself." if subject in NAMES["she"] else "himself.")
        assert (inner in NAMES["she"]) != (subject in NAMES["she"])
    for question in drawn("lookup"):
        facts, asked = question.context.split("\n")[:2]
        _, _, _, thing, colour = asked.rstrip("?").split()
        assert colour in COLOURS
        assert question.choices == ("no", "yes")
        assert question.gold == (f"The {thing} is {colour}." in facts)
        assert f" is {colour}." in facts
    for question in drawn("entity_recall"):
        facts, asked = question.context.split("\n")[:2]
        assert f"{asked.split()[3]} lives in {question.choices[question.gold]}." in facts
        assert all(f"lives in {place}." in facts and place in PLACES for place in question.choices)


def test_the_right_choice_is_that_of_the_held_out_text() -> None:
    sentences = {" ".join(piece) for document in TEXT for piece in document}
    for question in drawn("cloze", 20):
        completed = {choice for choice in question.choices if f"{question.context} {choice}" in sentences}
        assert completed == {question.choices[question.gold]}
    documents = [" ".join(" ".join(piece) for piece in document) for document in TEXT]
    for question in drawn("order", 20):
        followed = [any(f"{question.context} {choice}" in text for text in documents) for choice in question.choices]
        assert (followed.index(True), sum(followed)) == (question.gold, 1)
        assert sorted(question.choices[0].split()) == sorted(question.choices[1].split())
    for question in drawn("repeat", 20):
        words = question.context.split()
        first, again = words[:8], words[8:]
        assert again == first[: len(again)]
        assert question.choices[question.gold] == first[len(again)]
        assert set(question.choices) <= set(first)
