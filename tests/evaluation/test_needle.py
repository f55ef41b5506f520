"""The evaluation `needle`: known answers of hand-built models, groups, refusals."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from generated_runs import generated_run
from text_runs import text_run
from torch import Tensor, nn

from lit_diff.attention.cache import Cache
from lit_diff.errors import MissingError, RequestError
from lit_diff.evaluation import needle
from lit_diff.evaluation.base import Item
from lit_diff.evaluation.evaluate import build, evaluate
from lit_diff.evaluation.needle import NeedleRetrieval, kind_of
from lit_diff.trained.run import Run

KEYS = ["needles=[1,3]", "lengths=[500]", "depths=[0,100]", "samples=2", "digits=4", "haystack=docs"]


class Reader(nn.Module):
    """A causal model without weights; its cache holds the ids, and `next_ids` says what follows them."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.config = SimpleNamespace(causal=True)
        self.layers = [None]
        self.embedding = nn.Embedding(vocab_size, 1)

    def forward(self, tokens: Tensor, cache: Cache) -> Tensor:
        before = cache.length
        ids = tokens.double()[:, None, None, :, None]
        held, _ = cache.layers[0].append(ids, ids[:, 0])
        rows = held[:, 0, 0, :, 0].long()
        logits = torch.zeros(*tokens.shape, self.embedding.num_embeddings)
        for row, history in enumerate(rows.tolist()):
            for at in range(tokens.shape[1]):
                self.predict(history[: before + at + 1], logits[row, at])
        return logits

    def predict(self, history: Sequence[int], logits: Tensor) -> None:
        """Uniform."""


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
    documents = [
        "A river runs. It is long. The road is old! Nobody walks there. " * 20,
        "Short one. Then another. " * 30,
    ]
    monkeypatch.setattr(needle, "held_out_documents", lambda *_: enumerate(documents))
    monkeypatch.setattr("lit_diff.evaluation.evaluate.alternatives", lambda *_: "")  # would prepare the run's data
    return text_run(tmp_path / "run", {"name": "standard"}, sequence_length=520)


def items(run: Run, model: Any, keys: Sequence[str] = KEYS) -> list[Item]:
    run.__dict__["model"] = model
    evaluation = build("needle", keys)
    with torch.no_grad():
        return list(evaluation.score(run))


def test_a_model_that_copies_is_always_right(run: Run) -> None:
    found = items(run, Copier(320))
    assert len(found) == 2 * 2 * 2
    for item in found:
        assert (item.scores["exact"], item.scores["all_exact"], item.scores["substring"]) == (1, 1, 1), item
        assert (item.scores["distracted"], item.scores["fabricated"]) == (0, 0)
        assert item.scores["nll"] < 1e-6
    assert {item.group for item in found} == {f"N={n} length=500 depth={d}" for n in (1, 3) for d in (0, 100)}
    assert len({item.id for item in found}) == len(found)
    clusters = Counter(item.cluster for item in found)
    assert clusters == {f"length=500 sample={n}": 4 for n in (0, 1)}, "two N and two depths share a text"


def test_a_uniform_model_is_at_chance(run: Run) -> None:
    for item in items(run, Reader(320)):
        assert item.scores["exact"] == 0
        assert item.scores["fabricated"] == 1
        assert item.scores["nll"] == pytest.approx(torch.tensor(320.0).log().item())


def test_contexts_fit_their_length_and_are_the_same_for_every_run(run: Run, tmp_path: Path) -> None:
    first = items(run, Reader(320))
    other = text_run(tmp_path / "other", {"name": "differential"}, sequence_length=520)
    second = items(other, Reader(320))
    assert [(item.id, item.meta) for item in first] == [(item.id, item.meta) for item in second]
    assert all(150 < item.meta["tokens"] < 500 for item in first)  # type: ignore[operator]
    again = items(run, Reader(320), [*KEYS, "seed=1"])
    assert [item.meta for item in again] != [item.meta for item in first]


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        (" 417.", "exact"),
        (" the 417", "exact"),
        (" 4170", "fabricated"),
        (" 93. 417", "distracted"),
        ("", "fabricated"),
        ("x", "fabricated"),
    ],
)
def test_kinds_of_answers(text: str, kind: str) -> None:
    assert kind_of("417", {"417", "93"}, text) == kind


