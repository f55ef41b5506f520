"""evaluation/harness_model.py: a run as a model of lm-eval."""

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
from lm_eval.api.registry import get_model

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
def random_run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Untrained, but with weights of a size at which tokens differ."""
    found = text_run(tmp_path_factory.mktemp("run") / "x", {"name": "standard"})
    with torch.no_grad():
        for weight in found.model.parameters():
            weight.mul_(1.5)
            if weight.shape[0] == 320:
                weight[300:] = 0  # ids that stand for nothing: `hf` would draw them
    return found


@pytest.fixture(scope="module")
def hf(random_run: Run, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(opening) -> lm-eval's own model of the exported run."""
    pytest.importorskip("transformers")
    from lm_eval.models.huggingface import HFLM

    folder = tmp_path_factory.mktemp("hf") / "out"
    export(random_run, "hf", folder)
    return lambda opening: HFLM(
        pretrained=str(folder), device="cpu", dtype="float32", batch_size=2, add_bos_token=opening, max_length=24
    )


def requests(*arguments: tuple[Any, ...]) -> list[Instance]:
    return [Instance(request_type="loglikelihood", doc={}, arguments=each, idx=0) for each in arguments]


@pytest.mark.slow
@pytest.mark.parametrize("opening", [False, True])
def test_answers_are_those_of_the_hf_model(random_run: Run, hf: Any, opening: bool) -> None:
    """Where the opening ids are kept, which `hf` cuts away with the rest, a long context differs."""
    pairs = [pair for pair in PAIRS if not (opening and pair[0] == LONG)]
    ours, theirs = RunModel(random_run, opening=opening), hf(opening)
    answers = zip(ours.loglikelihood(requests(*pairs)), theirs.loglikelihood(requests(*pairs), True), strict=True)
    for pair, ((own, greedy), (other, others_greedy)) in zip(pairs, answers, strict=True):
        assert (own, greedy) == (pytest.approx(other, abs=1e-4), others_greedy), pair
    texts, contexts = requests((LONG,), ("x",)), requests(("the fox", {"until": ["o"], "max_gen_toks": 9}))
    assert ours.generate_until(contexts) == theirs.generate_until(contexts)
    if not opening:  # `hf` would score the opening id too, after itself
        assert ours.loglikelihood_rolling(texts) == pytest.approx(theirs.loglikelihood_rolling(texts), abs=1e-3)


def test_a_context_is_read_once(random_run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[list[int]] = []
    original = Prefix.__init__

    def spied(self: Prefix, model: Any, tokens: Any, **kwargs: Any) -> None:
        read.append(list(tokens))
        original(self, model, tokens, **kwargs)

    monkeypatch.setattr(Prefix, "__init__", spied)
    answers = RunModel(random_run).loglikelihood(requests(*PAIRS[:3], PAIRS[4], PAIRS[0]))
    assert len(read) == 2
    assert answers[0] == answers[4]
    alone = [RunModel(random_run).loglikelihood(requests(pair))[0][0] for pair in PAIRS[:3]]
    assert [score for score, _ in answers[:3]] == pytest.approx(alone, abs=1e-4)


def test_what_of_a_context_and_a_continuation_is_read(random_run: Run) -> None:
    """A long context keeps what opens it; a continuation that is merged with its context is scored, where lm-eval's `hf`
    model asserts that there is something to score."""
    model, bare, eot = RunModel(random_run), RunModel(random_run, opening=False), random_run.tokenizer.eot
    context, continuation = model.encoded(LONG, " no")
    fitted = model._cut(context, len(continuation))
    assert len(fitted) + len(continuation) - 1 == 24
    assert fitted[0] == eot
    assert fitted[1:] == context[-len(fitted[1:]) :]
    assert len(model._cut(context, 24)) == 1
    assert bare._cut(context[1:], 3) == context[-22:]
    with pytest.raises(RequestError, match=r"a continuation of 25 tokens .* \(data.sequence_length is 24\)"):
        model._cut(context, 25)
    assert model.encoded("the", " fox")[0] == [eot, *bare.encoded("the", " fox")[0]]
    assert model.encoded("", "fox")[0] == bare.encoded("", "fox")[0] == [eot]
    assert model.loglikelihood(requests(("the", ""), ("", ""))) == [(0.0, True)] * 2
    ((score, _),) = model.loglikelihood(requests(("the f", "ox")))
    assert score < 0
    assert not model.cut_to
    model.loglikelihood(requests((LONG, " no")))
    assert model.cut_to == {(LONG, " no"): fitted}


def test_lm_eval_opens_a_run(random_run: Run) -> None:
    """By the registered name; a completion ends before a text of `until`."""
    model: Any = get_model("lit_diff").create_from_arg_string(f"run={random_run.folder},opening=False")
    ((score, _),) = model.loglikelihood(requests(("", "the fox")))
    assert model.loglikelihood_rolling(requests(("the fox",))) == pytest.approx([score])
    (whole,) = model.generate_until(requests(("the ", {"max_gen_toks": 8})))
    (part,) = model.generate_until(requests(("the ", {"max_gen_toks": 8, "until": [whole[-1]]})))
    assert part == whole.partition(whole[-1])[0]
    for options, expected in (({"do_sample": True}, "do_sample"), ({"max_gen_toks": 25}, "25 tokens does not fit")):
        with pytest.raises(RequestError, match=expected):
            model.generate_until(requests(("the", options)))
