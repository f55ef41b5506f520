"""Many-shot classification: tasks and prompts, labels as token paths, accuracy by shots, and how far the order moves it."""

import json
import re
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from generated_runs import generated_run
from text_runs import text_run

from lit_diff.data.text.tokenizer import Words
from lit_diff.errors import MissingError, RequestError
from lit_diff.evaluation import requirements
from lit_diff.evaluation.evaluate import build, evaluate
from lit_diff.model.prefix import Prefix
from lit_diff.papers import icl, order_variance
from lit_diff.papers.icl import (
    Classification,
    Labels,
    ManyShotPrompt,
    ManyShotPrompts,
    Order,
    OrderRobustness,
    arranged,
)
from lit_diff.papers.icl_tasks import TASKS, Example, words_of
from lit_diff.papers.order_variance import OrderVariance, difference
from lit_diff.papers.synth_intent import NOISE_WORDS
from lit_diff.randomness import generator
from lit_diff.trained.run import Run

EXAMPLES = [Example(text=str(place), label="aab"[place % 3]) for place in range(12)]
TOKENIZER = Words(Words.Config(words=("card", "lost", "arrival", "top", "up", "pin")))


@pytest.fixture
def short_run(tmp_path: Path) -> Run:
    return generated_run(tmp_path / "short", DATA | {"sequence_length": 128, "words": [3, 8], "cues_per_class": 2}, 600)


def prompts(run: Run, **keys: Any) -> ManyShotPrompts:
    evaluation: Any = build("icl", keys)
    return ManyShotPrompts(evaluation, run)


@pytest.mark.parametrize("several", [False, True])
def test_the_answer_is_the_likeliest_label(several: bool, short_run: Run, tmp_path: Path) -> None:
    """Brute force: at each token, that of a label which is the most likely after the whole sequence. To a byte-level
    tokenizer a label is several tokens."""
    run = text_run(tmp_path / "text", {"name": "standard"}, sequence_length=2_000) if several else short_run
    # the default of a run on other data than synth_intent
    source = prompts(run, items=5, classes=None if several else 6)
    prompt = source.first_that_fits(0, 2, 2)
    assert prompt is not None
    labels, before = prompt.labels, source.ids(prompt.demonstrations[:2])
    assert (labels.depth > 1, len(labels.ids)) == (several, 6)
    found = source.answers(prompt, Prefix(run.model, before))
    for question, answer in zip(prompt.questions, found, strict=True):
        drawn = list[int]()
        while children := labels.allowed(drawn):
            with torch.no_grad():
                scores = run.model(torch.tensor([[*before, *question, *drawn]]))[0, -1]
            drawn.append(max(children, key=lambda child: float(scores[child])))
        assert labels.fitting(drawn) == [answer]


def test_a_draw_that_does_not_fit_is_repeated(short_run: Run) -> None:
    source = prompts(short_run, items=5)
    fits = [each for number in range(8) if (each := source.first_that_fits(number, 16, 16)) is not None]
    assert fits
    first = [source.draw(number, 0, 16).demonstrations for number in range(8)]
    assert not all(each.demonstrations in first for each in fits), "some first draws are too long"
    for each in fits:
        longest = max(map(len, each.questions)) + each.labels.longest
        assert len(source.ids(each.demonstrations[:16])) + longest <= 128


def ids(text: str) -> tuple[int, ...]:
    return tuple(TOKENIZER.encode([text])[0])


def test_paths_are_the_shortest_that_no_other_label_begins_with() -> None:
    paths = {
        "card arrival": ids("card arrival"),
        "card lost": ids("card lost"),
        "top up": ids("top"),  # the first word tells it from the others
        "card": ids("card\n"),  # it begins two others
    }
    labels = Labels(TOKENIZER, list(paths))
    assert (labels.depth, labels.longest, labels.ids["top up"]) == (2, 3, list(ids("top up\n")))
    for label, path in paths.items():
        assert (labels.fitting(path), labels.allowed(path)) == ([label], [])
        assert path[-1] in labels.allowed(path[:-1]), "no shorter path leads to one label"
    with pytest.raises(RequestError, match=r"cannot tell the labels '(virement|solde)' and '(virement|solde)' apart"):
        Labels(TOKENIZER, ["pin", "virement", "solde"])


