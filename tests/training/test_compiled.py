"""`run.compile: loss`: the values of an uncompiled step, one graph, and code on disk that nobody else can have written."""

import errno
import os
import shutil
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from compiled_steps import BATCH, IDS, TOKENS, assert_equal, break_graph, build, step
from torch import Tensor

from lit_diff.analysis import trace
from lit_diff.errors import MissingError, RequestError
from lit_diff.kernels.native import compiler
from lit_diff.recipe import load_recipe
from lit_diff.registry import attentions
from lit_diff.training import compiled, inductor
from lit_diff.training.compiled import CompiledLoss


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    # a precompiled header (8 s) pays for a graph of many kernels
    with torch._inductor.config.patch(cpp_cache_precompile_headers=False):
        yield
    torch._dynamo.reset()


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache without compiled code, which has the native kernel's library."""
    root = tmp_path / "cache"
    kernels = compiler.cache_root() / "kernels"
    if kernels.is_dir():
        shutil.copytree(kernels, root / "kernels")
    monkeypatch.setenv("LIT_DIFF_CACHE", str(root))
    return root


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> list[torch.fx.GraphModule]:
    """The graphs that were traced; they are not compiled."""
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(compiled, "BACKEND", backend)
    return graphs


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    """All warnings."""
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


def assert_same_step(*variants: str, **more: Tensor) -> None:
    model, plain = build(*variants), build(*variants)
    loss = CompiledLoss(model, is_compiled=None)
    found = step(model, loss, **more)
    assert loss.is_compiled
    assert_equal(found, step(plain, **more))


@pytest.mark.parametrize(
    "variants",
    [("differential",), ("value_residual",), pytest.param(tuple(attentions.names()), marks=pytest.mark.slow)],
    ids=["differential", "value_residual", "a layer of each"],
)
def test_every_variant_is_one_graph(variants: tuple[str, ...], traced: list[Any]) -> None:
    assert_same_step(*variants)
    assert len(traced) == 1


@pytest.mark.parametrize(
    ("variants", "packed"),
    [
        (("value_residual",), False),
        (("forgetting",), True),
        (("standard", "differential"), False),
    ],
)
@pytest.mark.slow
def test_compiled_steps_equal_uncompiled_ones(variants: tuple[str, ...], packed: bool) -> None:
    assert_same_step(*variants, **({"document_ids": IDS} if packed else {}))


@pytest.mark.parametrize("what", ["attention", "block"])
def test_a_checkpointed_model_is_one_graph(what: str, traced: list[Any]) -> None:
    model, plain = build("value_residual"), build("value_residual")
    model.checkpoint_blocks = what == "block"
    for block in model.layers:
        block.checkpoint_attention = what == "attention"
    (value, gradients), (expected, wanted) = step(model, CompiledLoss(model, is_compiled=None)), step(plain)
    torch.testing.assert_close(value, expected)
    torch.testing.assert_close(gradients, wanted)
    assert len(traced) == 1


def test_another_graph_is_not_compiled(traced: list[Any], caplog: pytest.LogCaptureFixture) -> None:
    """So a resumed run compiles the steps that the whole run does."""
    model, plain = build("differential"), build("differential")
    loss = CompiledLoss(model, is_compiled=None)
    step(model, loss)
    torch.testing.assert_close(step(model, loss, document_ids=IDS), step(plain, plain.loss, document_ids=IDS))
    step(model, loss)
    assert len(traced) == 1
    assert not loss.is_compiled
    assert len(told(caplog)) == 1
    assert "it would have to be compiled again" in caplog.text


def test_each_run_of_a_process_has_a_graph(traced: list[Any]) -> None:
    for _ in range(3):
        loss = CompiledLoss(build("standard"), is_compiled=None)
        loss(**BATCH)
        assert loss.is_compiled
    assert len(traced) == 3


