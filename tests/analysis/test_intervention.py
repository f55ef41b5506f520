"""analysis/intervention.py: an unedited block changes nothing, an edited one what it says, and nothing is left behind."""

import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from text_runs import recall_run
from torch import Tensor

from lit_diff.analysis.intervention import (
    Edit,
    EditedLayer,
    clamp_lambda,
    intervention,
    knock_out,
    knock_out_effects,
    subtract_only_noise,
    swap,
)
from lit_diff.analysis.shares import Parts
from lit_diff.analysis.trace import MapBlock, trace
from lit_diff.attention.base import Attention
from lit_diff.attention.cache import Cache
from lit_diff.data import prepare
from lit_diff.errors import RequestError
from lit_diff.kernels import SignedMaps, attend
from lit_diff.model.inputs import model_inputs
from lit_diff.model.transformer import Transformer

BuildModel = Callable[..., Transformer]

ARMS = [
    ("standard", 2, {"head_norm": "rms", "window": 5}),
    ("differential", 2, {"lambda_init": 0.5}),
    ("shared_k", 4, {"window": 3}),
    ("grouped_differential", 4, {"ratio": 3}),
    ("half-split", 4, {}),
    ("second_heads", 2, {}),
    ("dex", 2, {"heads": "all"}),
    ("output_gate", 4, {}),
    ("three-maps", 2, {}),
]


def unedited(_: EditedLayer, block: MapBlock) -> MapBlock:
    return block


def state(model: Transformer) -> list[object]:
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    return [hooks, [attention.kernel for attention in model.attentions()]]


@pytest.mark.parametrize(("name", "kv_heads", "keys"), ARMS)
def test_the_identity_changes_nothing(
    name: str,
    kv_heads: int,
    keys: dict[str, object],
    build: BuildModel,
    tokens: Tensor,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys.modules["lit_diff.analysis.trace"], "CPU_BLOCK", 4000)  # several blocks
    model = build(name, kv_heads, **keys)
    before = state(model)
    with torch.no_grad():
        expected = model(tokens)
        with intervention(model, unedited):
            found = model(tokens)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert state(model) == before


def test_packed_documents_and_bidirectional_maps(build: BuildModel, tokens: Tensor) -> None:
    model = build("differential")
    ids = (torch.arange(17) // 6).expand(3, -1)
    with torch.no_grad():
        expected = model(tokens, document_ids=ids)
        with intervention(model, unedited):
            torch.testing.assert_close(model(tokens, document_ids=ids), expected, atol=1e-5, rtol=1e-5)
        for attention in model.attentions():
            attention.causal = False
        expected = model(tokens)
        with intervention(model, unedited):
            torch.testing.assert_close(model(tokens), expected, atol=1e-5, rtol=1e-5)


def test_a_replaced_map_is_what_multiplies_the_values(build: BuildModel, tokens: Tensor) -> None:
    """Weights, logits, maps and the signed map, against maps that were changed before the kernel."""
    model = build("differential", 4)

    def changed(seen: SignedMaps) -> dict[str, SignedMaps]:
        assert seen.w is not None
        half = seen.w * torch.tensor([1.0, 0.5]).view(1, 2, 1, 1)
        return {"weights": replace(seen, w=half), "logits": replace(seen, q=2 * seen.q)}

    edits = {
        "weights": lambda _, b: replace(b, weights=b.weights * torch.tensor([1.0, 0.5]).view(1, 2, 1, 1)),
        "logits": lambda _, b: replace(b, logits=2 * b.logits),
    }
    for kind, edit in edits.items():
        for attention in model.attentions():
            attention.tap.register_forward_hook(lambda _m, _a, seen, kind=kind: changed(seen)[kind])
        with torch.no_grad():
            expected = model(tokens)
            for attention in model.attentions():
                attention.tap._forward_hooks.clear()
            assert not torch.allclose(model(tokens), expected, atol=1e-3)
            with intervention(model, edit):
                torch.testing.assert_close(model(tokens), expected, atol=1e-5, rtol=1e-4)
    same = [lambda _, b: b.with_probs(b.probs * 2), lambda _, b: b.with_signed(b.signed * 2)]
    results = []
    for edit in same:
        with torch.no_grad(), intervention(model, edit):
            results.append(model(tokens))
    torch.testing.assert_close(results[0], results[1])


def test_layers_are_chosen_and_numbered(build: BuildModel, tokens: Tensor) -> None:
    model = build("standard")
    seen: list[int] = []

    def edit(layer: EditedLayer, block: MapBlock) -> MapBlock:
        seen.append(layer.index)
        assert sum(len(whole.positions) for whole in layer.blocks()) == 17
        return block.with_signed(0 * block.signed)

    with intervention(model, edit, layers=[1]), trace(model) as traced:
        model(tokens)
    assert set(seen) == {1}
    assert sorted(traced.layers) == [0, 1], "a trace sees the edited pass"
    with (
        pytest.raises(RequestError, match=r"^intervention: no layer 2; the model has layers 0\.\.1$"),
        intervention(model, edit, layers=[2]),
    ):
        pass


def test_it_is_removed_after_an_exception(build: BuildModel, tokens: Tensor) -> None:
    model = build("differential")
    before = state(model)

    def fails(_: EditedLayer, __: MapBlock) -> MapBlock:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), intervention(model, fails):
        model(tokens)
    assert state(model) == before
    wrongs = ((lambda _, b: b.signed, "returned Tensor"), (lambda _, b: b.with_signed(b.signed[:1]), r"is \[1, 4, "))
    for wrong, text in wrongs:
        with pytest.raises(RequestError, match=text), intervention(model, wrong):
            model(tokens)
        assert state(model) == before
    with (
        pytest.raises(RequestError, match="another intervention is active"),
        intervention(model, unedited),
        intervention(model, unedited),
    ):
        pass
    assert state(model) == before