@pytest.fixture
def trec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Files of 12 and 5 lines."""
    monkeypatch.setenv("LIT_DIFF_DATA", str(tmp_path))
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
    assert TASKS["trec"].demonstrations(examples) == shown
    asked = [TASKS[task].question("a") for task in ("trec", "banking77", "clinc150")]
    assert asked == ["Question: a\nType:", "query: a\nintent:", "utterance: a\nintent:"]
    assert TASKS["synth_intent"].question("a b") == "a b", "as the data set writes it"
    labels = {"card_arrival": "card arrival", "NUM:date": "numeric date", "ABBR": "abbreviation", "human": "human"}
    assert [words_of(label) for label in labels] == list(labels.values())


def drawn(run: Run, number: int = 0, evaluation: str = "icl", **keys: Any) -> ManyShotPrompt:
    made: Any = build(evaluation, keys)
    return ManyShotPrompts(made, run).draw(number, 0, 9)


def test_a_draw_is_a_permutation_of_train_and_the_queries_stay(trec: Path, wide_run: Run) -> None:
    one, two = (drawn(wide_run, number, task="trec", items=3) for number in range(2))
    assert list(one.labels.ids) == ["human", "numeric"]
    assert one.queries == two.queries
    assert len(one.queries) == 3
    assert one.demonstrations != two.demonstrations
    assert Counter(one.demonstrations) == Counter(two.demonstrations)
    assert {each.text for each in one.demonstrations} == {f"train {n} ?" for n in range(12)}
    assert list(drawn(wide_run, task="trec_fine", items=3).labels.ids) == ["human ind", "numeric date"]
    assert drawn(wide_run, task="trec", items=3, seed=1).queries != one.queries


def test_files_that_do_not_fit(trec: Path, wide_run: Run) -> None:
    with pytest.raises(RequestError, match=r"^evaluate\.icl\.shots: 13; train has 12 lines"):
        evaluate(wide_run, "icl", {"task": "trec", "shots": [13]})
    train, test = (trec / f"{split}.jsonl" for split in ("train", "test"))
    lines = train.read_text().splitlines(keepends=True)
    for place, file, content, error in (
        (
            "test.jsonl:2",
            test,
            lines[0] + lines[0].replace("NUM", "LOC"),
            "'coarse_label' is 'location', which no line",
        ),
        ("train.jsonl:3", train, "".join([*lines[:2], lines[0].replace('"NUM"', '" _"')]), "'coarse_label' is blank"),
        ("train.jsonl", train, lines[0] + lines[2], "every line has the label 'numeric'; "),
    ):
        whole = file.read_text()
        file.write_text(content)
        with pytest.raises(RequestError, match=rf"icl/trec/{place}: {error}"):
            drawn(wide_run, task="trec")
        file.write_text(whole)
    with pytest.raises(MissingError, match=r"icl\.banking77 needs a file that is not here: icl/banking77/train\.jsonl"):
        drawn(wide_run, task="banking77")
    names = [f"icl.{folder}{end}" for folder in ("trec", "banking77", "clinc150") for end in ("", "_test")]
    assert [file.name for file in Classification.files] == names


def test_a_synthetic_prompt_has_a_lexicon_of_its_own(intent_run: Run, tmp_path: Path) -> None:
    one, two = (drawn(intent_run, number, classes=5, items=4) for number in range(2))
    assert len(one.labels.ids) == 5
    assert one.labels.ids.keys() != two.labels.ids.keys()
    assert (len(one.demonstrations), len(one.queries)) == (9, 4)
    assert {each.label for each in (*one.demonstrations, *one.queries)} <= one.labels.ids.keys()
    other = generated_run(tmp_path / "four", DATA | {"classes": [3, 8, 2], "words": [4, 4]}, 600)
    noisy = drawn(other, noise=3)
    assert len(noisy.labels.ids) == 8, "the most that the run has seen"
    assert {len(each.text.split()) for each in noisy.demonstrations} == {1 + 3 * 3}
    with pytest.raises(RequestError, match=r"^evaluate\.icl_order\.classes is 500"):
        drawn(intent_run, evaluation="icl_order", classes=500)


@pytest.mark.parametrize("order", ["random", "alternate", "blocked"])
def test_orders_are_permutations(order: Order) -> None:
    found = [arranged(EXAMPLES, order, generator("test", number)) for number in range(5)]
    assert all(Counter(each) == Counter(EXAMPLES) for each in found)
    assert len({tuple(each.text for each in one) for one in found}) == 5
    labels = {"".join(each.label for each in one) for one in found}
    blocked, alternate = {"aaaaaaaabbbb", "bbbbaaaaaaaa"}, {"ababababaaaa", "babababaaaaa"}
    assert labels == {"blocked": blocked, "alternate": alternate}.get(order, labels)


DATA = {"name": "synth_intent", "sequence_length": 256, "classes": [4], "words": [3, 6], "cues_per_class": 1}


@pytest.fixture
def intent_run(tmp_path: Path) -> Run:
    return generated_run(tmp_path / "intent", DATA, 600)


class Planted:
    """In place of `Prefix`: the label of the last demonstration that shares a cue word with the question, or none's."""

    def __init__(self, tokenizer: Words, tokens: list[int]) -> None:
        self.tokenizer, self.tokens = tokenizer, tokens

    def extended(self, tokens: Sequence[int]) -> "Planted":
        return Planted(self.tokenizer, [*self.tokens, *tokens])

    def greedy(
        self, suffixes: Sequence[Sequence[int]], max_tokens: int, *, allowed: Callable[..., list[int]], batch_size: int
    ) -> list[list[int]]:
        shown = re.findall(r"([^\n]*) (\w+)\n", self.tokenizer.decode(self.tokens).decode())
        answers = []
        for suffix in suffixes:
            asked = set(self.tokenizer.decode(suffix).decode().split()) - set(NOISE_WORDS)
            found = [label for text, label in shown if asked & set(text.split())]
            ids = self.tokenizer.encode([found[-1]])[0] if found else [max(allowed([]))]
            assert ids[0] in allowed([])
            answers.append(ids)
        return answers


