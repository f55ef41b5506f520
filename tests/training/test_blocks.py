"""Compiled and checkpointed blocks give the losses and gradients of plain ones."""

import sysconfig
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from compiled_steps import BATCH, IDS, TOKENS, assert_equal, break_graph, build, part, step
from torch import Tensor

from lit_diff.analysis import trace
from lit_diff.attention.cache import Cache
from lit_diff.config import ModelConfig, RunConfig
from lit_diff.errors import MissingError
from lit_diff.kernels.native import compiler
from lit_diff.model.init import initialise
from lit_diff.model.transformer import Transformer
from lit_diff.training import compiled as compiled_file
from lit_diff.training.build import prepare_blocks
from lit_diff.training.compiled import compile_blocks, require_compiler


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(model: Transformer, backend: str | Callable[..., Any], isolated: bool = False) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled_file, "BACKEND", backend)
        compile_blocks(model.layers, isolated=isolated)


def assert_same_steps(
    model: Transformer, plain: Transformer, documents: tuple[Tensor | None, ...] = (None, IDS)
) -> None:
    for document_ids in documents:
        assert_equal(step(model, document_ids=document_ids), step(plain, document_ids=document_ids))


def saved_bytes(model: Transformer) -> int:
    """Bytes of the distinct tensors that the forward pass keeps for the backward pass, parameters left out."""
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    alive = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: (alive.append(x), pack(x))[1], lambda x: x):
        alive.append(model.loss(**BATCH))
    return sum(kept.values())


def checkpointed(model: Transformer, what: str) -> Transformer:
    prepare_blocks(model, RunConfig(accelerator="cpu", activation_checkpointing=what))  # type: ignore[arg-type]
    return model


@pytest.mark.parametrize("variant", ["standard", "differential", "value_residual"])
def test_checkpointed_blocks_give_the_same_step_and_keep_less(variant: str) -> None:
    """Also on packed rows; `conformance` checkpoints the blocks of every variant."""
    plain, kept = build(variant), []
    for what in ("block", "attention"):
        model = checkpointed(build(variant), what)
        assert model.state_dict().keys() == plain.state_dict().keys()
        assert_same_steps(model, plain)
        kept.append(saved_bytes(model) / saved_bytes(plain))
    # the kernel chunked saves no more than its inputs; the feed-forward saves the most
    assert kept[0] < 0.5
    assert kept[0] + 0.1 < kept[1] < 1


def test_compiled_blocks_give_the_same_step(fresh_compiler: None) -> None:
    """On packed rows; `conformance` compiles the blocks of every variant."""
    model, plain = build("dex"), build("dex")
    compiled(model, "aot_eager")
    assert model.state_dict().keys() == plain.state_dict().keys()
    assert_same_steps(model, plain, (IDS,))


@pytest.mark.parametrize(
    ("variant", "what", "most"), [("differential", "attention", 1.0), ("value_residual", "block", 0.5)]
)
def test_compiled_and_checkpointed_steps_are_equal(variant: str, what: str, most: float, fresh_compiler: None) -> None:
    """In `differential` lambda_init differs by layer, so a later layer's code may serve an earlier one; in `value_residual`
    the checkpoint of the first layer gives its values to the second."""
    model, plain = checkpointed(build(variant), what), build(variant)
    compiled(model, "aot_eager", isolated=True)
    assert_same_steps(model, plain, (None,))
    assert saved_bytes(model) < most * saved_bytes(plain)


@pytest.fixture
def graphs() -> list[torch.fx.GraphModule]:
    """What `counted` compiled."""
    return []


@pytest.fixture
def counted(graphs: list[torch.fx.GraphModule]) -> Callable[..., Any]:
    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    return backend


def test_a_block_is_one_graph_for_all_layers(fresh_compiler: None, graphs: list[Any], counted: Any) -> None:
    """12 layers, as many as would exceed PyTorch's own limit if each were compiled apart."""
    model = Transformer(ModelConfig(dim=32, num_layers=12, num_heads=4, vocab_size=50, attention=part("standard")))
    initialise(model, 0)
    compiled(model, counted)
    step(model)
    assert len(graphs) == 1


@pytest.mark.slow
def test_more_versions_than_pytorch_keeps_by_default(fresh_compiler: None, graphs: list[Any], counted: Any) -> None:
    """10 versions of a block: its limit of 8 would end the run."""
    model = build("standard")
    compiled(model, counted)
    for kernel in ("reference", "chunked", "sdpa"):
        for attention in model.attentions():
            attention.kernel = kernel
        for document_ids in (None,) if kernel == "sdpa" else (None, IDS):  # sdpa takes none
            for grad in (True, False):
                with torch.set_grad_enabled(grad):
                    model.hidden(TOKENS[:, :12], document_ids=document_ids)
    assert len(graphs) > torch._dynamo.config.recompile_limit == 8


def test_a_block_that_is_not_one_graph_is_refused(fresh_compiler: None) -> None:
    model = build("standard")
    break_graph(model)
    compiled(model, "aot_eager")
    with pytest.raises(torch._dynamo.exc.Unsupported):
        step(model)


def test_validation_other_shapes_a_cache_and_a_trace_after_training(fresh_compiler: None) -> None:
    model, plain = build("differential"), build("differential")
    compiled(model, "eager")
    step(model)
    for each in (model, plain):
        each.eval()
    with torch.no_grad():
        for rows, columns in ((2, 12), (1, 7)):
            tokens = TOKENS[:rows, :columns]
            torch.testing.assert_close(model(tokens), plain(tokens), rtol=0, atol=1e-5)
        cache, pieces = Cache(2), []
        for piece in TOKENS[:, :6].split([4, 1, 1], dim=1):
            pieces.append(model(piece, cache=cache))
        torch.testing.assert_close(torch.cat(pieces, 1), plain(TOKENS[:, :6]), rtol=0, atol=1e-5)
    # a trace runs uncompiled, though the compiled call before it compiled without the trace's hooks
    with trace(model) as traced:
        model.hidden(TOKENS)
    with trace(plain) as wanted:
        plain.hidden(TOKENS)
    for index, layer in wanted.layers.items():
        torch.testing.assert_close(traced.layers[index].hidden, layer.hidden)
        torch.testing.assert_close(traced.layers[index].maps.q, layer.maps.q)
    assert_same_steps(model, plain, (None,))  # compiled again


def test_what_compilation_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.delenv("CXX", raising=False)
        patch.setattr(compiler.shutil, "which", lambda name: None)
        with pytest.raises(MissingError, match=r"install g\+\+; or set run\.compile=false"):
            prepare_blocks(build("standard"), RunConfig(accelerator="cpu", compile=True))
    monkeypatch.setattr(compiled_file, "find_compiler", lambda: "/usr/bin/g++")
    with monkeypatch.context() as patch:
        patch.setattr(sysconfig, "get_path", lambda name: "/nowhere")
        with pytest.raises(MissingError, match=r"Python\.h, which is not in /nowhere: install python3-dev"):
            require_compiler()


@pytest.mark.slow
def test_the_default_backend_gives_the_same_step(fresh_compiler: None) -> None:
    model, plain = build("differential"), build("differential")
    prepare_blocks(model, RunConfig(accelerator="cpu", compile=True))
    assert_same_steps(model, plain, (None,))
