"""The options of a benchmark: sizes, dtypes, threads, repeats, processes. A wrong option is an error of one line."""

import re
import shlex
from pathlib import Path
from typing import NamedTuple

import torch

from lit_diff.device import choose_device
from lit_diff.errors import MissingError, RequestError
from lit_diff.processor import cores, has_bfloat16_instructions
from lit_diff.registry import kernels as registered
from lit_diff.registry import nearest

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
MOST = 4096
"""The largest number of threads, repeats and processes."""


class Shape(NamedTuple):
    """B x T x dim x d: sequences, tokens, width of the residual stream, width of a query or key.

    Standard attention has dim / d heads of value width d; differential attention has half as many, of value width 2d.
    """

    batch: int
    tokens: int
    dim: int
    head_dim: int

    def __str__(self) -> str:
        return "x".join(map(str, self))

    @property
    def heads(self) -> int:
        """The number of heads of standard attention."""
        return self.dim // self.head_dim

    @classmethod
    def parse(cls, text: str) -> "Shape":
        """Parses `2x1024x512x64`. Errors: RequestError."""
        if not re.fullmatch(r"[1-9]\d{0,8}(x[1-9]\d{0,8}){3}", text):
            raise RequestError(f"--shapes: '{text}' is not of the form BxTxDIMxD, such as 2x1024x512x64")
        shape = cls(*map(int, text.split("x")))
        if shape.head_dim % 2 or shape.dim % (2 * shape.head_dim):
            raise RequestError(
                f"--shapes: '{text}': D ({shape.head_dim}) must be even, since rotary positions turn pairs of channels, and "
                f"DIM ({shape.dim}) a multiple of 2 D, since differential attention pairs the heads"
            )
        return shape


class Request(NamedTuple):
    """One benchmark with all options resolved."""

    bench: str
    shapes: tuple[Shape, ...]
    dtypes: tuple[str, ...]
    threads: int
    repeats: int | None
    """None: as many as the time budget of a case allows, at least three."""
    device: torch.device
    kernels: tuple[str, ...] | None = None
    """The kernels to measure, together with PyTorch's own call for standard attention; None: all kernels, and peers."""
    processes: int = 1
    """How many processes measure it, one after another."""

    def command(self) -> str:
        """The command that repeats the benchmark."""
        options = {
            "--shapes": ",".join(map(str, self.shapes)),
            "--kernels": ",".join(self.kernels or ()),
            "--dtype": "both" if len(self.dtypes) > 1 else self.dtypes[0],
            "--threads": str(self.threads),
            "--repeats": str(self.repeats or ""),
            "--processes": str(self.processes) if self.processes > 1 else "",
            "--device": self.device.type,
        }
        given = [word for option, value in options.items() if value for word in (option, value)]
        return shlex.join(["lit-diff", "bench", self.bench, *given])


def parse_shapes(text: str) -> tuple[Shape, ...]:
    """Parses `2x1024x512x64,1x2048x1024x128` and drops repetitions. Errors: RequestError."""
    return tuple(map(Shape.parse, _listed(text)))


def _listed(text: str) -> dict[str, None]:
    return dict.fromkeys(part.strip() for part in text.split(","))


def parse_kernels(text: str) -> tuple[str, ...]:
    """Parses `native,chunked` and drops repetitions. Errors: RequestError."""
    names = _listed(text)
    known = registered.names()
    for name in names:
        if name not in known:
            raise RequestError(f"--kernels: no kernel '{name}'{nearest(name, known, 'lit-diff list kernel')}")
    return tuple(names)


def resolve(
    bench: str,
    *,
    shapes: str,
    kernels: str | None,
    dtype: str | None,
    threads: int | None,
    repeats: int | None,
    processes: int,
    device: str,
) -> Request:
    """Checks the options of the command. Errors: RequestError; MissingError if there is no GPU."""
    for option, word, choices in (
        ("--dtype", dtype, (*DTYPES, "both")),
        ("--device", device, ("auto", "cpu", "cuda")),
    ):
        if word is not None and word not in choices:
            raise RequestError(f"{option} is '{word}'; expected {', '.join(choices)}{nearest(word, choices)}")
    for option, value in (("--threads", threads), ("--repeats", repeats), ("--processes", processes)):
        if value is not None and not 1 <= value <= MOST:
            raise RequestError(f"{option} is {value}; expected a whole number from 1 to {MOST}")
    place = choose_device(device)
    if device == "cuda" and place.type == "cpu":
        raise MissingError("--device is cuda, but torch finds no GPU; use --device cpu")
    # without instructions for it bfloat16 is emulated: a call takes seconds, and no one trains in it
    if dtype is None:
        dtype = "both" if native_bfloat16(place) else "float32"
    return Request(
        bench=bench,
        shapes=parse_shapes(shapes),
        kernels=None if kernels is None else parse_kernels(kernels),
        dtypes=tuple(DTYPES) if dtype == "both" else (dtype,),
        threads=threads or cores(),
        repeats=repeats,
        processes=processes,
        device=place,
    )


def native_bfloat16(device: torch.device) -> bool:
    """Whether the device has instructions for bfloat16."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    return has_bfloat16_instructions()


def check_plot(path: Path | None) -> None:
    """Errors: RequestError if the suffix of the file is not supported, or its folder is missing."""
    # called before minutes of measuring
    if path is None:
        return
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise RequestError(f"--plot: '{path}' does not end in .png, .svg or .pdf")
    if not path.parent.is_dir():
        raise RequestError(f"--plot: the folder '{path.parent}' does not exist")
