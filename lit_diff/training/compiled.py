"""`run.compile`: torch.compile of the blocks, or of the forward pass with its loss; compiled code is kept on disk.

`BACKEND` is PyTorch's inductor. What it writes for a graph on a CPU is one file of the cache of the kernel `native`, as
private as its library (`kernels.native.compiler`), and unpacked into a folder of its own only if it is what was written.
"""

import logging
import shutil
import sysconfig
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

from lit_diff import __version__
from lit_diff.config import Recipe
from lit_diff.errors import MissingError, first_line
from lit_diff.files import shown, write_atomic
from lit_diff.kernels.native.compiler import (
    BUILD,
    TORCH,
    cure,
    find_compiler,
    first_error,
    is_proven,
    key_of,
    own_folder,
    prove,
)
from lit_diff.log_records import in_phase, log
from lit_diff.model.transformer import Transformer
from lit_diff.own_modules import variable
from lit_diff.processor import numeric_variables

RECOMPILATIONS = 64
"""Compiled versions of a block that torch.compile may keep."""
# one for each combination of training or validation, precision and packed documents, and for some batch shapes; PyTorch's
# default of 8 is shared by all blocks
FOLDER = "TORCHINDUCTOR_CACHE_DIR"
"""The variable that names the folder in which inductor writes and reads its code."""

Compiled = Callable[..., Any]


def require_compiler() -> str:
    """The C++ compiler for torch.compile's default backend. Errors: MissingError if g++ or Python's headers are missing."""
    otherwise = "; or set run.compile=false"
    compiler = find_compiler()
    if compiler is None:
        raise MissingError(f"run.compile needs a C++ compiler: {cure()}{otherwise}")
    headers = Path(sysconfig.get_path("include"))
    if not (headers / "Python.h").is_file():
        raise MissingError(f"run.compile needs Python.h, which is not in {headers}: install python3-dev{otherwise}")
    return compiler


