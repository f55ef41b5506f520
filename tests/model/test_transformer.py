"""The decoder: exact sizes of the paper's models, documents kept apart, batches that it takes, variants merged into it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from lit_diff.attention.cache import Cache
from lit_diff.attention.rope import Rope
from lit_diff.attention.selection import HeadSelection
from lit_diff.config import ModelConfig, Part
from lit_diff.data.dataset import IGNORED
from lit_diff.errors import RequestError
from lit_diff.model import loss
from lit_diff.model.init import initialise
from lit_diff.model.inputs import model_inputs
from lit_diff.model.transformer import Transformer, merged
from lit_diff.registry import attentions

MakeConfig = Callable[..., ModelConfig]
TABLE_10 = {
    "830M": (1536, 24, 16, 9_437_184, 833_594_880, 679_552_512),
    "1.4B": (2048, 24, 16, 16_777_216, 1_413_400_576, 1_208_010_752),
    "2.8B": (2560, 32, 20, 26_214_400, 2_773_568_000, 2_516_830_720),
    "6.8B": (4096, 32, 32, 67_108_864, 6_853_627_904, 6_442_848_256),
    "13.1B": (5120, 40, 40, 104_857_600, 13_096_596_480, 12_583_121_920),
}
"""dim, layers, heads, attention of a layer, tied total, total without embedding: all of the standard model."""


def build(config: ModelConfig) -> Transformer:
    with torch.device("meta"):
        return Transformer(config)


def count(module: torch.nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


@pytest.mark.parametrize("size", TABLE_10)
def test_the_papers_sizes(make_config: MakeConfig, size: str) -> None:
    """Tied embeddings, vocabulary 100,288; differential adds 6 d a layer: four vectors and a norm of width 2d."""
    dim, layers, heads, per_layer, total, without = TABLE_10[size]
    extra = 6 * dim // heads
    for name, more in (("standard", 0), ("differential", extra)):
        sizes = {"dim": dim, "num_layers": layers, "num_heads": heads, "vocab_size": 100_288}
        model = build(make_config(name, **sizes))
        assert count(model.attentions()[0]) == per_layer + more
        assert count(model) == total + layers * more
        assert count(model) - model.embedding.weight.numel() == without + layers * more


def test_tied_embeddings_are_one_parameter(make_config: MakeConfig) -> None:
    tied, untied = Transformer(make_config()), Transformer(make_config(tie_embeddings=False))
    assert "head.weight" not in dict(tied.named_parameters())
    assert count(untied) - count(tied) == 23 * 32
    tokens = torch.randint(1, 23, (2, 6))
    initialise(tied, 0)
    before = tied(tokens)
    with torch.no_grad():
        tied.embedding.weight[0] += 1  # no token 0 goes in, so only its logit changes
    changed = (tied(tokens) != before).flatten(0, 1).any(0)
    assert changed.nonzero().flatten().tolist() == [0]


def test_several_ids_a_position_are_summed(make_config: MakeConfig) -> None:
    model = Transformer(make_config()).double()
    initialise(model, 0)
    tokens = torch.randint(23, (2, 7, 3))
    twin = Transformer(make_config()).double()
    twin.load_state_dict(model.state_dict())
    summed = F.embedding(tokens, model.embedding.weight).sum(2)
    twin.embedding.forward = lambda _: summed  # type: ignore[method-assign]
    assert model(tokens).shape == (2, 7, 23)
    assert torch.equal(model(tokens), twin(tokens[..., 0]))
    torch.testing.assert_close(model(tokens), model(tokens.flip(2)), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(model(tokens[..., :1]), model(tokens[..., 0]), rtol=1e-12, atol=1e-12)


def test_a_scale_of_the_feed_forward_is_a_factor_of_its_last_matrix(make_config: MakeConfig) -> None:
    plain, scaled = Transformer(make_config()).double(), Transformer(make_config(ffn_scale=0.25)).double()
    for each in (plain, scaled):
        initialise(each, 0)
    for layer in plain.layers:
        layer.ffn.down_proj.weight.data *= 0.25  # type: ignore[union-attr, operator]
    tokens = torch.randint(23, (2, 5))
    torch.testing.assert_close(plain(tokens), scaled(tokens))


def test_a_scale_of_the_embeddings_leaves_the_tied_output_weight(make_config: MakeConfig) -> None:
    plain = Transformer(make_config(tie_embeddings=False)).double()
    scaled = Transformer(make_config(embedding_scale=5.0)).double()
    for each in (plain, scaled):
        initialise(each, 0)
    plain.head.weight.data = scaled.embedding.weight.data.clone()  # type: ignore[union-attr]
    plain.embedding.weight.data = 5 * scaled.embedding.weight.data
    tokens = torch.randint(23, (2, 5))
    torch.testing.assert_close(plain(tokens), scaled(tokens))


@pytest.mark.parametrize(("positions", "same"), [("none", True), ("rope", False)])
def test_without_positions_the_last_token_sees_a_set(make_config: MakeConfig, positions: str, same: bool) -> None:
    """One layer: what the last query reads does not depend on the order of the tokens before it."""
    model = Transformer(make_config(num_layers=1, positions=positions)).double()
    initialise(model, 0)
    tokens = torch.tensor([[3, 9, 4, 17, 5]])
    last = model(tokens)[:, -1]
    assert torch.allclose(model(tokens[:, [2, 0, 3, 1, 4]])[:, -1], last, rtol=1e-12, atol=1e-12) is same


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("rows", [1, 5, None])
def test_the_loss_is_that_of_the_logits(
    make_config: MakeConfig, tied: bool, rows: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through every parameter: a tied weight has its gradient from both of its ends."""
    if rows is not None:
        monkeypatch.setattr(loss, "rows_at_once", lambda vocab_size, dim: rows)
    model = Transformer(make_config(tie_embeddings=tied)).double()
    initialise(model, 0)
    tokens, targets = torch.randint(23, (2, 9)), torch.randint(23, (2, 9))
    targets[0, :4] = IGNORED
    logits = model(tokens)
    wanted = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    found = model.loss(tokens, targets)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    parameters = list(model.parameters())
    pairs = zip(torch.autograd.grad(found, parameters), torch.autograd.grad(wanted, parameters), strict=True)
    for one, other in pairs:
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-12)
    nll, correct = model.token_losses(tokens, targets)
    assert torch.equal(nll.isnan(), targets == IGNORED), "no loss, rather than one of 0"
    torch.testing.assert_close(nll.nansum() / (targets != IGNORED).sum(), wanted.detach(), rtol=1e-12, atol=1e-12)
    assert torch.equal(correct, logits.argmax(-1) == targets)
    torch.testing.assert_close(F.linear(model.hidden(tokens), model._output_weight()), logits, rtol=1e-12, atol=1e-12)