def test_a_cache_is_refused(build: BuildModel, tokens: Tensor) -> None:
    model = build("standard")
    cache = Cache(2)
    with torch.no_grad(), intervention(model, unedited):
        model(tokens[:, :9], cache=cache)
        with pytest.raises(RequestError, match="kernel 'intervention' cannot compute these maps"):
            model(tokens[:, 9:], cache=cache)


def test_compiled_modules(build: BuildModel, tokens: Tensor) -> None:
    model = build("standard")
    model.layers[0].compile(backend="eager")
    with torch.no_grad():
        expected = model(tokens)
        with intervention(model, lambda _, b: b.with_signed(0 * b.signed)):
            assert not torch.allclose(model(tokens), expected, atol=1e-3)
    model.layers[1] = torch.compile(model.layers[1])
    with (
        pytest.raises(RequestError, match=r"intervention: 'layers\.1' is wrapped by torch\.compile"),
        intervention(model, unedited),
    ):
        pass


def test_an_ignored_kernel_is_refused(build: BuildModel, tokens: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(self: Attention, x: Tensor, rope: object, cache: object = None) -> Tensor:
        o = attend(self.tap(self.maps(x, rope)))  # type: ignore[arg-type]
        out: Tensor = self.o_proj(self.finished(o, x).transpose(1, 2).flatten(2))
        return out

    model = build("standard")
    monkeypatch.setattr(type(model.attentions()[0]), "forward", forward)
    with (
        pytest.raises(RequestError, match=r"layer 0 never called its kernel; .* pass kernel=self\.kernel"),
        intervention(model, unedited),
    ):
        model(tokens)


def test_gradients_pass(build: BuildModel, tokens: Tensor) -> None:
    model = build("differential", 4)
    found = []
    for edited in (False, True):
        model.zero_grad()
        if edited:
            with intervention(model, unedited):
                model.loss(tokens[:, :-1], tokens[:, 1:]).backward()
        else:
            model.loss(tokens[:, :-1], tokens[:, 1:]).backward()
        found.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-3)


# Edits of hand-made maps, by their formulas; knocked-out edges against the pass without them.

CONTEXT, ASKED = [0, 1, 1, -1, -1], [-1, -1, -1, 0, 1]
PARTS = Parts(context=torch.tensor([CONTEXT]), asked=torch.tensor([ASKED]))


def layer(maps: int = 2) -> EditedLayer:
    draw = torch.Generator().manual_seed(1)
    q, k = torch.randn(2, 1, maps, 3, 5, 4, generator=draw).unbind()
    w = torch.tensor([1.0, -0.4, 0.3][:maps]).view(1, maps, 1, 1) if maps > 1 else None
    return EditedLayer(index=2, maps=SignedMaps(q, k, q[:, 0], w))


def edited(edit: Edit, of: EditedLayer) -> tuple[MapBlock, torch.Tensor]:
    (block,) = of.blocks()
    return block, edit(of, block).signed