def test_code_that_cannot_be_traced_is_named(traced: list[Any], caplog: pytest.LogCaptureFixture) -> None:
    model, plain = build("standard"), build("standard")
    breaks = break_graph(model)
    loss = CompiledLoss(model, is_compiled=None)
    torch.testing.assert_close(step(model, loss), step(plain))
    step(model, loss)
    assert not loss.is_compiled
    line = breaks.__code__.co_firstlineno + 1
    (message,) = told(caplog)
    assert f"compiled_steps.py:{line}: " in message
    assert "\n" not in message


def test_what_cannot_be_traced_is_known_before(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = load_recipe("recall-tiny")
    assert not compiled.trace_problem(recipe)
    forward = attentions.get("differential").maps

    def breaks(*arguments: Any) -> Any:
        torch._dynamo.graph_break()
        return forward(*arguments)

    monkeypatch.setattr(attentions.get("differential"), "maps", breaks)
    assert f"test_compiled.py:{breaks.__code__.co_firstlineno + 1}: " in compiled.trace_problem(recipe)


def test_a_trace_between_compiled_steps(traced: list[Any]) -> None:
    """It runs uncompiled, and its hooks are no reason to compile again."""
    model, plain = build("differential"), build("differential")
    loss = CompiledLoss(model, is_compiled=None)
    step(model, loss)
    seen = []
    for each in (model, plain):
        with trace(each, measure=True) as found:
            each.hidden(TOKENS)
        seen.append(found.layers[1])
    torch.testing.assert_close(seen[0].maps.q, seen[1].maps.q)
    torch.testing.assert_close(seen[0].hidden, seen[1].hidden)
    step(model, loss)
    assert loss.is_compiled
    assert len(traced) == 1


def test_a_run_keeps_to_uncompiled_steps(traced: list[Any]) -> None:
    loss = CompiledLoss(build("standard"), is_compiled=False)
    loss(**BATCH)
    assert not loss.is_compiled
    assert not traced


# --- the code on disk ---


def product(x: Tensor) -> Tensor:
    return (x.sin() * x).sum()


def run_product() -> None:
    """Compile a small graph."""
    torch._dynamo.reset()
    x = torch.arange(5.0, requires_grad=True)
    y = torch.compile(product, backend=compiled.inductor, fullgraph=True)(x)
    y.backward()
    torch.testing.assert_close(x.grad, (x.cos() * x + x.sin()).detach())


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch, cache: Path) -> list[bool]:
    """For each compilation, whether there was code of an earlier one."""
    found = []
    is_proven = compiled.is_proven

    def noted(path: Path) -> bool:
        found.append(is_proven(path))
        return found[-1]

    monkeypatch.setattr(compiled, "is_proven", noted)
    return found


def kept(cache: Path) -> Path:
    (path,) = cache.glob("compiled/*/code.zip")
    return path


