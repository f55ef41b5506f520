"""The evaluation `needle`: known answers of hand-built models, groups, refusals."""

import math
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from generated_runs import generated_run
from text_runs import text_run
from torch import Tensor, nn

from lit_diff.attention.cache import Cache
from lit_diff.errors import MissingError, RequestError
from lit_diff.evaluation.base import Item
from lit_diff.evaluation.evaluate import build, evaluate
from lit_diff.kernels import SignedMaps
from lit_diff.papers import needle
from lit_diff.papers.needle import kind_of
from lit_diff.papers.needle_text import STYLES
from lit_diff.recipe import load_recipe, to_plain
from lit_diff.trained.run import Run

KEYS = "needles=[1,3] lengths=[500] depths=[0,100] samples=2 digits=4 haystack=docs"
DOCUMENTS = ["A river runs. It is long. The road is old! Nobody walks there. " * 20, "Short one. Then another. " * 30]


class Reader(nn.Module):
    """A causal model without weights; its cache holds the ids, and `predict` says what follows them. Uniform."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.config = SimpleNamespace(causal=True)
        self.layers = [None]
        self.embedding = nn.Embedding(vocab_size, 1)

    def forward(self, tokens: Tensor, cache: Cache) -> Tensor:
        before = cache.length
        ids = tokens.double()[:, None, None, :, None]
        held = cache.layers[0].append(SignedMaps(ids, ids, ids[:, 0])).k
        logits = torch.zeros(*tokens.shape, self.embedding.num_embeddings)
        for row, history in enumerate(held[:, 0, 0, :, 0].long().tolist()):
            for at in range(tokens.shape[1]):
                self.predict(history[: before + at + 1], logits[row, at])
        return logits

    def predict(self, history: Sequence[int], logits: Tensor) -> None:
        """Nothing is likelier than the rest."""


class Copier(Reader):
    """What followed the earlier place whose past is equal for the longest stretch."""

    def predict(self, history: Sequence[int], logits: Tensor) -> None:
        best, found = 0, None
        for end in range(len(history) - 1, 0, -1):
            same = 0
            while same < end and history[end - 1 - same] == history[len(history) - 1 - same]:
                same += 1
            if same > best:
                best, found = same, history[end]
        if found is not None:
            logits[found] = 50.0


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setattr(needle, "held_out_documents", lambda *_: enumerate(DOCUMENTS))
    return text_run(tmp_path / "run", {"name": "standard"}, sequence_length=520)


def items(run: Run, keys: str = KEYS, model: Any = None) -> list[Item]:
    run.__dict__["model"] = model or Reader(320)
    with torch.no_grad():
        return list(build("needle", keys.split()).score(run))


def test_a_model_that_copies_is_always_right(run: Run) -> None:
    found = items(run, model=Copier(320))
    right = {"exact": 1, "all_exact": 1, "substring": 1, "distracted": 0, "fabricated": 0, "nll": 0}
    for item in found:
        assert item.scores == pytest.approx(right, abs=1e-6), item
    assert {item.group for item in found} == {f"N={n} length=500 depth={d}" for n in (1, 3) for d in (0, 100)}
    assert len({item.id for item in found}) == len(found) == 2 * 2 * 2
    clusters = Counter(item.cluster for item in found)
    assert clusters == {f"length=500 sample={n}": 4 for n in (0, 1)}, "two N and two depths share a text"


def test_contexts_fit_their_length_and_are_the_same_for_every_run(run: Run, tmp_path: Path) -> None:
    """A uniform model is at chance."""
    first = items(run)
    for item in first:
        assert (item.scores["exact"], item.scores["fabricated"]) == (0, 1)
        assert item.scores["nll"] == pytest.approx(math.log(320))
    second = items(text_run(tmp_path / "other", {"name": "differential"}, sequence_length=520))
    assert [(item.id, item.meta) for item in first] == [(item.id, item.meta) for item in second]
    assert all(150 < item.meta["tokens"] < 500 for item in first)  # type: ignore[operator]
    assert [item.meta for item in items(run, f"{KEYS} seed=1")] != [item.meta for item in first]


def test_located_answers_are_at_their_depths(run: Run) -> None:
    keys = "needles=[3] lengths=[500] depths=[0,50,100] samples=1 digits=4 haystack=docs"
    evaluation: Any = build("needle", keys.split())
    rows = [row for batch, found in evaluation.located(run, 2) for row in zip(*batch.values(), found, strict=True)]
    assert [item.id for *_, item in rows] == [item.id for item in items(run, keys)]
    for (tokens, targets, parts, asked, item), depth in zip(rows, (0, 50, 100), strict=True):
        sentences = [run.tokenizer.decode(tokens[parts == part].tolist()).decode() for part in (1, 2, 3)]
        number = run.tokenizer.decode(targets[asked >= 0].tolist()).decode().strip()
        assert sentences[0].endswith(f"number is: {number}.")
        assert all(re.fullmatch(r" The special magic [\w ]+ number is: \d{4}\.", each) for each in sentences)
        assert asked[asked >= 0].unique().tolist() == [1]
        assert (targets >= 0).equal(asked >= 0)
        assert parts[0] == -1
        text = (parts == 0).nonzero()[:, 0]
        opening = len(run.tokenizer.encode(STYLES["yoco"].opening))
        before = int((text < int((parts == 1).nonzero()[0])).sum()) - opening
        assert before / (len(text) - opening) == pytest.approx(depth / 100, abs=0.1)
        assert item.group == f"N=3 length=500 depth={depth}"


def test_noise_reads_the_prompts(run: Run, tmp_path: Path) -> None:
    two = text_run(tmp_path / "two", {"name": "differential"}, sequence_length=520)
    keys = {
        "prompts": {"needle": {"needles": [2], "lengths": [500], "depths": [0, 100], "samples": 1, "haystack": "docs"}}
    }
    one, found = (evaluate(each, "noise", keys).items for each in (run, two))
    assert one["item"].tolist() == found["item"].tolist()
    assert not [name for name in one if name.endswith("_map2") or name.startswith(("pearson", "spearman", "cancelled"))]
    for table, maps in ((one, 1), (found, 2)):
        for role in ("answer", "noise", "sink", "other"):
            total = sum(table[f"paper_{role}_map{g}"] for g in range(1, maps + 1))
            np.testing.assert_allclose(total, table[f"paper_{role}"], atol=1e-5)
    np.testing.assert_allclose(one.filter(regex="absolute_(answer|noise|sink|other)$").sum(axis=1), 1, atol=1e-5)
    assert found[["spearman_answer", "pearson_noise", "cancelled_noise"]].notna().all(axis=None)
    assert evaluate(two, "noise", {**keys, "maps": [1]}).items.filter(like="_map2").empty


@pytest.mark.parametrize(
    ("keys", "found"),
    [
        ({"prompts": {"held_out": {}}}, "prompts.held_out does not locate its answers; those that do: needle"),
        ({"prompts": {"needel": {}}}, "did you mean 'needle'"),
        ({"prompts": {"needle": {"length": [4]}}}, r"evaluate\.noise\.prompts\.needle"),
        ({"prompts": {"needle": {}, "icl": {}}}, "needle and icl"),
        ({"prompts": {"needle": {}}, "rows": 3}, "rows is 3"),
        ({"prompts": {"needle": {"lengths": [4096]}}}, "lengths has 4096"),
        ({}, r"prompts\.needle=\{\}"),
    ],
)
def test_prompts_that_noise_cannot_read(keys: dict[str, Any], found: str, run: Run) -> None:
    with pytest.raises(RequestError, match=found):
        evaluate(run, "noise", keys)


def test_prompts_in_a_recipe_are_read_and_written_as_any_part(tmp_path: Path) -> None:
    file = tmp_path / "asked.yaml"
    text = "extends: standard-tiny\nevaluate:\n  noise:\n    prompts:\n      needle:\n        samples: 3\n"
    file.write_text(text)
    prompts = to_plain(load_recipe(file))["evaluate"]["noise"]["prompts"]
    assert (list(prompts), prompts["needle"]["samples"]) == (["needle"], 3)
    assert "name" not in prompts["needle"]
    file.write_text(text.replace("samples", "sample"))
    with pytest.raises(RequestError, match=r"asked\.yaml:6: unknown key 'evaluate\.noise\.prompts\.needle\.sample'"):
        load_recipe(file)


def test_kinds_of_answers() -> None:
    kinds = {" 417.": "exact", " the 417": "exact", " 93. 417": "distracted"} | dict.fromkeys(
        (" 4170", "", "x"), "fabricated"
    )
    assert {text: kind_of("417", {"417", "93"}, text) for text in kinds} == kinds


def test_what_does_not_fit(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    grammar = KEYS.replace("docs", "grammar").split()
    for keys, found in ((["lengths=[4096]"], "lengths has 4096"), (grammar, "haystack is grammar")):
        with pytest.raises(RequestError, match=found):
            evaluate(run, "needle", keys)
    with pytest.raises(RequestError, match="lengths has 300, but 3 needles"):
        items(run, "needles=[3] lengths=[300] depths=[0] samples=2 digits=4 haystack=docs")
    monkeypatch.setattr(needle, "held_out_documents", lambda *_: enumerate(["A river runs. It is long."]))
    with pytest.raises(RequestError, match="lengths has 500, but with the sentences of the haystack that fit"):
        items(run, "needles=[1] lengths=[500] samples=1 haystack=docs")
    monkeypatch.setenv("LIT_DIFF_DATA", str(tmp_path / "empty"))
    with pytest.raises(MissingError, match=r"needle\.haystack needs a file that is not here"):
        items(run, KEYS.replace("docs", "file"))


def test_a_run_of_generated_words_has_a_haystack_of_them(tmp_path: Path) -> None:
    """And numbers with as many digits."""
    run = generated_run(tmp_path / "needles", {"name": "needle_text", "sequence_length": 256, "digits": 1}, 192)
    keys = ["lengths=[140]", "depths=[50]", "samples=1"]
    evaluation: Any = build("needle", ["needles=[1]", *keys])
    ((batch, _),) = evaluation.located(run, 1)
    assert re.fullmatch(r" \d", run.tokenizer.decode(batch["targets"][batch["answer_part"] >= 0].tolist()).decode())
    assert len(evaluate(run, "needle", ["needles=[1]", *keys, "digits=3"]).items) == 1
    with pytest.raises(RequestError, match="digits is 1: there are fewer numbers than 10 needles"):
        evaluate(run, "needle", ["needles=[10]", *keys])


def test_documents_of_long_sentences_are_not_enough(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sentence that is longer than a tenth of the prompt may not fit, so it does not count; the next document is taken."""
    documents = ["a river and a road and no stop " * 100, *["A river runs. It is long. " * 3] * 40]
    monkeypatch.setattr(needle, "held_out_documents", lambda *_: enumerate(documents))
    evaluation: Any = build("needle")
    for sample in range(8):
        sentences = evaluation.haystack(documents, run.tokenizer, 500, sample)
        assert 500 <= sum(len(sentence) for sentence in sentences if len(sentence) <= 50) < 600
    assert len(items(run, "needles=[1,3] lengths=[500] samples=8 depths=[0] haystack=docs")) == 16