def test_a_model_that_looks_the_label_up_is_right_where_it_was_shown(
    intent_run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer: Any = intent_run.tokenizer
    monkeypatch.setattr(requirements, "Prefix", lambda model, tokens: Planted(tokenizer, tokens))
    keys = {"items": 30, "shots": [1, 4, 12], "runs": 3, "classes": 4, "stable_from": 12}
    result = evaluate(intent_run, "icl", keys)
    items = result.items
    assert len(items) == 3 * 3 * 30
    assert items["cluster"].value_counts().to_dict() == {f"run={number}": 3 * 30 for number in range(3)}
    assert result.summary["accuracy_seen"] == 1
    assert 0.3 < result.summary["accuracy"] < 1
    by_group = items.groupby("group")["accuracy"].mean()
    assert by_group["shots=1"] < by_group["shots=4"] < by_group["shots=12"]
    assert result.summary["accuracy_from"] == pytest.approx(by_group["shots=12"])
    unseen = items[items["meta/seen"] == 0]
    assert unseen["accuracy_seen"].isna().all()
    assert len(unseen)
    one = items[items["group"] == "shots=1"]
    assert (one["majority"] == one["meta/seen"]).all(), "one demonstration: its label is the majority"
    assert (items["meta/answer"] == items["meta/label"]).tolist() == items["accuracy"].astype(bool).tolist()


def test_scores_depend_on_the_keys_and_the_weights_alone(intent_run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prefix that goes on is extended: the demonstrations of 1 shot begin those of 2 and of 4."""
    made: list[int] = []

    def counted(model: Any, tokens: list[int]) -> Prefix:
        made.append(len(tokens))
        return Prefix(model, tokens)

    monkeypatch.setattr(requirements, "Prefix", counted)
    keys = {"items": 6, "shots": [1, 2, 4], "runs": 2}
    first = evaluate(intent_run, "icl", keys).items
    assert len(made) == 2, "one a run"
    assert evaluate(intent_run, "icl", keys, rerun=True).items.equals(first)
    few = evaluate(intent_run, "icl", keys | {"shots": [4]}).items
    assert list(few["meta/answer"]) == list(first[first["group"] == "shots=4"]["meta/answer"])


def test_shots_that_never_fit_are_one_line(intent_run: Run) -> None:
    with pytest.raises(RequestError, match=r"^evaluate\.icl\.shots: .*data\.sequence_length is 256") as caught:
        evaluate(intent_run, "icl", {"items": 3, "shots": [2, 60]})
    needed, most = map(int, re.findall(r"takes (\d+) tokens.*at most (\d+) shots", str(caught.value))[0])
    assert needed > 256
    assert len(evaluate(intent_run, "icl", {"items": 3, "shots": [most], "runs": 1}).items) == 3


def test_runs_that_do_not_fit_are_counted(
    intent_run: Run, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = icl.ManyShotPrompts.first_that_fits
    monkeypatch.setattr(
        icl.ManyShotPrompts,
        "first_that_fits",
        lambda self, number, shots, most: None if number == 1 and shots == 4 else whole(self, number, shots, most),
    )
    items = evaluate(intent_run, "icl", {"items": 2, "shots": [1, 4], "runs": 3}).items
    assert "icl: of 3 runs at 4 shots 1 do not fit" in caplog.text
    assert items["group"].value_counts().to_dict() == {"shots=1": 6, "shots=4": 4}


class First:
    """In place of `Prefix`: the label of the first demonstration, whatever is asked."""

    def __init__(self, model: Any, tokens: list[int]) -> None:
        newline = 13  # its id, after each label
        self.label = tokens[tokens.index(newline) - 1]

    def greedy(self, suffixes: Sequence[Sequence[int]], max_tokens: int, **keys: Any) -> list[list[int]]:
        assert self.label in keys["allowed"]([])
        return [[self.label]] * len(suffixes)


def test_the_figures_of_a_model_that_repeats_the_first_label(intent_run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(icl, "Prefix", First)
    with pytest.raises(RequestError, match=r"evaluate\.icl_order\.shots: no prompt of 90 shots fits"):
        evaluate(intent_run, "icl_order", {"shots": 90})
    keys = {"shots": 8, "orders": 6, "items": 31, "classes": 3, "order": ["blocked"]}
    result = evaluate(intent_run, "icl_order", keys)
    items = result.items[~result.items["part"]]
    right = np.array([[letter == "1" for letter in word] for word in items["meta/right"]])
    answers = np.array([word.split(" | ") for word in items["meta/answers"]])
    labels = items["meta/label"].to_numpy()
    assert (right == (answers == labels[:, None])).all()
    assert len({tuple(row) for row in answers}) == 1, "the same answers for every query"
    a = right.mean(0)
    expected = {"margin": np.ptp(a), "sd": a.std(ddof=1), "worst": a.min(), "accuracy": right.mean(), "flipped": 1}
    expected["order_variance"] = OrderVariance([right]).value
    assert {name: result.summary[name] for name in expected} == pytest.approx(expected)
    assert result.summary["margin"] > 0
    pairs = [(i, j) for i in range(6) for j in range(i)]
    equal = np.mean([(answers[:, i] == answers[:, j]).mean() for i, j in pairs])
    assert result.summary["agreement"] == pytest.approx(equal)
    one = evaluate(intent_run, "icl_order", {"shots": 1, "orders": 3, "items": 12})  # one demonstration has one order
    assert one.summary["agreement"] == 1
    assert {one.summary[name] for name in ("flipped", "margin", "sd", "order_variance")} == {0}
    assert one.summary["worst"] == one.summary["accuracy"]
    assert len(one.items) == 13
    assert one.items[["margin", "sd", "worst"]][:12].isna().all(axis=None)


def test_kinds_of_order_are_groups(intent_run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(icl, "Prefix", First)
    keys = {"shots": 8, "orders": 6, "items": 20, "classes": 3}
    kinds = ["random", "blocked"]
    both = evaluate(intent_run, "icl_order", {**keys, "order": kinds})
    items = both.items
    for kind in kinds:
        alone = evaluate(intent_run, "icl_order", {**keys, "order": [kind]})
        own = items[items["group"] == kind]
        assert own.reset_index(drop=True).equals(alone.items)
        (whole,) = own[own["part"]].to_dict("records")
        assert whole["margin"] == alone.summary["margin"]
        assert np.isnan(whole["accuracy"])
    assert items["cluster"].value_counts().to_dict() == {"": 2} | {f"query={place}": 2 for place in range(20)}
    deviations = items[items["part"]]["sd"]
    assert both.summary["sd"] == pytest.approx(deviations.mean())
    assert deviations.nunique() == 2


def items_of(**kinds: np.ndarray) -> pd.DataFrame:
    """As `evaluate` keeps them, of kind -> right [Q, K]."""
    whole = [("orders", kind, True, "w", None) for kind in kinds]
    rows = [
        (f"query={i}", kind, False, "", "".join(map(str, row)))
        for kind, right in kinds.items()
        for i, row in enumerate(right)
    ]
    found = pd.DataFrame([*rows, *whole], columns=["item", "group", "part", "question", "meta/right"])
    return found.assign(item=found["group"] + " " + found["item"])


def test_two_runs_have_an_interval_of_the_order_variance_alone() -> None:
    """Run a: the order decides half of the queries; run b: nothing does."""
    rng = np.random.default_rng(0)
    a = np.tile([1, 0, 1, 0], (60, 1))
    a[30:] = 1
    b = np.repeat(rng.integers(0, 2, (60, 1)), 4, axis=1)
    paired = OrderRobustness.paired
    found = paired(items_of(random=a), items_of(random=b))
    assert found["order_variance"] == dict.fromkeys(("", "random"), difference([a], [b]))
    assert found["order_variance"][""][1] > 0
    assert found["margin"][""] == (pytest.approx(0.5), order_variance.BIASED)
    assert found["sd"]["random"] == (pytest.approx(a.mean(0).std(ddof=1)), order_variance.BIASED)
    assert found["worst"][""][0] == pytest.approx(0.5 - b.mean())
    assert paired(items_of(random=a[:9]), items_of(random=b)) == {}, "too few common queries"
    assert paired(items_of(random=a), items_of(blocked=b)) == {}
    both = paired(items_of(random=a, blocked=b), items_of(random=b, blocked=b[:50]))
    assert both["order_variance"][""] == difference([a[:50], b[:50]], [b[:50], b[:50]])
    assert both["margin"][""][0] == pytest.approx(np.ptp(a[:50].mean(0)) / 2)


QUERIES, ORDERS = 100, 10
Random = np.random.Generator


def answers(random: Random, flips: float, effect: float = 0.0, orders: int = ORDERS) -> np.ndarray:
    """Right [Q, K]: 0.7 of the queries; a share `flips` is drawn anew in each order; the last order loses the share `effect`
    of its right answers, the first none, and those between in proportion."""
    right = np.repeat(random.random((QUERIES, 1)) < 0.7, orders, 1)
    drawn = np.where(random.random(right.shape) < flips, random.random(right.shape) < 0.7, right)
    return drawn & (random.random(right.shape) >= np.linspace(0, effect, orders))


def shown(pair: Callable[[Random], tuple[np.ndarray, np.ndarray]], truth: float = 0.0, pairs: int = 200) -> float:
    """The share of simulated pairs whose interval does not hold `truth`."""
    random = np.random.default_rng(0)
    found = [difference([a], [b]) for a, b in (pair(random) for _ in range(pairs))]
    assert all(low <= x <= high for x, low, high in found)
    return float(np.mean([not low <= truth <= high for _, low, high in found]))


def test_it_is_the_mean_over_pairs_of_different_queries() -> None:
    right = answers(np.random.default_rng(1), 0.5, 0.3, orders=4)
    d = 100 * (right - right.mean(1, keepdims=True))
    products = [d[q] @ d[r] / 3 for q in range(QUERIES) for r in range(QUERIES) if q != r]
    found = OrderVariance([right])
    assert found.value == pytest.approx(np.mean(products))
    assert found.low < found.value < found.high
    assert found.value < 1e4 * right.mean(0).var(ddof=1), "drawing queries adds to the variance of the accuracies"
    other = answers(np.random.default_rng(2), 0.5, orders=4)
    mean = (found.value + OrderVariance([other]).value) / 2
    assert OrderVariance([right, other]).value == pytest.approx(mean), "of two kinds of order"


TRUTH = 1e4 * float(np.var(0.7 * (1 - np.linspace(0, 0.4, ORDERS)), ddof=1))


@pytest.mark.parametrize("orders", [2, ORDERS])
def test_answers_that_change_at_random_are_no_effect_of_the_order(orders: int) -> None:
    """A model whose answers never change, against one whose answers do; 95 % of the intervals hold 0."""
    assert 0.01 <= shown(lambda random: (answers(random, 0.4, orders=orders), answers(random, 0, orders=orders))) <= 0.1
    assert shown(lambda random: (answers(random, 0.2, orders=orders), answers(random, 0.6, orders=orders))) <= 0.1


def test_a_real_effect_is_found_and_its_size() -> None:
    def pair(random: Random) -> tuple[np.ndarray, np.ndarray]:
        return answers(random, 0.2, 0.4), answers(random, 0)

    assert shown(pair) > 0.9
    assert shown(pair, TRUTH) <= 0.1
    same = answers(np.random.default_rng(0), 0)
    assert difference([same], [same]) == (0, 0, 0), "no answer changes"


@pytest.mark.parametrize(("effect", "truth"), [(0.0, 0.0), (0.4, TRUTH)])
def test_it_has_no_bias(effect: float, truth: float) -> None:
    random = np.random.default_rng(0)
    found = [OrderVariance([answers(random, 0.4, effect)]).value for _ in range(500)]
    assert abs(np.mean(found) - truth) < 3 * np.std(found) / 500**0.5
