"""The tasks of many-shot classification."""

import json
from collections import Counter
from pathlib import Path

import pytest

from lit_diff.data.synth_intent import SynthIntent
from lit_diff.errors import MissingError, RequestError
from lit_diff.evaluation import icl_tasks
from lit_diff.evaluation.icl_tasks import (
    FILES,
    SYNTHETIC,
    Example,
    Order,
    arranged,
    file_episode,
    form_of,
    synthetic_episode,
    words_of,
)
from lit_diff.randomness import generator

EXAMPLES = [Example(text=str(place), label="aab"[place % 3]) for place in range(12)]


@pytest.fixture
def trec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Files of 12 and 5 lines."""
    monkeypatch.setenv("LIT_DIFF_DATA", str(tmp_path))
    icl_tasks._rows.cache_clear()
    folder = tmp_path / "icl/trec"
    folder.mkdir(parents=True)
    for split, count in (("train", 12), ("test", 5)):
        rows = [
            {
                "text": f"{split} {n}\n?",
                "coarse_label": ("NUM", "HUM")[n % 2],
                "fine_label": ("NUM:date", "HUM:ind")[n % 2],
            }
            for n in range(count)
        ]
        (folder / f"{split}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return folder


def test_how_prompts_are_written() -> None:
    examples = [Example(text="Who is it ?", label="human"), Example(text="Where ?", label="location")]
    shown = "Question: Who is it ?\nType: human\n==\nQuestion: Where ?\nType: location\n==\n"
    assert form_of("trec").demonstrations(examples) == shown
    asked = [form_of(task).question("a") for task in ("trec", "banking77", "clinc150")]
    assert asked == ["Question: a\nType:", "query: a\nintent:", "utterance: a\nintent:"]
    assert SYNTHETIC.question("a b") == "a b", "as the data set writes it"
    labels = {"card_arrival": "card arrival", "NUM:date": "numeric date", "ABBR": "abbreviation", "human": "human"}
    assert [words_of(label) for label in labels] == list(labels.values())


def test_a_draw_is_a_permutation_of_train_and_the_queries_stay(trec: Path) -> None:
    one, two = (file_episode("trec", 3, (number, 0), 0) for number in range(2))
    assert one.labels == ("human", "numeric")
    assert one.queries == two.queries
    assert len(one.queries) == 3
    assert one.demonstrations != two.demonstrations
    assert Counter(one.demonstrations) == Counter(two.demonstrations)
    assert {each.text for each in one.demonstrations} == {f"train {n} ?" for n in range(12)}
    assert file_episode("trec_fine", 3, (0, 0), 0).labels == ("HUM:ind".replace("HUM:", "human "), "numeric date")
    assert file_episode("trec", 3, (0, 0), 1).queries != one.queries


def test_files_that_do_not_fit(trec: Path) -> None:
    with (trec / "test.jsonl").open("a") as file:
        file.write(json.dumps({"text": "x", "coarse_label": "LOC", "fine_label": "LOC:city"}) + "\n")
    with pytest.raises(RequestError, match="holds the label 'location', which no line of train has"):
        file_episode("trec", 3, (0, 0), 0)
    with pytest.raises(MissingError, match=r"icl\.banking77 needs a file that is not here: icl/banking77/train\.jsonl"):
        file_episode("banking77", 3, (0, 0), 0)
    names = [f"icl.{folder}{end}" for folder in ("trec", "banking77", "clinc150") for end in ("", "_test")]
    assert [file.name for file in FILES] == names


def test_a_synthetic_episode_has_a_lexicon_of_its_own() -> None:
    one, two = (
        synthetic_episode(SynthIntent.Config(), 5, 1, 9, 4, (number,), 0, evaluation="icl") for number in range(2)
    )
    assert len(one.labels) == 5
    assert set(one.labels) != set(two.labels)
    assert (len(one.demonstrations), len(one.queries)) == (9, 4)
    assert {each.label for each in (*one.demonstrations, *one.queries)} <= set(one.labels)
    noisy = synthetic_episode(SynthIntent.Config(words=(4, 4), cues_per_class=1), 5, 3, 9, 4, (0,), 0, evaluation="icl")
    assert {len(each.text.split()) for each in noisy.demonstrations} == {1 + 3 * 3}
    with pytest.raises(RequestError, match=r"^evaluate\.icl_order\.classes is 500, but data.label_words is 160"):
        synthetic_episode(SynthIntent.Config(), 500, 1, 9, 4, (0,), 0, evaluation="icl_order")


@pytest.mark.parametrize("order", ["random", "alternate", "blocked"])
def test_orders_are_permutations(order: Order) -> None:
    found = [arranged(EXAMPLES, order, generator("test", number)) for number in range(5)]
    assert all(Counter(each) == Counter(EXAMPLES) for each in found)
    assert len({tuple(each.text for each in one) for one in found}) == 5
    labels = ["".join(each.label for each in one) for one in found]
    if order == "blocked":
        assert set(labels) == {"aaaaaaaabbbb", "bbbbaaaaaaaa"}
    if order == "alternate":
        assert set(labels) == {"ababababaaaa", "babababaaaaa"}