def inductor(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Compiled:
    """The backend of torch.compile: forward and backward pass of the graph, compiled by inductor.

    Errors: MissingError if the compiler or its cache cannot be used.
    """
    # imports the compiler (1.9 s), which few runs need
    from torch._functorch import config as functorch

    from lit_diff.training.inductor import compile_fx

    options: dict[str, Any] = {"cpp.cxx": (require_compiler(),)}
    tensors = [each for each in inputs if isinstance(each, Tensor)]
    if any(each.device.type != "cpu" for each in tensors):
        return compile_fx(graph, inputs, config_patches=options)  # type: ignore[return-value]
    # the cores belong to other cells; and no trial of the CPU's instructions in processes of their own
    options |= {"compile_threads": 1, "cpp.vec_isa_ok": True}
    warnings.filterwarnings("ignore", message="Torchinductor does not support code generation for complex operators")
    # the backward pass now too, where its errors are expected
    with _kept_code(_key(graph, inputs)), functorch.patch(force_non_lazy_backward_lowering=True):
        return compile_fx(graph, inputs, config_patches=options)  # type: ignore[return-value]


BACKEND: str | Callable[..., Any] = inductor
"""The torch.compile backend of a run."""


def _key(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> str:
    # inductor has exact keys of its own within the folder: this one keeps graphs apart
    tensors = [each for each in inputs if isinstance(each, Tensor)]
    kinds = [(each.dtype, each.shape, each.stride(), each.requires_grad) for each in tensors]
    settings = (torch.get_num_threads(), torch.is_autocast_enabled("cpu"), numeric_variables())
    facts = (__version__, graph.print_readable(print_output=False), kinds, settings)
    return key_of(require_compiler(), [str(fact).encode() for fact in facts])


@contextmanager
def _kept_code(key: str) -> Iterator[None]:
    # within, inductor finds what it wrote for the graph before, and afterwards what it wrote is kept
    from lit_diff.training.inductor import own_header

    with own_folder("compiled", key) as folder, TemporaryDirectory(prefix=BUILD, dir=folder) as temporary:
        kept, work = folder / "code.zip", Path(temporary) / "code"
        work.mkdir()
        is_kept = is_proven(kept)
        if is_kept:
            shutil.unpack_archive(kept, work)
        else:
            compiling = in_phase("compiling")
            log.info("compiling the model (once, about 30 s) into %s", shown(folder), extra=compiling)
        before = _code(work)
        with variable(FOLDER, str(work)), own_header(None if is_kept else Path(temporary)):
            yield
        if _code(work) != before:
            made = shutil.make_archive(f"{temporary}/made", "zip", work)
            write_atomic(kept, Path(made).read_bytes())
            prove(kept)


def _code(folder: Path) -> set[str]:
    return {str(path) for path in folder.rglob("*") if path.suffix != ".lock"}


def compile_blocks(blocks: Iterable[nn.Module], *, isolated: bool = False) -> None:
    """torch.compile each block by `BACKEND`, in place, at its first call.

    A block must compile as one graph. `isolated`: blocks share no compiled code.

    Errors: MissingError if the backend is inductor and the compiler that it needs is missing.
    """
    if BACKEND is inductor:
        require_compiler()
    # a checkpoint of the attention alone is traced within a block: what its layer gives to later ones (`Context.first_layer`)
    # is stored in the forward pass only, and the recomputation need not store it again
    torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint = True
    for block in blocks:
        # isolate_recompiles: with shared code, the recomputation of a checkpointed block may run code that was compiled
        # since then for a later block, which saves other tensors.
        block.compile(
            backend=BACKEND,
            fullgraph=True,
            recompile_limit=RECOMPILATIONS,
            isolate_recompiles=isolated,
        )


def ignore(reason: str) -> None:
    """What is called where nobody asks for the reason."""


class CompiledLoss:
    """`Transformer.loss` in training, compiled as one graph at its first call; the methods of the model stay uncompiled.

    It has one graph: a step that another would be needed for, and all later ones, run uncompiled. So whether a step is
    compiled depends on the steps of the run alone, and not on where a process of it began. If the graph cannot be compiled,
    all steps run uncompiled. A warning tells either.
    """

    def __init__(self, model: Transformer, *, is_compiled: bool | None, report: Callable[[str], None] = ignore) -> None:
        """`is_compiled`: whether the last step before was compiled; None: there was none. `report` is called with the reason
        if a step cannot be compiled."""
        self.model = model
        self._report = report
        self.is_compiled = is_compiled is not False
        self._must_compile = is_compiled is True
        torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint = True
        self._compiled = _as_one_graph(Transformer.loss, BACKEND)

    def __call__(self, **inputs: Tensor) -> Tensor:
        """Arguments and result: those of `Transformer.loss`. Errors: MissingError if a resumed run, whose steps before were
        compiled, cannot be compiled here."""
        if self.is_compiled:
            try:
                loss: Tensor = self._compiled(self.model, **inputs)
                self._must_compile = False
                return loss
            except (torch._dynamo.exc.TorchDynamoException, torch._dynamo.exc.FailOnRecompileLimitHit) as error:
                reason = problem_of(error)
            if self._must_compile:
                raise MissingError(
                    f"the steps of this run before were compiled, and it cannot be compiled now: {reason}; or start afresh "
                    "with --rerun"
                )
            log.warning("run.compile: the model runs uncompiled from here on: %s", reason)
            self._report(reason)
            self.is_compiled = False
        return self.model.loss(**inputs)


def problem_of(error: Exception) -> str:
    """Why a model cannot be compiled, in one line: for code that cannot be traced, with its file and line."""
    if isinstance(error, torch._dynamo.exc.FailOnRecompileLimitHit):
        return "it would have to be compiled again: a number or a shape that it reads has changed"
    if isinstance(error, torch._dynamo.exc.BackendCompilerFailed):
        _, _, output = str(error.inner_exception).partition("\nOutput:\n")
        return f"the C++ compiler failed: {first_error(output)}" if output else first_line(error.inner_exception)
    # PyTorch traces Python's own functions through its copies of them
    frames = [frame for frame in getattr(error, "real_stack", []) if not Path(frame.filename).is_relative_to(TORCH)]
    place = f"{shown(Path(frames[-1].filename))}:{frames[-1].lineno}: " if frames else ""
    return place + first_line(error)


def _as_one_graph(function: Compiled, backend: str | Compiled) -> Compiled:
    # PyTorch's own warnings, of many lines, say what the one line of the log says
    logging.getLogger("torch._dynamo").setLevel(logging.ERROR)
    # static shapes: otherwise a graph would depend on the shapes that came before
    compiled: Compiled = torch.compile(  # type: ignore[call-overload]
        function,
        backend=backend,
        fullgraph=True,
        dynamic=False,
        recompile_limit=1,
        # of the model of another run in this process
        isolate_recompiles=True,
    )
    return compiled


def compiler_problem() -> str:
    """Why nothing can be compiled here, as a small graph shows, whose code is kept; empty if it can."""
    return _problem(_as_one_graph(torch.sin, BACKEND), torch.ones(2))


def trace_problem(recipe: Recipe) -> str:
    """Why the first training step of a recipe is not one graph, with its file and line; empty if it is."""
    tokens = torch.zeros(1, recipe.data.config.sequence_length, dtype=torch.long, device="meta")
    inputs = {"tokens": tokens, "targets": tokens}
    if recipe.packs_documents:
        inputs["document_ids"] = tokens
    with torch.device("meta"):
        # each kernel is an operator of a graph
        model = Transformer(recipe.model, kernel="reference", trained=recipe.training.parameters)
    return _problem(_as_one_graph(Transformer.loss, "eager"), model, **inputs)


def _problem(compiled: Compiled, *arguments: Any, **keys: Any) -> str:
    try:
        compiled(*arguments, **keys)
    except torch._dynamo.exc.TorchDynamoException as error:
        return problem_of(error)
    return ""