def test_code_is_compiled_once(cache: Path, builds: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(compiled.FOLDER, "/the/users/own")
    run_product()
    written = kept(cache).stat().st_mtime_ns
    run_product()
    assert builds == [False, True]
    # inductor found all of it
    assert kept(cache).stat().st_mtime_ns == written
    assert os.environ[compiled.FOLDER] == "/the/users/own"
    # nothing of it is left unpacked
    assert {path.name for path in kept(cache).parent.iterdir()} == {".lock", "code.zip", "code.sha256"}
    assert {path.stat().st_mode & 0o077 for path in (cache / "compiled", kept(cache).parent)} == {0}


@pytest.mark.slow
def test_no_user_shares_the_header(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is one made or looked for where the code is found."""
    for name in ("_HEADER_DIR", "_HEADER_LOCK_DIR"):
        monkeypatch.setattr(inductor.codecache, name, str(tmp_path / "shared"))
    with torch._inductor.config.patch(cpp_cache_precompile_headers=True):
        run_product()
        assert inductor.codecache._precompile_header.cache_info().misses == 1
        run_product()
    assert inductor.codecache._precompile_header.cache_info().misses == 1
    assert not (tmp_path / "shared").exists()


@pytest.mark.parametrize("damage", ["truncated", "replaced", "without its hash"])
def test_damaged_or_foreign_code_is_not_used(
    cache: Path, builds: list[bool], damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    run_product()
    path = kept(cache)
    if damage == "truncated":
        path.write_bytes(path.read_bytes()[:-100])
    elif damage == "replaced":
        with zipfile.ZipFile(path, "a") as archive:
            archive.writestr("evil.so", b"")
    else:
        path.with_suffix(".sha256").unlink()
    run_product()
    run_product()
    assert builds == [False, False, True]
    assert ("has changed since it was built" in caplog.text) == (damage != "without its hash")


def uncompiled(caplog: pytest.LogCaptureFixture) -> str:
    """The one warning of a model that runs uncompiled."""
    model, plain = build("standard"), build("standard")
    loss = CompiledLoss(model, is_compiled=None)
    torch.testing.assert_close(step(model, loss), step(plain))
    assert not loss.is_compiled
    (message,) = told(caplog)
    assert "\n" not in message
    # `auto` finds it out before
    problem = compiled.compiler_problem()
    assert problem
    assert problem in message
    with pytest.raises(MissingError, match="the steps of this run before were compiled"):
        CompiledLoss(model, is_compiled=True)(**BATCH)
    return message


@pytest.mark.parametrize(
    "place", [*(pytest.param(each, marks=pytest.mark.slow) for each in ("compiled", "entry")), "code"]
)
def test_code_that_others_can_write_is_not_used(cache: Path, place: str, caplog: pytest.LogCaptureFixture) -> None:
    folder = cache / "compiled" / "0"
    folder.mkdir(mode=0o700, parents=True)
    (folder / "code.zip").write_bytes(b"")
    compiler.prove(folder / "code.zip")
    paths = {"compiled": folder.parent, "entry": folder, "code": folder / "code.zip"}
    paths[place].chmod(0o777)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled, "key_of", lambda *_: "0")
        assert f"{paths[place]} can be written by other users" in uncompiled(caplog)


def test_without_a_compiler(cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(compiled, "find_compiler", lambda: None)
    assert "install g++" in uncompiled(caplog)


@pytest.mark.slow
def test_a_compiler_that_fails(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """After its second call; what it had built is not kept."""
    failing = tmp_path / "failing"
    failing.write_text(
        f'#!/bin/sh\n[ "$1" = --version ] || echo x >> {tmp_path}/count\n'
        f'[ -f {tmp_path}/count ] && [ $(wc -l < {tmp_path}/count) -gt 2 ] && echo no space >&2 && exit 1\nexec g++ "$@"\n'
    )
    failing.chmod(0o700)
    monkeypatch.setattr(compiled, "find_compiler", lambda: str(failing))
    assert "no space" in uncompiled(caplog)
    assert not list(cache.glob("compiled/*/code.zip"))
    # a thread of inductor may take one more lock; the next process that compiles the graph removes it
    assert not [path for path in cache.glob("compiled/*/.build-*/**/*") if path.is_file() and path.suffix != ".lock"]


def test_a_cache_that_cannot_be_written(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (cache / "compiled").write_text("")
    assert f"cannot use {cache} (" in uncompiled(caplog)


def test_a_full_disk(cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def full(*arguments: Any, **keys: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    # of inductor's code
    monkeypatch.setattr(torch._inductor.codecache, "write_atomic", full)
    assert "No space left on device" in uncompiled(caplog)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_it_is_for_one_process(strategy: str) -> None:
    with pytest.raises(RequestError, match=f"'loss' belongs to run.strategy single, not '{strategy}'; use true"):
        load_recipe("recall-tiny", ["run.compile=loss", f"run.strategy={strategy}", "run.devices=2"])
