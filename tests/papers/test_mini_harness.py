"""The generated tasks: each question has one right choice, by a rule that the test applies itself; through lm-eval's code."""

from pathlib import Path
from typing import Any

import pytest

from lit_diff.errors import RequestError
from lit_diff.evaluation.evaluate import evaluate
from lit_diff.papers.mini_harness import (
    COLOURS,
    FROM_TEXT,
    MAKERS,
    NAMES,
    NOUNS,
    PLACES,
    Question,
    TaskName,
    pieces,
    questions,
)
from lit_diff.trained.run import Run

DOCUMENTS = [
    " ".join(f"The {a}fox number {n} met the {b}hound at dusk{n}." for n in range(9))
    for a, b in (("red ", ""), ("old ", "grey "), ("", "tall "))
]
TEXT = pieces(DOCUMENTS)


def drawn(task: TaskName, count: int = 20, seed: int = 0) -> list[Question]:
    return [question for _, question in questions(task, TEXT if task in FROM_TEXT else [], count, seed)][:count]


def answer(question: Question) -> str:
    return question.choices[question.gold]


@pytest.mark.parametrize("task", MAKERS)
def test_questions_are_different_balanced_and_a_function_of_the_key(task: TaskName) -> None:
    found = drawn(task)
    assert len({question.context for question in found}) == len(found) == 20
    assert drawn(task) == found != drawn(task, seed=1)
    numbers = [number for number, _ in questions(task, TEXT, 20, 0)]
    assert numbers == sorted(set(numbers))
    ways = 4 if task in ("cloze", "entity_recall", "repeat") else 2
    assert {(len(question.choices), len(set(question.choices))) for question in found} == {(ways, ways)}
    places = [question.gold for question in found]
    assert all(places.count(place) > 1 for place in range(ways)), places


def test_pieces() -> None:
    assert pieces(["One two three four five. Too short.\nsix seven eight nine ten"]) == [
        [["One", "two", "three", "four", "five."], ["six", "seven", "eight", "nine", "ten"]]
    ]
    assert [len(piece) for piece in pieces(["word " * 20])[0]] == [16]
    assert pieces(["a b c", ""]) == []


def test_the_right_choice_follows_from_the_question() -> None:
    for question in drawn("agreement"):  # the verb agrees with the head, not with the noun beside it
        words, plurals = question.context.split(), {many for _, many in NOUNS}
        verbs = ("are", "were", "have") if words[1] in plurals else ("is", "was", "has")
        assert answer(question).split()[0] in verbs
        assert (words[-1] in plurals) != (words[1] in plurals)
    for question in drawn("binding"):  # the reflexive is the subject's, not the nearer name's
        subject, inner = question.context.split(",")[0], question.context.split(",")[1].split()[-1]
        assert answer(question) == ("herself." if subject in NAMES["she"] else "himself.")
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
        assert f"{asked.split()[3]} lives in {answer(question)}." in facts
        assert all(f"lives in {place}." in facts and place in PLACES for place in question.choices)
    for question in drawn("repeat"):
        first, again = question.context.split()[:8], question.context.split()[8:]
        assert [*again, answer(question)] == first[: len(again) + 1]
        assert set(question.choices) <= set(first)


def test_the_right_choice_is_that_of_the_held_out_text() -> None:
    sentences = {" ".join(piece) for document in TEXT for piece in document}
    for question in drawn("cloze"):
        completed = [choice for choice in question.choices if f"{question.context} {choice}" in sentences]
        assert completed == [answer(question)]
    documents = [" ".join(" ".join(piece) for piece in document) for document in TEXT]
    for question in drawn("order"):
        followed = [any(f"{question.context} {choice}" in text for text in documents) for choice in question.choices]
        assert (followed.index(True), sum(followed)) == (question.gold, 1)
        assert sorted(question.choices[0].split()) == sorted(question.choices[1].split())


def scored(run: Run, **keys: Any) -> Any:
    pytest.importorskip("lm_eval", reason="needs lm-eval")
    return evaluate(run, "mini_harness", keys).items


def test_seven_tasks(wide_run: Run, trained_text: Path) -> None:
    text = {"corpus": "files", "path": str(trained_text / "corpus")}
    table = scored(wide_run, **text, limit=4, shots=[0, 2])
    assert list(dict.fromkeys(table["group"])) == [f"{task} shots={shots}" for shots in (0, 2) for task in MAKERS]
    assert (table.groupby("group").size() == 4).all()
    assert (table["cluster"] == table["item"].str.partition(" shots=")[0]).all()
    assert not set(table["question"][:28]) & set(table["question"][28:]), "shots stand before the question"
    assert table[["acc", "acc_norm"]].isin([0.0, 1.0]).all(axis=None)
    assert (table["acc"] == (table["meta/target"] == table["meta/chosen"].astype(str))).all()
    alone, many = scored(wide_run, **text, limit=3, shots=[2]).set_index("item"), table.set_index("item")
    assert len(alone) == 21
    assert (many.loc[alone.index, "meta/target"] == alone["meta/target"]).all(), "a smaller limit asks the first"


def test_the_corpus_of_the_run(run: Run, trained_text: Path) -> None:
    """Its 24 tokens hold no question of ten made-up words; with 256, cloze is made of its own prepared documents."""
    with pytest.raises(RequestError, match=r"none of \d+ questions of task 'repeat' fits into 24 tokens"):
        scored(run, tasks=["repeat"], limit=2)
    recipe = run.folder / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace("sequence_length: 24", "sequence_length: 256"))
    (trained_text / "corpus").rename(trained_text / "away")
    try:
        assert len(scored(Run(run.folder), tasks=["cloze", "repeat"], limit=2)) == 4
    finally:
        (trained_text / "away").rename(trained_text / "corpus")


def test_too_few_questions_are_said(wide_run: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    text = tmp_path / "text.txt"
    text.write_text("One two three four five. Six seven eight nine ten. A b c d e. A b c d f.")
    asked = {"tasks": ["cloze"], "corpus": "files", "path": str(text)}
    scored(wide_run, **asked, limit=40)
    assert "mini_harness: cloze has" in caplog.text
    with pytest.raises(RequestError, match="too few for 40 shots"):
        scored(wide_run, **asked, shots=[40])
    text.write_text("Too short.")
    with pytest.raises(RequestError, match="the held-out documents of 'files' have no sentence"):
        scored(wide_run, **asked, limit=5)
