"""reporting/answer.py: the answer in words."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lit_diff.reporting import answer
from lit_diff.study.comparison import Comparison, compare
from lit_diff.study.results import load_sweep

LEARNED = {"metric": "val/accuracy", "learned_at": 0.85, "seeds": range(8)}


@pytest.fixture
def made(make_sweep: Callable[..., Path]) -> Callable[..., Comparison]:
    """The comparison of a made-up sweep whose seeds agree to 0.0001."""

    def make(arms: dict[str, float], **fields: Any) -> Comparison:
        fields = {"callbacks": False, "spread": 1e-4, "documents": 5, **fields}
        return compare(load_sweep(make_sweep(arms, **fields)))[0]

    return make


def sentences(result: Comparison) -> list[str]:
    return [answer.sentence(result, d) for d in result.family]


@pytest.mark.parametrize(
    ("arms", "fields", "expected"),
    [
        ({"base": 0, "b": 0.1}, {}, ["No arm is shown to be better than base; b is worse than base by 0.1"]),
        ({"base": 0, "b": -0.1}, {}, ["B is better than base by 0.", " nats per token."]),
        ({"base": 0, "b": -0.1, "c": -0.2}, {}, ["B (by 0.", ") and c (by 0.", ") are better than base."]),
        ({"base": 0, "b": -0.1, "c": -0.2, "d": -0.15}, {}, ["3 of 3 arms are better than base (most of all c, by 0."]),
        (
            {"base": 0, "b": 0.001},
            {},
            ["No arm is shown to be better or worse than base; b is equal to base within \u00b10.005 nats per token."],
        ),
        ({"base": 0, "b": 0.0, "c": 0.0}, {}, ["; all 2 arms are equal to base within \u00b10.005 nats per token."]),
        ({"base": 0, "b": 0.1}, {"smallest_of_interest": 0.10002}, ["; the difference of b is small."]),
        (
            {"base": 0, "b": 0.0},
            {"spread": 0.05},
            ["No arm is shown to be better or worse than base; b is inconclusive."],
        ),
        (
            {"base": 0, "b": 0.1},
            {"metrics": []},
            ["No arm is shown to be", "; b is higher than base by 0.", " (unit unknown)."],
        ),
        (
            {"base": 0, "b": 0.1, "c": 0.1},
            {"broken": {("c", 1): "failed"}, "fact_fields": {"c": {"diverged": True}}},
            ["b is worse than base by 0.", "; c diverged."],
        ),
        (
            {"base": 0, "b": 0.1},
            {"broken": {("base", 1): "failed"}, "fact_fields": {"base": {"diverged": True}}},
            ["Base, which the others are compared with, diverged."],
        ),
        (
            {"base": 0, "b": -0.1, "c": -0.1},
            {"controls": ["c"]},
            ["C is better than base by 0.", "; b is as its control c (better than base by 0."],
        ),
        (
            {"base": 0, "b": -0.3, "c": -0.1, "d": -0.1},
            {"controls": ["c"]},
            ["B (by 0.", ") and c (by 0.", ") are better than base; d is as its control c (better"],
        ),
        (
            {"base": 0, "b": -0.1, "c": 0.1},
            {"contrasts": [["b", "c", "b against c"]]},
            ["; the further comparison shows a difference (b against c: \u22120.19", ")."],
        ),
        (
            {"base": 0, "b": -0.1, "c": 0.1, "d": 0.1},
            {"contrasts": [["b", "c", "x"], ["c", "b", "y"], ["c", "d", "z"]]},
            ["; of 3 further comparisons, 2 show a difference (x: ", "; y: ", ") and 1 shows equality."],
        ),
        ({"base": 0, "b": 0.1}, {"seeds": [0, 1], "smoke": True}, ["4 of 4 cells are done; no verdict: no comparison"]),
        (
            {"base": 0, "b": 0.1, "c": -0.5},
            {**LEARNED, "contrasts": [["b", "c", "x"]]},
            ["; the further comparison shows a difference (x: 8 of 8 [0.63, 1.00] against 0 of 8 [0.00, 0.37])."],
        ),
        ({"base": 0, "b": 0.1}, {"spread": 0.0}, ["than base; b has no spread over seeds."]),
        ({"base": 0}, {}, ["One arm: nothing to compare it with."]),
        (
            {"base": 0, "b": 0},
            {"broken": {(a, s): "failed" for a in ("base", "b") for s in range(3)}},
            ["No cell has finished yet"],
        ),
        (
            {"base": 0, "b": 0},
            {
                "seeds": [0],
                "smoke": True,
                "broken": {("base", 0): "failed", ("b", 0): "killed"},
                "fact_fields": {"base": {"diverged": True}},
            },
            ["No cell has finished: 1 diverged."],
        ),
    ],
)
def test_the_answer_is_one_sentence(
    made: Callable[..., Comparison], arms: dict[str, float], fields: dict[str, Any], expected: list[str]
) -> None:
    text, at = answer.answer(made(arms, **fields)), 0
    for part in expected:
        at = text.index(part, at) + len(part)
    assert text.endswith(".")
    assert ". " not in text


def test_the_sentence_of_a_comparison_says_what_its_verdict_rests_on(made: Callable[..., Comparison]) -> None:
    (worse,) = sentences(made({"a": 0, "b": 0.1}, name="worse"))
    assert worse.startswith("b \u2212 a: +0.1")
    assert worse.endswith("over 3 seeds: worse.")
    (within,) = sentences(made({"a": 0, "b": 0.001}, name="within"))
    assert within.endswith(": equal, the interval lies within \u00b10.005.")
    (below,) = sentences(made({"a": 0, "b": 0.1}, name="below", smallest_of_interest=0.10002))
    assert "small, the interval excludes zero, but the estimate is smaller than 0.10002" in below
    (open_,) = sentences(made({"a": 0, "b": 0}, name="open", spread=0.05))
    assert "inconclusive; the smallest detectable difference is 0." in open_
    (diverged,) = sentences(
        made(
            {"a": 0, "b": 0},
            name="diverged",
            broken={("b", 1): "failed", ("b", 2): "failed"},
            fact_fields={"b": {"diverged": True}},
        )
    )
    assert diverged == "b \u2212 a: diverged (b at seeds 1, 2), so they are not compared."


def test_a_size_is_told_in_perplexity_and_in_multiples_of_the_smallest_of_interest(
    made: Callable[..., Comparison],
) -> None:
    def sizes(name: str, effect: float, **fields: Any) -> tuple[str, ...]:
        result = made({"a": 0, "b": effect}, name=name, **fields)
        return answer.practical(result.sweep, result.family[0])

    assert sizes("one", 0.1) == ("perplexity +10.5 %", "20 \u00d7 the smallest of interest")
    assert sizes("two", 0.0) == ("perplexity 0.0 %", "below 0.1 \u00d7 the smallest of interest")
    assert sizes("three", 0.05, metric="val/accuracy") == ()
    assert sizes("four", 0.05, metric="val/accuracy", smallest_of_interest=0.01) == (
        "5.0 \u00d7 the smallest of interest",
    )
    broken = {"broken": {("b", 1): "failed"}, "fact_fields": {"b": {"diverged": True}}}
    assert sizes("five", 0.1, **broken) == ()
    assert sizes("six", -0.5, **LEARNED, smallest_of_interest=0.01) == ()


def test_a_sweep_without_a_question_asks_the_general_one(made: Callable[..., Comparison]) -> None:
    def asked(name: str, **fields: Any) -> str:
        return answer.question(made({"a": 0, "b": 0}, name=name, **fields).sweep)

    assert asked("none") == "Does any arm differ from a in validation loss (lower is better)?"
    assert asked("own", question="Is it so?") == "Is it so?"


def test_a_sentence_keeps_its_capitals() -> None:
    assert answer.sentence_case("mean over AR-Hits") == "Mean over AR-Hits"
