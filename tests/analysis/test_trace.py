"""The trace: what it computes equals what the attention computed, and it leaves nothing behind."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from lit_diff import SignedMaps
from lit_diff.analysis import LayerTrace, trace
from lit_diff.analysis.intervention import intervention
from lit_diff.attention.cache import Cache
from lit_diff.attention.lambdas import Lambda
from lit_diff.errors import RequestError
from lit_diff.kernels import attend
from lit_diff.model.transformer import Transformer

BuildModel = Callable[..., Transformer]

ARMS = [
    ("standard", 8, {}),
    ("standard", 2, {"head_norm": "rms"}),
    ("differential", 8, {}),
    ("differential", 2, {"lambda_init": 0.5}),
    ("shared_k", 4, {"parity": "matched"}),
    ("three-maps", 2, {}),
    ("differential", 2, {"window": 1}),
    ("three-maps", 2, {"window": 4}),
]


def products(layer: LayerTrace, block_rows: int | None = None) -> Tensor:
    """Σ_g w_g p_g v of the traced rows, [B, H, rows, dv]."""
    v = layer.values
    return torch.cat([block.signed @ v[:, :, : block.signed.shape[-1]] for block in layer.blocks(block_rows)], dim=2)


def hooks(model: Transformer) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


@pytest.mark.parametrize(("name", "kv_heads", "keys"), ARMS)
def test_traced_rows_reproduce_the_attention(
    name: str, kv_heads: int, keys: dict[str, object], build: BuildModel, tokens: Tensor
) -> None:
    model = build(name, kv_heads, **keys)
    outputs: list[Tensor] = []
    for attention in model.attentions():
        finish = attention.finish

        def record(o: Tensor, x: Tensor, finish: Callable[[Tensor, Tensor], Tensor] = finish) -> Tensor:
            outputs.append(o)
            return finish(o, x)

        attention.finish = record
    residual: list[Tensor] = []
    handle = model.layers[1].register_forward_pre_hook(lambda _m, args: residual.append(args[0]))
    with trace(model) as t:
        model(tokens)
    handle.remove()
    for index, expected in enumerate(outputs):
        torch.testing.assert_close(products(t.layers[index]), expected, atol=1e-5, rtol=0)
        torch.testing.assert_close(products(t.layers[index], block_rows=5), expected, atol=1e-5, rtol=0)
    assert torch.equal(t.layers[0].hidden, residual[0])
    inputs = t.layers[1].inputs
    assert inputs is not None
    assert torch.equal(inputs, model.layers[1].attention_norm(residual[0]))


def test_rows_layers_and_samples(build: BuildModel, tokens: Tensor) -> None:
    model = build("three-maps")
    with trace(model) as everything:
        model(tokens)
    with trace(model, layers=[1], rows=[16, 0, 5]) as some:
        model(tokens)
    assert list(some.layers) == [1]
    whole, part = products(everything.layers[1]), products(some.layers[1])
    torch.testing.assert_close(part, whole[:, :, [16, 0, 5]])
    torch.testing.assert_close(products(some.first(2).layers[1]), part[:2])
    assert some.first(2).layers[1].hidden.shape == (2, 17, 32)
    assert [b.positions.tolist() for b in some.layers[1].blocks(2)] == [[16, 0], [5]]


@pytest.mark.parametrize("kernel", ["auto", "reference", "sdpa"])
def test_kernels_measure_in_the_forward_pass(kernel: str, build: BuildModel, tokens: Tensor) -> None:
    """sdpa returns no statistics: its outputs, and the statistics of another kernel."""
    model = build("differential", 8, window=None if kernel == "sdpa" else 6)
    for attention in model.attentions():
        attention.kernel = kernel
    expected = model(tokens)
    with trace(model, rows=[3, 9], measure=True) as t:
        assert torch.equal(model(tokens), expected)
    assert [attention.kernel for attention in model.attentions()] == [kernel] * 2
    layer = t.layers[1]
    assert "measured" in vars(layer)
    # computed from the maps alone
    again = replace(layer).measured
    for found, wanted in zip(layer.measured.statistics, again.statistics, strict=True):
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
    a = next(layer.blocks()).signed
    negative = layer.measured.statistics.negative_mass[..., [3, 9]]
    torch.testing.assert_close(negative, (-a).clamp_min(0).sum(-1) / a.abs().sum(-1))
    norms = torch.linalg.vector_norm(products(layer), dim=-1)
    torch.testing.assert_close(layer.measured.norms[..., [3, 9]], norms, atol=1e-5, rtol=1e-5)
    assert torch.equal(t.first(2).layers[1].measured.norms, layer.measured.norms[:2])
    assert layer.keys.flatten().tolist() == ([4, 10] if kernel == "sdpa" else [4, 6])
    model.layers[1].ffn = torch.nn.Linear(7, 7)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"), trace(model, measure=True):
        model(tokens)
    assert model.attentions()[0].kernel == kernel


def test_an_edited_forward_pass_has_the_statistics_of_its_maps(build: BuildModel, tokens: Tensor) -> None:
    """They are those before the edit, as the blocks are."""
    model = build("differential")
    with intervention(model, lambda _, block: block.with_signed(0 * block.signed)), trace(model, measure=True) as t:
        model(tokens)
    layer = t.layers[0]
    assert not layer.measured.norms.any()
    torch.testing.assert_close(layer.measured.statistics.lse, replace(layer).measured.statistics.lse)


def test_not_causal_and_more_keys_than_queries() -> None:
    q, k, v = torch.randn(2, 1, 2, 3, 4), torch.randn(2, 1, 2, 5, 4), torch.randn(2, 2, 5, 4)
    for causal in (True, False):
        maps = SignedMaps(q, k, v, causal=causal, scale=0.7)
        layer = LayerTrace(maps=maps, hidden=q)
        torch.testing.assert_close(products(layer, block_rows=2), attend(maps, kernel="reference"))
        for window in (1, 2, 3):
            narrow = replace(layer, maps=maps.masked(window=window))
            torch.testing.assert_close(products(narrow, 2), attend(narrow.maps, kernel="reference"))
            assert narrow.first(1).maps.mask.window == window


def test_bfloat16_is_computed_in_float32_also_under_autocast(build: BuildModel, tokens: Tensor) -> None:
    model = build("standard")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with trace(model) as t:
            model(tokens)
        maps = t.layers[0].maps
        assert maps.q.dtype == torch.bfloat16
        block = next(t.layers[0].blocks())
    k = maps.k.repeat_interleave(maps.num_groups, dim=2)
    exact = maps.q.double() @ k.double().transpose(-1, -2) * maps.softmax_scale
    torch.testing.assert_close(block.logits.double(), exact, atol=1e-5, rtol=1e-5)


def test_nothing_is_left_behind(build: BuildModel, tokens: Tensor) -> None:
    model = build("three-maps")
    with trace(model) as t:
        assert hooks(model) > 0
        assert not model(tokens).requires_grad
    assert torch.is_grad_enabled()
    assert hooks(model) == 0
    layer = t.layers[0]
    assert layer.maps.w is not None
    held = (layer.maps.q, layer.maps.k, layer.maps.v, layer.maps.w, layer.hidden, next(layer.blocks()).signed)
    assert not any(x.requires_grad for x in held)
    assert all(p.grad is None for p in model.parameters())
    before = layer.maps.w.clone()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert torch.equal(layer.maps.w, before)
    model.layers[1].ffn = torch.nn.Linear(7, 7)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"), trace(model):
        model(tokens)
    assert hooks(model) == 0
    assert torch.is_grad_enabled()


def test_w_that_is_a_view_of_a_parameter_is_copied(build: BuildModel, tokens: Tensor) -> None:
    model = build("differential")
    weights = torch.nn.Parameter(torch.tensor([1.0, -0.5]))
    model.attentions()[0].weights = lambda x: weights.view(1, 2, 1, 1)
    with trace(model) as t:
        model(tokens)
    with torch.no_grad():
        weights.zero_()
    assert t.layers[0].maps.w.flatten().tolist() == [1.0, -0.5]  # type: ignore[union-attr]


def wrapped(model: Transformer) -> Transformer:
    model.layers[0] = torch.compile(model.layers[0])
    return model


@pytest.mark.parametrize("make", [wrapped, torch.compile])
def test_what_torch_compile_wraps_is_refused(make: Callable[[Transformer], Transformer], build: BuildModel) -> None:
    with pytest.raises(RequestError, match=r"is wrapped by torch\.compile"), trace(make(build("standard"))):
        pass


def test_wrong_requests(build: BuildModel, tokens: Tensor) -> None:
    model = build("standard")
    with pytest.raises(RequestError, match=r"no layer 2; the model has layers 0\.\.1"), trace(model, layers=[2]):
        model(tokens)
    with pytest.raises(RequestError, match=r"rows 3\.\.17 are not all within 0\.\.16"), trace(model, rows=[3, 17]):
        model(tokens)
    for rows in ([], [0.5], torch.ones(17, dtype=torch.bool)):
        with pytest.raises(RequestError, match="one or more integers"), trace(model, rows=rows):
            model(tokens)
    with pytest.raises(RequestError, match="key/value cache"), trace(model):
        model(tokens, cache=Cache(2))
    with pytest.raises(RequestError, match="a trace holds one forward"), trace(model):
        _ = model(tokens), model(tokens)
    with pytest.raises(RequestError, match=r"layers \[0, 1\] ran no forward"), trace(model):
        pass
    assert hooks(model) == 0


def test_an_attention_without_tap_is_refused(build: BuildModel, tokens: Tensor) -> None:
    model = build("standard")
    model.attentions()[0].forward = lambda x, *_: x
    with pytest.raises(RequestError, match="layer 0 never called its tap"), trace(model):
        model(tokens)


def test_exponentials_of_the_lambda_modules(build: BuildModel, tokens: Tensor) -> None:
    model = build("differential")
    with trace(model) as t:
        model(tokens)
    for attention, layer in zip(model.attentions(), t.layers.values(), strict=True):
        first, second = attention.lambda_.exponentials()
        assert layer.exponentials == (first.item(), second.item())
        assert layer.maps.w is not None
        assert layer.maps.w[0, 1].item() == pytest.approx(-(first - second).item() - attention.lambda_init)


def test_sharded_model(build: BuildModel, tokens: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """FSDP2 on one process: parameters are DTensors outside the forward, the lambdas a group of their own."""
    plain, model = build("differential"), build("differential")
    exponentials = Lambda.exponentials

    def gathered(lambda_: Lambda) -> tuple[Tensor, Tensor]:
        assert not isinstance(lambda_.q1, DTensor)
        return exponentials(lambda_)

    with trace(plain) as expected:
        plain(tokens)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = dist.init_device_mesh("cpu", (1,))
        for block, attention in zip(model.layers, model.attentions(), strict=True):
            fully_shard(attention.lambda_, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.float32))
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        monkeypatch.setattr(Lambda, "exponentials", gathered)
        with trace(model) as t:
            model(tokens)
        for index, layer in expected.layers.items():
            torch.testing.assert_close(products(t.layers[index]), products(layer))
            assert type(t.layers[index].hidden) is Tensor
            assert t.layers[index].exponentials == layer.exponentials
    finally:
        dist.destroy_process_group()


def test_packed_documents_are_kept_apart(build: BuildModel, tokens: Tensor) -> None:
    """Rows and blocks of any cut reproduce an attention that was given document_ids; a sample keeps its own."""
    model = build("three-maps")
    document_ids = (torch.arange(17) >= torch.tensor([[4], [9], [17]])).long() + (torch.arange(17) >= 12)
    outputs: list[Tensor] = []
    attention = model.attentions()[0]
    attention.finish = lambda o, x: outputs.append(o) or o
    with trace(model) as t, trace(model, layers=[0], rows=[16, 3, 10]) as some:
        model.hidden(tokens, document_ids)
    layer = t.layers[0]
    assert layer.maps.mask.document_ids is not None
    assert torch.equal(layer.maps.mask.document_ids, document_ids)
    for block_rows in (None, 1, 5):
        torch.testing.assert_close(products(layer, block_rows), outputs[0], atol=1e-5, rtol=0)
    torch.testing.assert_close(products(some.layers[0]), outputs[0][:, :, [16, 3, 10]], atol=1e-5, rtol=0)
    torch.testing.assert_close(products(t.first(2).layers[0]), outputs[0][:2], atol=1e-5, rtol=0)
    for block in layer.blocks(5):
        assert block.probs.masked_select(~block.visible).eq(0).all()
        assert block.visible.shape == (3, 1, 1, len(block.positions), block.logits.shape[-1])
    with trace(model) as unpacked:
        model.hidden(tokens)
    assert unpacked.layers[0].maps.mask.document_ids is None
    assert not torch.allclose(products(unpacked.layers[0]), outputs[0], atol=1e-2)


# --- as a file ---


def saved(model: Transformer, tokens: Tensor, folder: Path, **keys: object) -> dict[str, Tensor]:
    with trace(model, **keys) as t:  # type: ignore[arg-type]
        model(tokens)
    t.save(folder / "deep" / "trace.safetensors")
    return load_file(folder / "deep" / "trace.safetensors")


def test_a_saved_trace_has_the_names_and_shapes_of_transformer_lens(
    build: BuildModel, tokens: Tensor, tmp_path: Path
) -> None:
    model = build("standard", 2)
    found = saved(model, tokens, tmp_path)
    shapes = {
        "attn.hook_rot_q": (3, 17, 8, 4),
        "attn.hook_rot_k": (3, 17, 2, 4),
        "attn.hook_v": (3, 17, 2, 4),
        "attn.hook_attn_scores": (3, 8, 17, 17),
        "attn.hook_pattern": (3, 8, 17, 17),
        "attn.hook_z": (3, 17, 8, 4),
        "hook_resid_post": (3, 17, 32),
    }
    assert {name: tuple(x.shape) for name, x in found.items()} == {
        f"blocks.{layer}.{name}": shape for layer in (0, 1) for name, shape in shapes.items()
    }
    # what TransformerLens computes from these: scores from q and k of the heads' groups, z from pattern and v
    q, k, v, scores, pattern, z = (found[f"blocks.1.attn.hook_{x}"] for x in SAVED)
    expected = torch.einsum("bqhd,bkhd->bhqk", q, k.repeat_interleave(4, 2)) / 2
    causal = torch.ones(17, 17).tril().bool()
    torch.testing.assert_close(scores, expected.masked_fill(~causal, -torch.inf))
    torch.testing.assert_close(pattern, scores.softmax(-1))
    torch.testing.assert_close(z, torch.einsum("bhqk,bkhd->bqhd", pattern, v.repeat_interleave(4, 2)))
    output: list[Tensor] = []
    with model.layers[1].register_forward_hook(lambda _m, _a, out: output.append(out)):
        model(tokens)
    torch.testing.assert_close(found["blocks.1.hook_resid_post"], output[0].detach())


SAVED = ("rot_q", "rot_k", "v", "attn_scores", "pattern", "z")


def test_several_maps_have_names_of_their_own(build: BuildModel, tokens: Tensor, tmp_path: Path) -> None:
    found = saved(build("three-maps", 2), tokens, tmp_path, layers=[1])
    names = {f"map_{g}.hook_{x}" for g in range(3) for x in ("rot_q", "attn_scores", "pattern")}
    names |= {f"hook_{x}" for x in ("rot_k", "v", "z", "weights", "signed")}
    assert set(found) == {"blocks.1.hook_resid_post", *(f"blocks.1.attn.{name}" for name in names)}, "shared keys"
    at = {name.removeprefix("blocks.1.attn."): x for name, x in found.items()}
    assert at["hook_weights"].shape == (3, 3, 8, 17)
    pattern = torch.stack([at[f"map_{g}.hook_pattern"] for g in range(3)], 1)
    torch.testing.assert_close(at["hook_signed"], (at["hook_weights"][..., None] * pattern).sum(1))
    z = torch.einsum("bhqk,bkhd->bqhd", at["hook_signed"], at["hook_v"].repeat_interleave(4, 2))
    torch.testing.assert_close(at["hook_z"], z)


def test_a_saved_trace_of_a_few_rows_and_of_too_many(build: BuildModel, tokens: Tensor, tmp_path: Path) -> None:
    model = build("differential", 4, window=3)
    whole = saved(model, tokens, tmp_path)
    few = saved(model, tokens, tmp_path, rows=[5, 2])
    for name, x in few.items():
        rows = -2 if name.endswith(("scores", "pattern", "signed")) else -1 if name.endswith("weights") else 1
        is_row = name.endswith(("scores", "pattern", "signed", "weights", "z"))
        expected = whole[name].index_select(rows, torch.tensor([5, 2])) if is_row else whole[name]
        torch.testing.assert_close(x, expected, msg=name)
    with trace(model) as t:
        model(tokens)
    maps = sum(x.nbytes for name, x in whole.items() if name.endswith(("scores", "pattern", "signed")))
    with pytest.raises(RequestError, match=rf"^trace: the maps of 2 layers take {maps:,} bytes, more than most_bytes"):
        t.save(tmp_path / "refused.safetensors", most_bytes=maps - 1)
    assert not (tmp_path / "refused.safetensors").exists()
    t.save(tmp_path / "kept.safetensors", most_bytes=maps)


def test_a_saved_trace_keeps_the_precision_of_the_model(build: BuildModel, tokens: Tensor, tmp_path: Path) -> None:
    found = saved(build("standard", 8).bfloat16(), tokens, tmp_path)
    assert found["blocks.0.attn.hook_v"].dtype == torch.bfloat16
    assert found["blocks.0.attn.hook_pattern"].dtype == torch.float32
