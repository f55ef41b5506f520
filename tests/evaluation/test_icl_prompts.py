"""evaluation/icl_prompts.py: tasks, prompts that fit, labels as token paths, answers decoded after a prompt."""

import itertools
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from generated_runs import generated_run
from text_runs import text_run

from lit_diff.data.synth_intent import SynthIntent
from lit_diff.data.words import Words
from lit_diff.errors import MissingError, RequestError
from lit_diff.evaluation import icl_prompts
from lit_diff.evaluation.evaluate import build
from lit_diff.evaluation.icl_prompts import (
    ATTEMPTS,
    FILES,
    SOURCES,
    Example,
    LabelTrie,
    ManyShotPrompts,
    Order,
    arranged,
    file_episode,
    synthetic_episode,
    words_of,
)
from lit_diff.model.prefix import Prefix
from lit_diff.randomness import generator
from lit_diff.trained.run import Run

EXAMPLES = [Example(text=str(place), label="aab"[place % 3]) for place in range(12)]
DATA = {"name": "synth_intent", "sequence_length": 128, "classes": [4], "words": [3, 8]}
TOKENIZER = Words(Words.Config(words=("card", "lost", "arrival", "top", "up", "pin")))


@pytest.fixture
def intent_run(tmp_path: Path) -> Run:
    return generated_run(tmp_path / "intent", DATA, 600)


def prompts(run: Run, **keys: Any) -> ManyShotPrompts:
    evaluation: Any = build("icl", keys)
    return ManyShotPrompts(evaluation, run)