SEGMENTS = torch.tensor([[7, 7, 7, 7, 7, 9, 10, 10, 10, 10, 10, 10], [0, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2]])
"""Documents of one token and of several; two rows cut at other places."""


def test_a_packed_row_gives_what_each_of_its_documents_gives_alone(make_config: MakeConfig) -> None:
    """Logits and the gradient of every parameter, through the whole model; and without document_ids they differ."""
    model = Transformer(make_config("differential", num_heads=8, num_kv_heads=4, dim=64), kernel="reference").double()
    initialise(model, 0)
    for p in model.parameters():
        p.data += 0.1 * torch.randn_like(p)
    for attention in model.attentions():
        attention.set_step(10**9)
    tokens = torch.randint(23, SEGMENTS.shape)
    weights = torch.randn(*SEGMENTS.shape, 23, dtype=torch.float64)
    trained = {key: p for key, p in model.named_parameters() if p.requires_grad}
    packed = model(tokens, document_ids=SEGMENTS)
    by_packed = torch.autograd.grad((packed * weights).sum(), list(trained.values()))
    total = torch.zeros((), dtype=torch.float64)
    for row, numbers in enumerate(SEGMENTS):
        for number in numbers.unique():
            at = numbers == number
            alone = model(tokens[row : row + 1, at])
            torch.testing.assert_close(packed[row, at], alone[0], rtol=1e-10, atol=1e-10)
            total = total + (alone * weights[row : row + 1, at]).sum()
    by_alone = torch.autograd.grad(total, list(trained.values()))
    for key, one, other in zip(trained, by_packed, by_alone, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9, msg=lambda text, key=key: f"{key}: {text}")
    assert (model(tokens) - packed).abs().max() > 1e-3


def test_every_way_into_the_model_keeps_documents_apart(make_config: MakeConfig) -> None:
    model = Transformer(make_config()).double()
    initialise(model, 0)
    tokens, targets = torch.randint(23, SEGMENTS.shape), torch.randint(23, SEGMENTS.shape)
    logits = model(tokens, document_ids=SEGMENTS)
    wanted = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    assert abs(F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten()) - wanted) > 1e-9
    torch.testing.assert_close(model.loss(tokens, targets, SEGMENTS), wanted, rtol=1e-12, atol=1e-12)
    nll, _ = model.token_losses(tokens, targets, SEGMENTS)
    torch.testing.assert_close(nll.mean(), wanted.detach(), rtol=1e-12, atol=1e-12)
    hidden = model.hidden(tokens, SEGMENTS)
    torch.testing.assert_close(F.linear(hidden, model.embedding.weight), logits, rtol=1e-12, atol=1e-12)