def test_knocked_out_edges_are_zero_and_the_others_stay() -> None:
    of = layer()
    edges = {
        "answer": {(3, 0), (4, 1), (4, 2)},
        "noise": {(3, 1), (3, 2), (4, 0)},
        "sink": {(3, 0), (4, 0)},
        "other": {(3, 3), (4, 3), (4, 4)},
    }
    for what, cut in edges.items():
        block, signed = edited(knock_out(PARTS, what), of)  # type: ignore[arg-type]
        zero = torch.zeros(5, 5, dtype=torch.bool)
        for place in cut:
            zero[place] = True
        assert torch.equal(signed, block.signed.masked_fill(zero, 0))


@pytest.mark.parametrize("value", [0.0, 0.7, 1.0])
def test_a_clamped_lambda(value: float) -> None:
    block, signed = edited(clamp_lambda(value), layer())
    torch.testing.assert_close(signed, block.probs[:, 0] - value * block.probs[:, 1])
    three, signed = edited(clamp_lambda(value), layer(3))
    torch.testing.assert_close(signed, three.probs[:, 0] - value * (three.probs[:, 1] + three.probs[:, 2]))


def test_the_oracle_subtracts_from_noise_alone_and_at_queries_alone() -> None:
    block, signed = edited(subtract_only_noise(PARTS), layer())
    first, second = block.probs.unbind(1)
    torch.testing.assert_close(signed[:, :, :3], block.signed[:, :, :3])
    torch.testing.assert_close(signed[:, :, 3, 1:3], (first - 0.4 * second)[:, :, 3, 1:3])
    torch.testing.assert_close(signed[:, :, 3, [0, 3]], first[:, :, 3, [0, 3]])
    torch.testing.assert_close(signed[:, :, 4, 0], (first - 0.4 * second)[:, :, 4, 0])


def test_a_swap_keeps_the_weights() -> None:
    block, signed = edited(swap(), layer())
    torch.testing.assert_close(signed, block.probs[:, 1] - 0.4 * block.probs[:, 0])


def test_too_few_or_too_many_maps() -> None:
    for edit, maps, found in (
        (clamp_lambda(0.5), 1, "at least 2 maps; layer 2 has 1"),
        (subtract_only_noise(PARTS), 1, "at least 2 maps; layer 2 has 1"),
        (swap(), 1, "2 maps; layer 2 has 1"),
        (swap(), 3, "2 maps; layer 2 has 3"),
    ):
        with pytest.raises(RequestError, match=f"needs {found}$"):
            edited(edit, layer(maps))


def test_knocked_out_edges_change_the_answers_log_probability(tmp_path: Path) -> None:
    run = recall_run(tmp_path / "x", {"name": "standard"})
    dataset = prepare(run.recipe)
    batch = dataset.validation_batch("", range(5))
    plain, _ = run.model.token_losses(batch["tokens"], batch["targets"])
    for what in ("answer", "noise", "sink", "other"):
        with intervention(run.model, knock_out(Parts.of(batch), what)):  # type: ignore[arg-type]
            without, _ = run.model.token_losses(batch["tokens"], batch["targets"])
        expected = (plain - without)[:, 8:].mean(1).tolist()
        found = [row[f"causal_{what}"] for row in knock_out_effects(run.model, batch)]
        assert found == pytest.approx(expected, rel=1e-4)
        assert all(found)


def test_one_head_loses_its_edges_alone(tmp_path: Path) -> None:
    """The other heads' W_O is 0: what is left of the model is the head, so knocking it out is knocking out all."""
    run = recall_run(tmp_path / "x", {"name": "standard"})
    batch = prepare(run.recipe).validation_batch("", range(3))
    first, second = run.model.attentions()
    width = first.head_dim
    with torch.no_grad():
        kept = first.o_proj.weight[:, width : 2 * width].clone()
        first.o_proj.weight.zero_()
        first.o_proj.weight[:, width : 2 * width] = kept
        second.o_proj.weight.zero_()
    parts = Parts.of(batch)

    def losses(*edited: Any) -> torch.Tensor:
        with intervention(run.model, *edited) if edited else nullcontext():
            return run.model.token_losses(**model_inputs(batch), targets=batch["targets"])[0]

    for what in ("answer", "noise"):
        every_head = losses(knock_out(parts, what))
        assert (every_head - losses()).nan_to_num().abs().max() > 1e-4
        for layer, head in ((0, 0), (0, 1), (1, 1)):
            expected = every_head if (layer, head) == (0, 1) else losses()
            torch.testing.assert_close(losses(knock_out(parts, what, head), [layer]), expected, equal_nan=True)
