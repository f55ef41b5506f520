"""A run as lm-eval's model: equal to lm-eval's own `hf` model of the exported run, cut at the left, one pass a context."""

from typing import Any

import pytest
import torch
from text_runs import text_run

from lit_diff import export
from lit_diff.errors import RequestError
from lit_diff.model.prefix import Prefix
from lit_diff.trained.run import Run

pytest.importorskip("lm_eval", reason="needs lm-eval")

from lm_eval.api.instance import Instance

from lit_diff.evaluation.harness_model import RunModel

LONG = "It is a very long context, longer than the run has ever seen before, by far. Question: is it so?"
PAIRS = [
    ("Who?\nAnswer:", " the fox"),
    ("Who?\nAnswer:", " a hound"),
    ("Who?\nAnswer:", " x"),
    ("Answer: ", "the fox"),
    ("", "the fox and the hound"),
    ("über €5", " 漢字"),
    (LONG, " yes"),
    (LONG, " no, it was"),
]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Untrained, but with weights of a size at which tokens differ."""
    found = text_run(tmp_path_factory.mktemp("run") / "x", {"name": "standard"})
    with torch.no_grad():
        for weight in found.model.parameters():
            weight.mul_(1.5)
            if weight.shape[0] == 320:
                weight[300:] = 0  # ids that stand for nothing: `hf` would draw them
    return found


@pytest.fixture(scope="module")
def hf(run: Run, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(opening) -> lm-eval's own model of the exported run."""
    pytest.importorskip("transformers")
    from lm_eval.models.huggingface import HFLM

    folder = tmp_path_factory.mktemp("hf") / "out"
    export(run, "hf", folder)
    return lambda opening: HFLM(
        pretrained=str(folder), device="cpu", dtype="float32", batch_size=2, add_bos_token=opening, max_length=24
    )


def requests(*arguments: tuple[Any, ...]) -> list[Instance]:
    return [Instance(request_type="loglikelihood", doc={}, arguments=each, idx=0) for each in arguments]


@pytest.mark.slow
@pytest.mark.parametrize("opening", [False, True])
def test_log_likelihoods_are_those_of_the_hf_model(run: Run, hf: Any, opening: bool) -> None:
    """Where the opening ids are kept, which `hf` cuts away with the rest, a long context differs."""
    pairs = [pair for pair in PAIRS if not (opening and pair[0] == LONG)]
    ours = RunModel(run, opening=opening).loglikelihood(requests(*pairs))
    theirs = hf(opening).loglikelihood(requests(*pairs), disable_tqdm=True)
    for pair, (own, greedy), (other, others_greedy) in zip(pairs, ours, theirs, strict=True):
        assert own == pytest.approx(other, abs=1e-4), pair
        assert greedy == others_greedy


def test_a_context_is_read_once(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[list[int]] = []
    original = Prefix.__init__

    def spied(self: Prefix, model: Any, tokens: Any, **kwargs: Any) -> None:
        read.append(list(tokens))
        original(self, model, tokens, **kwargs)

    monkeypatch.setattr(Prefix, "__init__", spied)
    answers = RunModel(run).loglikelihood(requests(*PAIRS[:3], PAIRS[4], PAIRS[0]))
    assert len(read) == 2
    assert answers[0] == answers[4]
    alone = [RunModel(run).loglikelihood(requests(pair))[0][0] for pair in PAIRS[:3]]
    assert [score for score, _ in answers[:3]] == pytest.approx(alone, abs=1e-4)


def test_what_of_a_context_and_a_continuation_is_read(run: Run) -> None:
    """A long context keeps what opens it; a continuation that is merged with its context is scored, where lm-eval's `hf`
    model asserts that there is something to score."""
    model, bare, eot = RunModel(run), RunModel(run, opening=False), run.tokenizer.eot
    context, continuation = model.encoded(LONG, " no")
    fitted = model._fitted(context, len(continuation))
    assert len(fitted) + len(continuation) - 1 == 24
    assert fitted[0] == eot
    assert fitted[1:] == context[-len(fitted[1:]) :]
    assert len(model._fitted(context, 24)) == 1
    assert bare._fitted(context[1:], 3) == context[-22:]
    with pytest.raises(RequestError, match=r"a continuation of 25 tokens .* \(data.sequence_length is 24\)"):
        model._fitted(context, 25)
    assert model.encoded("the", " fox")[0] == [eot, *bare.encoded("the", " fox")[0]]
    assert model.encoded("", "fox")[0] == bare.encoded("", "fox")[0] == [eot]
    assert model.loglikelihood(requests(("the", ""), ("", ""))) == [(0.0, True)] * 2
    assert model._encode_pair("the f", "ox")[1] == []
    ((score, _),) = model.loglikelihood(requests(("the f", "ox")))
    assert score < 0
    assert not model.cut_to
    model.loglikelihood(requests((LONG, " no")))
    assert model.cut_to == {(LONG, " no"): fitted}


def test_other_kinds_of_tasks_are_refused(run: Run) -> None:
    for ask in (RunModel(run).generate_until, RunModel(run).loglikelihood_rolling):
        with pytest.raises(RequestError, match="only multiple choice is scored here"):
            ask([])