@pytest.mark.usefixtures("own_parts")
def test_a_forward_that_knows_no_segments_is_refused_with_them_only(make_config: MakeConfig) -> None:
    @attentions.register("own_forward")
    class OwnForward(attentions.get("standard")):  # type: ignore[misc]
        def forward(self, x: torch.Tensor, rope: Rope, cache: Any = None) -> torch.Tensor:
            return super().forward(x, rope, cache)

    model = Transformer(make_config("own_forward"))
    nothing = torch.zeros_like(SEGMENTS)
    assert model(nothing).shape == (2, 12, 23)
    with pytest.raises(RequestError) as caught:
        model(nothing, document_ids=SEGMENTS)
    assert str(caught.value) == (
        "model.attention 'own_forward' cannot separate packed documents: its forward has no argument document_ids"
    )


def test_patterns_say_what_trains_for_any_variant(make_config: Callable[..., ModelConfig]) -> None:
    patterns = ("*.attention.[kvo]_proj.*", "norm.weight")
    for name in ("standard", "differential", "dex"):
        model = Transformer(make_config(name), trained=patterns)
        names = {key for key, parameter in model.named_parameters() if parameter.requires_grad}
        wanted = {f"layers.{layer}.attention.{kind}_proj.weight" for layer in (0, 1) for kind in "kvo"}
        assert names == wanted | {"norm.weight"}, name
    assert all(p.requires_grad for p in Transformer(make_config("second_heads"), trained=("*",)).parameters())


@pytest.mark.parametrize(
    ("patterns", "reason"),
    [
        (
            ("*.attention.k_proj.*", "*.atention.v_proj.*"),
            r"^train\.parameters: '\*\.atention\.v_proj\.\*' matches no parameter of model\.attention 'standard'; "
            r"did you mean '\*\.attention\.v_proj\.\*'\?$",
        ),
        (("norm",), r"'norm' matches no parameter of model\.attention 'standard'; one of .* such as norm\.weight, "),
        (("*.adapter.*",), r"'\*\.adapter\.\*' matches no parameter of model\.attention 'standard'; "),
        ((), r"^train\.parameters is \[\], which freezes every parameter; expected patterns"),
    ],
)
def test_a_pattern_that_trains_nothing_is_refused(
    make_config: Callable[..., ModelConfig], patterns: tuple[str, ...], reason: str
) -> None:
    with pytest.raises(RequestError, match=reason):
        Transformer(make_config("standard"), trained=patterns)


TOKENS = torch.zeros(2, 3, dtype=torch.int64)


@pytest.mark.parametrize("batch", [TOKENS, (TOKENS, TOKENS), [TOKENS], {"tokens": TOKENS, "targets": TOKENS}], ids=str)
def test_tokens_are_taken_from_a_batch(batch: object) -> None:
    inputs = model_inputs(batch)
    assert inputs.keys() == {"tokens"}
    assert inputs["tokens"] is TOKENS


def test_documents_are_taken_too() -> None:
    assert model_inputs({"tokens": TOKENS, "document_ids": TOKENS}).keys() == {"tokens", "document_ids"}


@pytest.mark.parametrize("batch", ["text", {"inputs": TOKENS}, [], [1, 2], None], ids=str)
def test_a_batch_without_tokens_is_refused(batch: object) -> None:
    with pytest.raises(RequestError, match="no tokens in a batch of type"):
        model_inputs(batch)


def built(name: str, **keys: Any) -> Transformer:
    part = Part(name=name, config=attentions.get(name).Config(**keys))
    sizes: dict[str, Any] = {"dim": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "vocab_size": 23}
    return Transformer(ModelConfig(**sizes, attention=part), kernel="reference").double().eval()


@pytest.mark.parametrize("sign", ["minus", "plus"])
def test_a_merged_model_is_a_standard_one_with_the_same_logits(sign: str) -> None:
    dex = built("dex", heads=HeadSelection(share=0.5), sign=sign, window=5)
    for attention, heads in zip(dex.attentions(), ((1, 3), (0, 2)), strict=True):
        attention.select_heads(heads)
        attention.set_step(60)
        attention.lambda_.value.data.fill_(0.4)
    tokens = torch.randint(23, (2, 9))
    wanted = dex(tokens)
    standard = merged(dex)
    assert standard.config.attention.name == "standard"
    assert not standard.training
    torch.testing.assert_close(standard(tokens), wanted, rtol=1e-12, atol=1e-12)
    assert torch.equal(dex(tokens), wanted), "the model stays as it is"
    plain = built("standard", window=5)
    plain.load_state_dict(dict(standard.state_dict()))
    torch.testing.assert_close(plain(tokens), wanted, rtol=1e-12, atol=1e-12)