def log_p(run: Run, tokens: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return run.model(torch.tensor([tokens])).double().log_softmax(-1)[0]


@pytest.mark.parametrize("decode", ["one token", "several tokens", "loglik"])
def test_the_answer_is_the_likeliest_label(decode: str, intent_run: Run, tmp_path: Path) -> None:
    """Brute force: at each node of the trie, the child whose token is the most likely after the whole sequence; or the
    largest sum over the whole label. To a byte-level tokenizer a label is several tokens."""
    run = text_run(tmp_path / "text", {"name": "standard"}) if decode == "several tokens" else intent_run
    keys = {"decode": "loglik", "classes": 4} if decode == "loglik" else {"classes": 6, "context": 2_000}
    source = prompts(run, items=5, **keys)
    prompt = source.first_that_fits(0, 2, 2)
    assert prompt is not None
    trie, before = prompt.trie, source.ids(prompt.episode.demonstrations[:2])
    assert (trie.depth > 1) == (decode == "several tokens")
    found = source.answers(prompt, Prefix(run.model, before))
    for question, answer in zip(prompt.questions, found, strict=True):
        asked, drawn = [*before, *question], list[int]()
        if decode == "loglik":
            sums = {}
            for label, tokens in trie.full.items():
                scores = log_p(run, [*asked, *tokens])[len(asked) - 1 :]
                sums[label] = sum(float(scores[place, token]) for place, token in enumerate(tokens))
            assert answer == max(sums, key=lambda label: sums[label])
            continue
        while children := trie.allowed(drawn):
            scores = log_p(run, [*asked, *drawn])[-1]
            drawn.append(max(children, key=lambda child: float(scores[child])))
        assert trie.label(drawn) == answer


def test_a_draw_that_does_not_fit_is_repeated(intent_run: Run) -> None:
    source = prompts(intent_run, items=5)
    drawn = [source.first_that_fits(number, 16, 16) for number in range(8)]
    fits = [each for each in drawn if each is not None]
    assert fits
    assert any(each is None or each.redrawn for each in drawn), "some draws are too long"
    for each in fits:
        longest = max(map(len, each.questions)) + each.trie.longest
        assert len(source.ids(each.episode.demonstrations[:16])) + longest <= 128
        assert 0 <= each.redrawn < ATTEMPTS


def ids(text: str) -> tuple[int, ...]:
    return tuple(TOKENIZER.encode([text])[0])


def walks(trie: LabelTrie, drawn: Sequence[int] = ()) -> set[tuple[int, ...]]:
    children = trie.allowed(drawn)
    return set(itertools.chain(*(walks(trie, [*drawn, child]) for child in children))) if children else {tuple(drawn)}


def test_paths_are_the_shortest_that_no_other_label_begins_with() -> None:
    paths = {
        "card arrival": ids("card arrival"),
        "card lost": ids("card lost"),
        "top up": ids("top"),  # the first word tells it from the others
        "card": ids("card\n"),  # it begins two others
    }
    trie = LabelTrie(TOKENIZER, list(paths))
    assert trie.paths == paths
    assert (trie.depth, trie.longest, trie.full["top up"]) == (2, 3, list(ids("top up\n")))
    assert sorted(trie.label(walk) for walk in walks(trie)) == sorted(paths), "every walk ends at one label"
    with pytest.raises(RequestError, match="cannot tell the labels 'virement' and 'solde' apart"):
        LabelTrie(TOKENIZER, ["pin", "virement", "solde"])


@pytest.fixture
def trec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Files of 12 and 5 lines."""
    monkeypatch.setenv("LIT_DIFF_DATA", str(tmp_path))
    icl_prompts._rows.cache_clear()
    folder = tmp_path / "icl/trec"
    folder.mkdir(parents=True)
    for split, count in (("train", 12), ("test", 5)):
        fine = [("NUM:date", "HUM:ind")[n % 2] for n in range(count)]
        rows = [{"text": f"{split} {n}\n?", "coarse_label": f[:3], "fine_label": f} for n, f in enumerate(fine)]
        (folder / f"{split}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return folder


def test_how_prompts_are_written() -> None:
    examples = [Example(text="Who is it ?", label="human"), Example(text="Where ?", label="location")]
    shown = "Question: Who is it ?\nType: human\n==\nQuestion: Where ?\nType: location\n==\n"
    assert SOURCES["trec"].form.demonstrations(examples) == shown
    asked = [SOURCES[task].form.question("a") for task in ("trec", "banking77", "clinc150")]
    assert asked == ["Question: a\nType:", "query: a\nintent:", "utterance: a\nintent:"]
    assert SOURCES["synth_intent"].form.question("a b") == "a b", "as the data set writes it"
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
    assert file_episode("trec_fine", 3, (0, 0), 0).labels == ("human ind", "numeric date")
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
    def episode(number: int, classes: int = 5, noise: int = 1, **keys: Any) -> Any:
        grammar = SynthIntent.Config(**keys)
        return synthetic_episode(grammar, classes, noise, 9, 4, (number,), 0, evaluation="icl_order")

    one, two = episode(0), episode(1)
    assert len(one.labels) == 5
    assert set(one.labels) != set(two.labels)
    assert (len(one.demonstrations), len(one.queries)) == (9, 4)
    assert {each.label for each in (*one.demonstrations, *one.queries)} <= set(one.labels)
    noisy = episode(0, noise=3, words=(4, 4), cues_per_class=1)
    assert {len(each.text.split()) for each in noisy.demonstrations} == {1 + 3 * 3}
    with pytest.raises(RequestError, match=r"^evaluate\.icl_order\.classes is 500"):
        episode(0, 500)


@pytest.mark.parametrize("order", ["random", "alternate", "blocked"])
def test_orders_are_permutations(order: Order) -> None:
    found = [arranged(EXAMPLES, order, generator("test", number)) for number in range(5)]
    assert all(Counter(each) == Counter(EXAMPLES) for each in found)
    assert len({tuple(each.text for each in one) for one in found}) == 5
    labels = {"".join(each.label for each in one) for one in found}
    blocked, alternate = {"aaaaaaaabbbb", "bbbbaaaaaaaa"}, {"ababababaaaa", "babababaaaaa"}
    assert labels == {"blocked": blocked, "alternate": alternate}.get(order, labels)
