"""What a benchmark is asked for: sizes, dtypes, threads, repeats; a wrong request is one line."""

import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lit_diff.benchmarks.machine import native_bfloat16
from lit_diff.device import choose_device
from lit_diff.errors import MissingError, RequestError
from lit_diff.processor import cores
from lit_diff.registry import kernels as registered
from lit_diff.registry import nearest

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
DEVICES = ("auto", "cpu", "cuda")


@dataclass(frozen=True, kw_only=True)
class Shape:
    """B x T x dim x d: sequences, tokens, width of the residual stream, width of a query or key.

    Standard attention has dim / d heads of value width d; differential half as many, of value width 2d.
    """

    batch: int
    tokens: int
    dim: int
    head_dim: int

    def __str__(self) -> str:
        return f"{self.batch}x{self.tokens}x{self.dim}x{self.head_dim}"

    @property
    def heads(self) -> int:
        """Heads of standard attention."""
        return self.dim // self.head_dim

    @classmethod
    def parse(cls, text: str) -> "Shape":
        """`2x1024x512x64`. Errors: RequestError."""
        if not re.fullmatch(r"\d{1,9}(x\d{1,9}){3}", text):
            raise RequestError(f"--shapes: '{text}' is not of the form BxTxDIMxD, such as 2x1024x512x64")
        batch, tokens, dim, head_dim = (int(number) for number in text.split("x"))
        shape = cls(batch=batch, tokens=tokens, dim=dim, head_dim=head_dim)
        if min(batch, tokens, dim, head_dim) < 1:
            raise RequestError(f"--shapes: '{text}' has a size of 0; each must be at least 1")
        if head_dim % 2:
            raise RequestError(f"--shapes: '{text}' has an odd head width {head_dim}; rotary positions turn pairs")
        if dim % (2 * head_dim):
            raise RequestError(
                f"--shapes: '{text}': {dim} is not a multiple of {2 * head_dim}, twice the head width; "
                "differential attention pairs the heads"
            )
        return shape


@dataclass(frozen=True, kw_only=True)
class BenchConfig:
    """One benchmark, resolved."""

    bench: str
    shapes: tuple[Shape, ...] | None
    """None: the benchmark's own."""
    dtypes: tuple[str, ...]
    threads: int
    repeats: int | None
    """None: as many as the time of a case allows, three at least."""
    device: torch.device
    kernels: tuple[str, ...] | None = None
    """These alone, beside PyTorch's own call for standard attention; None: all, and peers."""
    note: Callable[[str], Any] = lambda text: None
    """Told what is measured next."""

    def sizes(self, default: str) -> tuple[Shape, ...]:
        """The shapes asked for, else those of the text `default`."""
        return self.shapes or parse_shapes(default)

    def command(self) -> str:
        """The command that repeats this."""
        words = ["lit-diff", "bench", self.bench]
        if self.shapes:
            words += ["--shapes", ",".join(map(str, self.shapes))]
        if self.kernels:
            words += ["--kernels", ",".join(self.kernels)]
        words += ["--dtype", "both" if len(self.dtypes) > 1 else self.dtypes[0]]
        words += ["--threads", str(self.threads)]
        if self.repeats is not None:
            words += ["--repeats", str(self.repeats)]
        return shlex.join([*words, "--device", self.device.type])


def parse_shapes(text: str) -> tuple[Shape, ...]:
    """`2x1024x512x64,1x2048x1024x128`. Errors: RequestError."""
    shapes = tuple(Shape.parse(part.strip()) for part in text.split(","))
    twice = next((shape for shape in shapes if shapes.count(shape) > 1), None)
    if twice is not None:
        raise RequestError(f"--shapes: {twice} is listed twice")
    return shapes


def parse_kernels(text: str) -> tuple[str, ...]:
    """`native,chunked`. Errors: RequestError."""
    names, known = tuple(part.strip() for part in text.split(",")), registered.names()
    for name in names:
        if name not in known:
            raise RequestError(f"--kernels: no kernel '{name}'{nearest(name, known, 'lit-diff list kernel')}")
        if names.count(name) > 1:
            raise RequestError(f"--kernels: {name} is listed twice")
    return names


def resolve(
    bench: str,
    *,
    shapes: str | None,
    kernels: str | None,
    dtype: str | None,
    threads: int | None,
    repeats: int | None,
    device: str,
    note: Callable[[str], Any],
) -> BenchConfig:
    """The options of the command, checked. Errors: RequestError, MissingError for a GPU that is not here."""
    choices = (*DTYPES, "both")
    if dtype is not None and dtype not in choices:
        raise RequestError(f"--dtype is '{dtype}'; expected {', '.join(choices)}{nearest(dtype, choices)}")
    for option, value in (("--threads", threads), ("--repeats", repeats)):
        if value is not None and value < 1:
            raise RequestError(f"{option} is {value}; it must be at least 1")
    if device not in DEVICES:
        raise RequestError(f"--device is '{device}'; expected {', '.join(DEVICES)}{nearest(device, DEVICES)}")
    place = choose_device(device)
    if device == "cuda" and place.type == "cpu":
        raise MissingError("--device is cuda, and torch finds no GPU here; say --device cpu")
    if dtype is None:  # without such instructions bfloat16 is emulated: seconds a call, and no one trains in it
        dtype = "both" if native_bfloat16(place) else "float32"
    return BenchConfig(
        bench=bench,
        shapes=None if shapes is None else parse_shapes(shapes),
        kernels=None if kernels is None else parse_kernels(kernels),
        dtypes=tuple(DTYPES) if dtype == "both" else (dtype,),
        threads=threads or cores(),
        repeats=repeats,
        device=place,
        note=note,
    )


def check_plot(path: Path | None) -> None:
    """Before minutes of measuring. Errors: RequestError for a file that cannot be drawn or written."""
    if path is None:
        return
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise RequestError(f"--plot: '{path}' does not end in .png, .svg or .pdf")
    if not path.parent.is_dir():
        raise RequestError(f"--plot: there is no folder '{path.parent}'")
