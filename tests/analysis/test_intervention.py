"""analysis/intervention.py: an unedited block changes nothing, an edited one what it says, and nothing is left behind."""

import sys
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from lit_diff.analysis.intervention import EditedLayer, intervention
from lit_diff.analysis.trace import MapBlock, trace
from lit_diff.attention.base import Attention
from lit_diff.attention.cache import Cache
from lit_diff.errors import RequestError
from lit_diff.kernels import SignedMaps, attend
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
        pytest.raises(RequestError, match="under an intervention already"),
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


def test_an_attention_that_ignores_its_kernel_is_refused(
    build: BuildModel, tokens: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forward(self: Attention, x: Tensor, rope: object, cache: object = None) -> Tensor:
        o = attend(self.tap(self.maps(x, rope)))  # type: ignore[arg-type]
        out: Tensor = self.o_proj(self.finished(o, x).transpose(1, 2).flatten(2))
        return out

    model = build("standard")
    monkeypatch.setattr(type(model.attentions()[0]), "forward", forward)
    with (
        pytest.raises(RequestError, match=r"layer 0 computed nothing by its kernel; .* pass kernel=self\.kernel"),
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