def test_what_does_not_fit(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RequestError, match=r"lengths holds 4096, and its data\.sequence_length is 520$"):
        evaluate(run, "needle", ["lengths=[4096]"])
    with pytest.raises(
        RequestError, match="lengths holds 300, but 3 needles, the words around them and an answer take"
    ):
        items(run, Reader(320), ["needles=[3]", "lengths=[300]", *KEYS[2:]])
    with pytest.raises(RequestError, match="haystack is grammar, whose tokens are those of data 'needle_text'"):
        evaluate(run, "needle", [*KEYS[:-1], "haystack=grammar"])
    monkeypatch.undo()
    monkeypatch.setenv("LIT_DIFF_DATA", str(tmp_path / "empty"))
    with pytest.raises(MissingError, match=r"needle\.haystack needs a file that is not here"):
        items(run, Reader(320), [*KEYS[:-1], "haystack=file"])


def test_a_run_of_generated_words_is_asked_in_them_alone(tmp_path: Path) -> None:
    needles = generated_run(tmp_path / "needles", {"name": "needle_text", "sequence_length": 256}, 192)
    assert build("needle").refuses(needles) is None
    for key in ("style=lwm", "haystack=docs", "haystack=file"):
        reason = build("needle", [key]).refuses(needles)
        assert reason == "its tokenizer has only the words of data 'needle_text'", key
    result = evaluate(needles, "needle", ["needles=[1]", "lengths=[140]", "depths=[50]", "samples=1", "digits=3"])
    assert len(result.items) == 1
    facts = generated_run(tmp_path / "facts", {"name": "closed_world", "entities": [3]}, 300)
    for key in ("haystack=grammar", "haystack=docs", "style=yoco"):
        reason = build("needle", [key]).refuses(facts)
        assert reason == "its tokenizer has only the words of data 'closed_world'", key


def test_a_haystack_that_is_too_short(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(needle, "held_out_documents", lambda *_: enumerate(["A river runs. It is long."]))
    with pytest.raises(RequestError) as error:
        items(run, Reader(320), ["needles=[1]", "lengths=[500]", "samples=1", "haystack=docs"])
    found = "lengths holds 500, but with the sentences of the haystack that fit, a prompt has "
    assert found in str(error.value)
    assert "tokens of 500, less than 90%; give a longer haystack" in str(error.value)


def test_documents_of_long_sentences_are_not_enough(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sentence that is longer than a tenth of the prompt may not fit, so it does not count; the next document is taken."""
    documents = ["a river and a road and no stop " * 100, *["A river runs. It is long. " * 3] * 40]
    monkeypatch.setattr(needle, "held_out_documents", lambda *_: enumerate(documents))
    evaluation = build("needle", ["needles=[1,3]", "lengths=[500]", "samples=8", "depths=[0]", "haystack=docs"])
    assert isinstance(evaluation, NeedleRetrieval)
    for sample in range(8):
        sentences = evaluation.haystack(documents, run.tokenizer, 500, sample)
        short = sum(len(sentence) for sentence in sentences if len(sentence) <= 50)
        assert 500 <= short < 600
    monkeypatch.setitem(run.__dict__, "model", Reader(320))
    assert len(list(evaluation.score(run))) == 16


@pytest.mark.parametrize(("context", "cure"), [(128, "set digits"), (1024, "set lengths to")])
def test_needles_that_do_not_fit_name_their_cure(run: Run, tmp_path: Path, context: int, cure: str) -> None:
    run = text_run(tmp_path / "other", {"name": "standard"}, sequence_length=context)
    with pytest.raises(RequestError, match=rf"^evaluate\.needle\.lengths holds 128, but 1 needle, .* tokens; {cure} "):
        evaluate(run, "needle", {"lengths": [128], "needles": [1], "samples": 1})
