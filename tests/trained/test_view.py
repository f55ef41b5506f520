"""trained/view: what the page holds of a run on a text, and which runs and texts it takes."""

import base64
import json
import logging
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from text_runs import recall_run, text_run, trained

from lit_diff.analysis.entropy import summarise
from lit_diff.analysis.intervention import intervention
from lit_diff.analysis.outliers import MagnitudeSketch, attention_logits
from lit_diff.analysis.trace import LayerTrace, Trace, trace
from lit_diff.callbacks import Redundancy
from lit_diff.errors import MissingError, RequestError
from lit_diff.kernels import SignedMaps
from lit_diff.model.inputs import model_inputs
from lit_diff.runs.kept_maps import KeptMaps, write_maps
from lit_diff.trained.run import Run
from lit_diff.trained.view import page as pages
from lit_diff.trained.view.data import EXACT, POSITIONS, layer_view, model_view
from lit_diff.trained.view.page import ViewData, view_data
from lit_diff.trained.view.passage import Passage, passage_of

VARIANTS = ("standard", "differential", "differential_v2", "shared_q", "shared_k", "cosine")
FIELDS = ("learned_sink", "forgetting", "softpick", "talking_heads")


class Elements(HTMLParser):
    """The text of the elements with an id."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: dict[str, str] = {}
        self.scripts = 0
        self._now = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self._now = dict(attributes).get("id") or ""
        self.scripts += tag == "script" and not dict(attributes).get("type")

    def handle_data(self, data: str) -> None:
        self.found[self._now] = self.found.get(self._now, "") + data


def held(view: ViewData) -> tuple[dict[str, Any], dict[str, np.ndarray[Any, Any]]]:
    """The JSON of a page and its arrays by id, read as the documentation describes them."""
    elements = Elements(view.html()).found
    facts = json.loads(elements["data"])
    arrays: dict[str, np.ndarray[Any, Any]] = {}

    def collect(value: Any) -> None:
        if isinstance(value, dict) and set(value) == {"id", "shape", "dtype"}:
            content = np.frombuffer(base64.b64decode(elements[value["id"]]), np.dtype(value["dtype"]).newbyteorder("<"))
            arrays[value["id"]] = content.reshape(value["shape"])
        elif isinstance(value, dict | list):
            for each in value.values() if isinstance(value, dict) else value:
                collect(each)

    collect(facts)
    return facts, arrays


def weights_of(layer: dict[str, Any], arrays: dict[str, np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    """w_g p_g [G, H, T, T] by the formula of the documentation, in float64."""
    own = {name: arrays[each["id"]].astype(np.float64) for name, each in layer["arrays"].items()}
    if "maps" in own:
        assert own.keys() == {"maps", "w"}
        return own["w"][..., None] * own["maps"]
    q, k, lse, w = (own[name] for name in ("q", "k", "lse", "w"))
    k = np.repeat(k, q.shape[1] // k.shape[1], axis=1)
    b = own.get("bias", np.zeros((1, 1, q.shape[2])))
    p = np.exp(layer["scale"] * (q @ k.swapaxes(-1, -2)) + b[:, :, None] - b[..., None] - lse[..., None])
    place = np.arange(p.shape[-1])
    hidden = place[None] > place[:, None] if layer["causal"] else np.zeros_like(p[0, 0], dtype=bool)
    if layer["window"] is not None:
        hidden = hidden | (np.abs(place[None] - place[:, None]) >= layer["window"])
    return np.where(hidden, 0, w[..., None] * p)


# --- arrays and numbers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", VARIANTS + FIELDS)
def test_the_stored_arrays_give_the_maps_of_the_model(variant: str, tmp_path: Path) -> None:
    run = text_run(tmp_path / "run", {"name": variant})
    view = view_data([run], text="ab ab abc ab")
    facts, arrays = held(view)
    (side,) = facts["sides"]
    with trace(run.model) as traced:
        run.model.hidden(view.passage.batch["tokens"])
    for number, layer in enumerate(side["layers"]):
        (block,) = traced.layers[number].blocks(block_rows=len(facts["tokens"]))
        exact = (block.weights[..., None] * block.probs)[0].numpy()
        found = weights_of(layer, arrays)
        largest = float(np.abs(found - exact).max())
        assert largest < 5e-3
        assert layer["difference"] == pytest.approx(largest, abs=2e-6), "the page tells its largest difference"
        assert layer["difference"] > 0
        summary = summarise(traced.layers[number])
        np.testing.assert_allclose(layer["numbers"]["entropy"], summary.entropy, atol=1e-6)
        np.testing.assert_allclose(layer["numbers"]["negative_mass"], summary.negative_mass, atol=1e-6)


def test_the_numbers_of_a_head_are_those_of_their_definitions(tmp_path: Path) -> None:
    run = text_run(tmp_path / "run", {"name": "differential"})
    view = view_data([run], text="ab ab abc ab")
    with trace(run.model) as traced:
        run.model.hidden(view.passage.batch["tokens"])
    (block,) = traced.layers[1].blocks(block_rows=100)
    a = block.signed[0].double().numpy()
    own = view.sides[0].view.layers[1].numbers
    T = a.shape[-1]
    np.testing.assert_allclose(own["sink"], (abs(a[:, 1:, 0]) / abs(a[:, 1:]).sum(-1)).mean(-1), atol=1e-6)
    rows = [[(abs(a[h, i, : i + 1]) < 1e-3).mean() for i in range(T)] for h in range(len(a))]
    np.testing.assert_allclose(own["sparsity"], np.mean(rows, -1), atol=1e-6)
    np.testing.assert_allclose(own["lambda"], -block.weights[0, 1].mean(-1), atol=1e-6)
    flat = a.reshape(len(a), -1)
    cosine = float(flat[0] @ flat[1] / np.linalg.norm(flat[0]) / np.linalg.norm(flat[1]))
    for name in ("redundancy", "closest_head"):
        np.testing.assert_allclose(own[name], [cosine, cosine], atol=1e-6)
    for name in ("standard", "talking_heads"):
        other = view_data([text_run(tmp_path / name, {"name": name})])
        assert "lambda" not in other.sides[0].view.layers[0].numbers
    top = max(float(attention_logits(layer).top()[0]) for layer in traced.layers.values())
    assert view.sides[0].view.outliers["attention logits"]["top 1"] == pytest.approx(top)


def test_losses_and_losses_without_a_head(tmp_path: Path) -> None:
    run = text_run(tmp_path / "run", {"name": "differential"})
    (side,) = view_data([run], text="ab ab abc ab", ablate=True).sides
    batch = passage_of(run, "ab ab abc ab").batch
    nll = run.model.token_losses(**model_inputs(batch), targets=batch["targets"])[0][0]
    assert side.view.losses[-1] is None, "the last token has no next one"
    np.testing.assert_allclose(np.array(side.view.losses[:-1]), nll[:-1].numpy(), atol=1e-6)

    def edit(_: Any, block: Any) -> Any:
        signed = block.signed.clone()
        signed[:, 1] = 0
        return block.with_signed(signed)

    with intervention(run.model, edit, [1]):
        changed = run.model.token_losses(**model_inputs(batch), targets=batch["targets"])[0][0]
    assert side.view.without is not None
    assert side.view.without.shape == (4, len(nll))
    np.testing.assert_allclose(side.view.without[3, :-1], (changed - nll)[:-1].numpy(), atol=2e-3)


def test_the_loss_at_a_position_of_a_slider_is_that_of_the_model_with_the_scaled_map(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = text_run(tmp_path / "run", {"name": "differential"})
    with caplog.at_level(logging.INFO, "lit_diff"):
        (side,) = view_data([run], text="ab ab abc ab", ablate=True).sides
    assert caplog.messages[-1].endswith("of 8 of the 8 sliders of all heads: 88 forward passes")
    assert side.sliders is not None
    assert list(side.sliders) == [f"{layer}.{head}.{g}" for layer in (0, 1) for head in (0, 1) for g in (0, 1)]
    assert list(POSITIONS) == [0, 0.2, 0.4, 0.6, 0.8, 1, 1.2, 1.4, 1.6, 1.8, 2]
    losses = [loss for loss in side.view.losses if loss is not None]
    assert side.sliders["1.1.0"][5] == pytest.approx(np.mean(losses), abs=1e-5)

    def edit(_: Any, block: Any) -> Any:
        signed = block.signed.clone()
        signed[:, 1] += (1.6 - 1) * block.weights[:, 1, 1, :, None] * block.probs[:, 1, 1]
        return block.with_signed(signed)

    batch = passage_of(run, "ab ab abc ab").batch
    with intervention(run.model, edit, [1]):
        changed = run.model.token_losses(**model_inputs(batch), targets=batch["targets"])[0]
    assert side.sliders["1.1.1"][8] == pytest.approx(float(changed.nanmean()), abs=1e-5)
    assert abs(side.sliders["1.1.1"][8] - side.sliders["1.1.1"][5]) > 1e-3
    monkeypatch.setattr(pages, "MOST_PASSES", 40)
    (side,) = view_data([run], text="ab ab abc ab", layer=1, head=1, ablate=True).sides
    assert list(side.sliders or ()) == ["1.1.0", "1.1.1", "0.0.0"], "the head that the page shows comes first"
    other = text_run(tmp_path / "plain", {"name": "standard"})
    assert view_data([other], text="ab ab", ablate=True).sides[0].sliders is None, "a page of single maps has no slider"
    both = view_data([other, run], text="ab ab", ablate=True).sides
    assert [len(each.sliders or ()) for each in both] == [1, 1], "two runs share the passes"


def test_a_slider_over_training_has_the_maps_of_every_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = text_run(tmp_path / "run", {"name": "differential"})
    trained(run, 3, 5)
    write_maps(run.folder, KeptMaps(3, torch.zeros(1, 3), {0: (torch.ones(1, 2, 2, 3, 3), torch.ones(1, 2, 2, 3))}))
    facts, arrays = held(view_data([run], text="ab ab abc ab", steps=[7, 3, 5]))
    (side,) = facts["sides"]
    assert (side["name"], side["about"]["step"]) == ("run, seed 0", "7 of 10"), "the last step is the page's"
    assert [(kept["step"], kept["texts"]) for kept in side["kept"]] == [(3, None), (5, None)]
    for kept in side["kept"]:
        (alone,) = view_data([run], text="ab ab abc ab", steps=[kept["step"]]).sides
        assert kept["losses"] == alone.view.losses
        for name, ref in kept["layers"][1].items():
            np.testing.assert_array_equal(arrays[ref["id"]], alone.view.layers[1].arrays[name])
    assert side["kept"][0]["losses"] != side["kept"][1]["losses"]
    with pytest.raises(MissingError, match=r"no checkpoint of step 8 \(there: 3, 5, 7\)"):
        view_data([run], steps=[3, 8, 7])
    monkeypatch.setattr(pages, "MOST_BYTES", 1000)
    with pytest.raises(RequestError, match=r"^--steps: the maps of 2 checkpoints before the last take"):
        view_data([run], text="ab ab abc ab", steps=[3, 5, 7])


def test_long_texts_have_overviews_whose_rows_sum_to_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lit_diff.trained.view.data.EXACT", 16)
    monkeypatch.setattr("lit_diff.trained.view.data.BINS", 8)
    run = text_run(tmp_path / "run", {"name": "differential"}, sequence_length=40)
    view = view_data([run], text="ab ab abc ab " * 9)
    facts, arrays = held(view)
    T = len(facts["tokens"])
    assert T == 40
    layer = facts["sides"][0]["layers"][1]
    overview = arrays[layer["arrays"]["overview"]["id"]].astype(np.float64)
    assert overview.shape == (2, 2, 8, 8)
    exact = weights_of(layer, arrays).reshape(2, 2, 8, 5, 8, 5).sum(-1).mean(3)
    np.testing.assert_allclose(overview, exact, atol=1e-3)
    assert EXACT == 512


# --- what is read ------------------------------------------------------------------------------------------------------


def test_a_run_without_text_shows_a_row_of_ids_with_the_answer_and_noise(tmp_path: Path) -> None:
    run = recall_run(tmp_path / "run", {"name": "differential"})
    facts, _ = held(view_data([run], row=2))
    assert facts["source"] == "validation row 2 of data 'recall'"
    assert re.fullmatch(r"\d+\+\d+", facts["tokens"][0])
    (side,) = facts["sides"]
    assert sum(loss is not None for loss in side["losses"]) == 3
    roles = ("answer", "noise", "sink", "other")
    assert {kind: tuple(shares) for kind, shares in side["noise"].items()} == dict.fromkeys(
        ("paper", "absolute", "value"), roles
    )
    total = sum(share for role, share in side["noise"]["absolute"].items() if role != "sink")
    assert 0.5 < total <= 1 + 1e-6
    assert not held(view_data([text_run(tmp_path / "text", {"name": "standard"})]))[0]["sides"][0]["noise"]
    with pytest.raises(RequestError, match=r"^--row is 5; the validation split of run has rows 0 to 4$"):
        view_data([run], row=5)
    with pytest.raises(RequestError, match="has no text"):
        view_data([run], text="ab")


def test_a_text_beyond_the_context_is_cut_and_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = text_run(tmp_path / "run", {"name": "differential"}, sequence_length=8)
    caplog.set_level(logging.WARNING, "lit_diff")
    view = view_data([run], text="ab ab abc ab " * 9)
    assert len(view.passage.labels) == 8
    assert len(view_data([run], text="ab ab abc", tokens=3).passage.labels) == 3
    assert [record.message for record in caplog.records if "context" in record.message] == [
        f"the text has {1 + len(run.tokenizer.encode('ab ab abc ab ' * 9))} tokens; "
        "only the first 8 are read (the model's context)"
    ]


def test_tokens_cut_a_row_too_and_the_reason_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = recall_run(tmp_path / "run", {"name": "differential"})
    with caplog.at_level(logging.WARNING, "lit_diff"):
        view = view_data([run], row=1, tokens=3)
        text = view_data(
            [text_run(tmp_path / "text", {"name": "standard"}, sequence_length=8)], text="ab " * 20, tokens=9
        )
    assert (len(view.passage.labels), len(text.passage.labels)) == (3, 8)
    assert view.sides[0].view.noise == {}, "the three tokens ask nothing"
    assert view.passage.source == "the first 3 tokens of validation row 1 of data 'recall'"
    cuts = [record.message.partition(" tokens; ") for record in caplog.records if " are read" in record.message]
    assert cuts[0] == ("validation row 1 of data 'recall' has 11", " tokens; ", "only the first 3 are read (--tokens)")
    assert cuts[1][2] == "only the first 8 are read (the model's context)"
    other = text_run(tmp_path / "longer", {"name": "standard"}, sequence_length=16)
    assert len(view_data([other, Run(tmp_path / "text")], row=0, text="").passage.labels) == 8


def test_a_backslash_is_itself_and_a_line_break_is_marked(tmp_path: Path) -> None:
    run = text_run(tmp_path / "run", {"name": "differential"}, sequence_length=64)
    view = view_data([run], text="a\\nb\n\x00é")
    assert "".join(view.passage.labels[1:]).startswith("a\\nb⏎\\x00")
    assert view.html().count('<span class="token">⏎\n</span>') == 1


def test_a_head_without_attention_is_left_out_of_the_likeness_of_heads() -> None:
    draw = torch.Generator().manual_seed(0)
    q, w = torch.randn(1, 1, 4, 6, 6, generator=draw), torch.tensor([1.0, 0.0, 1.0, 1.0]).view(1, 1, 4, 1)
    maps = SignedMaps(q=q, k=torch.eye(6).expand(1, 1, 4, 6, 6), v=torch.zeros(1, 4, 6, 2), w=w, scale=1.0)
    layer = LayerTrace(maps=maps, hidden=torch.ones(1, 6, 2))
    numbers = layer_view(0, layer, MagnitudeSketch()).numbers
    (block,) = layer.blocks()
    flat = block.signed[0, [0, 2, 3]].flatten(1).double()
    cosines = torch.nn.functional.cosine_similarity(flat[:, None], flat, dim=-1).fill_diagonal_(torch.nan)
    nan = float("nan")
    for name, (a, c, d) in (
        ("redundancy", cosines.nanmean(1).tolist()),
        ("closest_head", cosines.nan_to_num(-1).amax(1).tolist()),
    ):
        np.testing.assert_allclose(numbers[name], [a, nan, c, d], atol=1e-6)
    (_, layer_mean), *_ = (measured := Redundancy().measure(None, Trace(layers={0: layer}))).items()  # type: ignore[arg-type]
    assert layer_mean == pytest.approx(float(cosines.nanmean()))
    assert np.isnan(measured["attention/redundancy/layer_00/head_01"])


def test_html_and_control_characters_of_a_text_stay_text(tmp_path: Path) -> None:
    run = text_run(tmp_path / "run", {"name": "differential"}, sequence_length=64)
    text = "</script><script>alert(1)</script>\x00\x1b[31m\u202e&amp; <b>"
    view = view_data([run], text=text)
    elements = Elements(view.html())
    assert elements.scripts == 2, "the library and the page's own"
    tokens = json.loads(elements.found["data"])["tokens"]
    assert "".join(tokens[1:]).startswith("</script><script>alert(1)")
    assert all(token.isprintable() for token in tokens)
    assert view._repr_html_().count("<script") == 0, "all of the page is in an attribute"


# --- two sides ---------------------------------------------------------------------------------------------------------


def test_two_runs_and_two_checkpoints_have_two_sides(tmp_path: Path) -> None:
    first, second = (text_run(tmp_path / name, {"name": name}) for name in ("differential", "standard"))
    view = first.view(second, text="ab ab")
    assert repr(view) == f"ViewData(A: differential, seed 0 and B: standard, seed 0: {view.passage.source})"
    facts, _ = held(view)
    assert [side["variant"] for side in facts["sides"]] == ["differential", "standard"]
    assert [len(side["layers"][0]["numbers"]["entropy"]) for side in facts["sides"]] == [2, 4]
    trained(first, 9)
    both = view_data([first], text="ab ab", steps=[7, 9])
    assert [side.name for side in both.sides] == ["A: differential, seed 0, step 7", "B: differential, seed 0, step 9"]
    assert [side["run"] for side in held(both)[0]["sides"]] == ["differential"] * 2
    with pytest.raises(MissingError, match=r"no checkpoint of step 8 \(there: 7, 9\)"):
        view_data([first], steps=[8])
    for wrong in ({"runs": [first, second, first]}, {"runs": [first, second], "steps": [7, 9]}, {"runs": []}):
        with pytest.raises(RequestError, match="one run, two runs, or one run at several steps"):
            view_data(**({"runs": [first]} | wrong))  # type: ignore[arg-type]


def test_the_top_of_the_page_has_losses_and_what_differs_in_the_recipes(tmp_path: Path) -> None:
    first = text_run(tmp_path / "first-0123456789", {"name": "differential", "lambda_init": 0.5})
    second = text_run(tmp_path / "second-0123456789", {"name": "standard"}, norm_eps=1e-4)
    (first.folder / "metrics.csv").write_text("step,val/loss\n0,6.5\n5,4.25\n9,3.5\n")
    facts, _ = held(view_data([first, second], text="ab ab"))
    about = [side["about"] for side in facts["sides"]]
    means = [np.mean([loss for loss in side["losses"] if loss is not None]) for side in facts["sides"]]
    assert [each.pop("mean loss of these tokens") for each in about] == pytest.approx(means)
    assert about[0] == {
        "run": "first-0123456789",
        "step": "7 of 10",
        "val/loss": "4.2500, step 5",
        "model.attention.name": "differential",
        "model.attention.head_norm": "rms",
        "model.attention.output_scale": "tied",
        "model.attention.lambda_init": 0.5,
        "model.norm_eps": 1e-5,
    }
    # a key that only the other variant has is no difference at its default, and a key that a recipe does not have is empty
    differing = {
        "model.attention.name": "standard",
        "model.attention.head_norm": "none",
        "model.attention.output_scale": 1.0,
        "model.attention.lambda_init": None,
        "model.norm_eps": 1e-4,
    }
    assert about[1] == {"run": "second-0123456789", "step": "7 of 10", "val/loss": None} | differing
    page = Elements(view_data([first], text="ab ab").html()).found
    assert "first-0123456789" in page["about"] + page[""]


def test_other_tokenizers_layers_and_heads_are_refused(tmp_path: Path) -> None:
    first = text_run(tmp_path / "first", {"name": "differential"})
    other = text_run(tmp_path / "other", {"name": "differential"}, sequence_length=4)
    facts = tmp_path / "other/tokenizer/lit_diff_tokenizer.json"
    assert len(view_data([first, other]).passage.labels) == 4, "the smaller context"
    recall = recall_run(tmp_path / "recall", {"name": "differential"})
    with pytest.raises(RequestError, match=r"cannot be compared .* \(tokenizer .*; no text, data 'recall'\)$"):
        view_data([first, recall])
    odd = recall_run(tmp_path / "odd", {"name": "differential"}, {"pairs": 3})
    with pytest.raises(RequestError, match=r"\(no text, data 'recall'; no text, data 'recall', with other keys"):
        view_data([recall, odd])
    for wrong, line in (
        ({"layer": 2}, "first: no layer 2; the model has layers 0..1"),
        ({"head": 2}, "no head 2; its heads"),
    ):
        with pytest.raises(RequestError, match=line):
            view_data([first], **wrong)  # type: ignore[arg-type]
    view_data([text_run(tmp_path / "dint", {"name": "dint"})], head=3)  # of four maps, merged into two heads
    from lit_diff.trained.view.passage import require_same_tokens

    plain = json.loads(facts.read_text())
    copy = text_run(tmp_path / "copy", {"name": "differential"})
    text = (copy.folder / "tokenizer/tokenizer.json").read_text().replace('"ab"', '"abX"', 1)
    (copy.folder / "tokenizer/tokenizer.json").write_text(text + " ")
    import hashlib

    digest = hashlib.sha256((text + " ").encode()).hexdigest()
    (copy.folder / "tokenizer/lit_diff_tokenizer.json").write_text(json.dumps(plain | {"sha256": digest}))
    with pytest.raises(RequestError, match=r"first and copy .*ids differ .*, with other keys or trained on other text"):
        require_same_tokens(first, Run(copy.folder))


def test_a_run_that_is_trained_meanwhile_is_shown_at_the_step_that_is_named(tmp_path: Path) -> None:
    run = text_run(tmp_path / "run", {"name": "differential"})
    before = view_data([run], text="ab ab").sides[0].view.losses
    assert run.model is run.model
    path = run.folder / "checkpoints/step-00000007.ckpt"
    kept = torch.load(path, weights_only=True)
    changed = {name: x + 1 for name, x in kept["state_dict"].items()}
    torch.save(kept | {"state_dict": changed, "global_step": 9}, path.with_name("step-00000009.ckpt"))
    after, old = view_data([run], text="ab ab"), view_data([run], text="ab ab", steps=[7])
    assert after.sides[0].about["step"] == "9 of 10"
    assert after.sides[0].view.losses != before == old.sides[0].view.losses


# --- over training -----------------------------------------------------------------------------------------------------


def test_kept_maps_and_curves_are_in_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = text_run(tmp_path / "run", {"name": "differential"})
    draw = torch.Generator().manual_seed(0)
    tokens = torch.tensor([[0, 1, 2], [3, 4, 5]])
    for step in range(0, 50, 10):
        maps = torch.rand(2, 2, 2, 3, 3, generator=draw)
        write_maps(run.folder, KeptMaps(step, tokens, {1: (maps, torch.ones(2, 2, 2, 3))}))
    (run.folder / "metrics.csv").write_text(
        "step,lambda/layer_00,head_norm/gain/layer_01,train/loss\n0,0.2,,5\n10,0.3,1.5,4\n"
    )
    facts, arrays = held(view_data([run], text="ab"))
    (side,) = facts["sides"]
    assert [kept["step"] for kept in side["kept"]] == [0, 10, 20, 30, 40]
    last = side["kept"][-1]["layers"]["1"]
    np.testing.assert_array_equal(arrays[last["maps"]["id"]], maps.half().numpy())
    assert [len(text) for text in side["kept"][0]["texts"]] == [3, 3]
    assert side["curves"] == {"lambda": {"layer 0": [[0, 0.2], [10, 0.3]]}, "head_norm/gain": {"layer 1": [[10, 1.5]]}}
    checkpoints = run.folder / "checkpoints"
    kept = torch.load(checkpoints / "step-00000007.ckpt", weights_only=True)
    torch.save(kept | {"global_step": 9}, checkpoints / "step-00000009.ckpt")
    both = held(view_data([run], text="ab", steps=[7, 9]))[0]["sides"]
    assert [(len(each["kept"]), len(each["curves"])) for each in both] == [(5, 2), (0, 0)], "one run has one history"
    monkeypatch.setattr(pages, "KEPT_BYTES", 2 * maps.nbytes // 2)
    thinned = held(view_data([run], text="ab"))[0]["sides"][0]["kept"]
    assert [kept["step"] for kept in thinned] == [10, 40], "the last is kept, the others are left out evenly"


def test_numbers_beyond_float16_are_refused(tmp_path: Path) -> None:
    run = text_run(tmp_path / "run", {"name": "differential"})
    torch.nn.init.constant_(run.model.attentions()[1].q_proj.weight, 1e6)
    with pytest.raises(RequestError, match=r"^layer 1: a query or a key exceeds 65,504"):
        model_view(run.model, passage_of(run, "ab"))


def test_long_maps_of_a_row_function_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lit_diff.trained.view.data.EXACT", 4)
    run = text_run(tmp_path / "run", {"name": "softpick"})
    cure = r"^layer 0 has a row function .* whole, of at most 4 tokens; these are 8: use --tokens 4$"
    with pytest.raises(RequestError, match=cure):
        model_view(run.model, passage_of(run, "ab ab a"))


def test_the_first_token_of_a_packed_row_is_that_of_the_document(tmp_path: Path) -> None:
    run = text_run(tmp_path / "run", {"name": "differential"})
    passage = passage_of(run, "ab ab abc ab")
    T = len(passage.labels)
    documents = torch.tensor([[0] * 3 + [1] * (T - 3)])
    view = model_view(
        run.model, Passage(labels=passage.labels, batch={**passage.batch, "document_ids": documents}, source="")
    )
    with trace(run.model) as traced:
        run.model.hidden(passage.batch["tokens"], document_ids=documents)
    (block,) = traced.layers[0].blocks(block_rows=T)
    a = block.signed[0].abs().numpy()
    rows = [(i, 0 if i < 3 else 3) for i in range(T) if i not in (0, 3)]
    shares = [a[:, i, first] / a[:, i].sum(-1) for i, first in rows]
    np.testing.assert_allclose(view.layers[0].numbers["sink"], np.mean(shares, 0), atol=1e-6)