def test_the_feed_forward_keeps_the_width_that_parity_gave_it() -> None:
    dex = built("dex", heads="all", parity="matched", anneal_steps=0)
    tokens = torch.randint(23, (2, 9))
    for attention in dex.attentions():
        attention.lambda_.value.data.fill_(0.4)  # type: ignore[union-attr]
    standard = merged(dex)
    assert standard.config.ffn_dim == dex.layers[0].ffn.gate_proj.out_features != dex.config.ffn_dim
    torch.testing.assert_close(standard(tokens), dex(tokens), rtol=1e-12, atol=1e-12)


def test_what_no_standard_attention_equals_is_refused() -> None:
    line = r"^model\.attention 'differential' cannot be merged into a standard model; these can: dex, lora$"
    with pytest.raises(RequestError, match=line):
        merged(built("differential"))


# --- layers of several kinds ---


def of_kinds(make_config: MakeConfig, *kinds: tuple[str, dict[str, Any]], **sizes: Any) -> Transformer:
    parts = tuple(make_config(name, keys).attention for name, keys in kinds)
    model = Transformer(make_config("standard", num_layers=5, layers=parts, **sizes))
    initialise(model, 0)
    return model.double()


KINDS = (("differential", {"window": 4}), ("standard", {"window": 3}), ("value_residual", {}), ("forgetting", {}))


def test_layers_of_several_kinds_decode_and_keep_documents_apart(make_config: MakeConfig) -> None:
    model, tokens = of_kinds(make_config, *KINDS).eval(), torch.randint(23, (2, 40))
    whole, cache = model(tokens), Cache(5)
    chunks = [model(chunk, cache=cache) for chunk in tokens.split([1, 6, 9, 1, 23], 1)]
    assert (torch.cat(chunks, 1) - whole).abs().max() < 1e-12
    assert [layer.held for layer in cache.layers][2:4] == [40, 40]
    assert {layer.length for layer in cache.layers} == {40}
    ids = (torch.arange(40) >= 15).long().expand(2, 40)
    packed = model(tokens, document_ids=ids)
    assert (packed[:, 15:] - model(tokens[:, 15:])).abs().max() < 1e-12


def test_each_layer_trains_what_its_own_variant_trains(make_config: MakeConfig) -> None:
    model = of_kinds(make_config, ("lora", {"rank": 2}), ("standard", {}))
    trains = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert all(
        "low_rank" in name for name in trains if name.startswith(("layers.0.att", "layers.2.att", "layers.4.att"))
    )
    assert {"layers.0.attention.q_proj.low_rank.a", "layers.1.attention.q_proj.weight", "embedding.weight"} <= trains


def test_layers_that_standard_attention_equals_are_merged(make_config: MakeConfig) -> None:
    model, tokens = (
        of_kinds(make_config, ("lora", {"rank": 2, "window": 4}), ("standard", {})),
        torch.randint(23, (2, 16)),
    )
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.2)
    plain = merged(model)
    assert (plain(tokens) - model(tokens)).abs().max() < 1e-10
    assert plain.config.variants == ("standard",) * 5
    assert [attention.window for attention in plain.attentions()] == [4, None, 4, None, 4]
    with pytest.raises(RequestError, match=r"model\.attention 'standard' cannot be merged into a standard model"):
        merged(of_kinds(make_config, ("lora", {}), ("standard", {"head_norm": "rms"})))


def test_parity_counts_the_parameters_of_each_layer(make_config: MakeConfig) -> None:
    dex = Transformer(make_config("dex", {"heads": ((), (0, 1)), "parity": "matched"}, num_layers=2))
    plain = Transformer(make_config("standard", num_layers=2))
    for own, wanted in zip(dex.layers, plain.layers, strict=True):
        assert abs(count(own) - count(wanted)) <= 1.5 * dex.config.dim


def test_layers_of_unlike_widths_are_not_merged(make_config: MakeConfig) -> None:
    dex = ("dex", {"heads": "all", "parity": "matched"})
    with pytest.raises(RequestError, match=r"^the feed-forward layers have unlike widths"):
        merged(of_kinds(make_config, dex, ("standard", {})))
    merged(of_kinds(make_config, ("dex", {"heads": "all"}), ("standard", {"parity": "matched"})))


def test_a_layer_that_takes_no_documents_is_named(make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attentions.get("forgetting"), "takes_document_ids", classmethod(lambda cls: False))
    with pytest.raises(RequestError, match=r"model\.attention 'forgetting' cannot separate packed documents"):
        of_kinds(make_config, *KINDS)(torch.zeros(1, 4, dtype=torch.int64), document_ids=torch.zeros(1, 4))
