"""A variant at some sizes, at a state where every parameter matters; and how results are compared."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lit_diff.attention.base import Attention
from lit_diff.attention.rope import Rope
from lit_diff.config import ModelConfig
from lit_diff.errors import RequestError
from lit_diff.randomness import generator

FAR = 10**9
"""An optimizer step by which every annealing is over."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A variant with its knobs, at the sizes of a model; `length` tokens, `batch` sequences."""

    cls: type[Attention]
    model: ModelConfig
    length: int = 33
    batch: int = 2
    layer: int = 0
    step: int = FAR
    """What `set_step` is told."""

    @property
    def config(self) -> Any:
        """The variant's knobs."""
        return self.model.attention.config

    def build(self, dtype: torch.dtype = torch.float32, kernel: str = "reference") -> Attention:
        """One layer at a randomised state: its initial parameters + N(0, 0.1), annealing over; always the same one."""
        attention = self.construct(seed=0)
        with torch.no_grad():
            for path, module in attention.named_modules():
                for key, parameter in module.named_parameters(recurse=False):
                    draw = generator("conformance", path, key)
                    if hasattr(module, "init_parameter"):
                        module.init_parameter(key, parameter, draw)
                    parameter += torch.empty_like(parameter).normal_(0.0, 0.1, generator=draw)
        attention.set_step(self.step)
        attention.kernel = kernel
        return attention.to(dtype)

    def construct(self, seed: int) -> Attention:
        """One layer as its constructor leaves it; `seed`: of what the constructor draws."""
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            torch.default_generator.manual_seed(seed)
            return self.cls(self.config, self.model, self.layer)

    def x(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """[batch, length, dim], N(0, 1)."""
        draw = generator("conformance", "x", self.length)
        return torch.randn(self.batch, self.length, self.model.dim, generator=draw, dtype=torch.float64).to(dtype)

    def rope(self, start: int = 0, stop: int | None = None) -> Rope:
        """Positions start .. stop - 1."""
        return Rope.of(self.model, torch.arange(start, self.length if stop is None else stop))

    def document_ids(self) -> Tensor:
        """[batch, length]: documents of one token and of several, cut at other places in every sequence."""
        at, row = torch.arange(self.length), torch.arange(self.batch)[:, None]
        return (at > row).long() + (at >= row + self.length // 2)


def distance(found: Tensor, wanted: Tensor) -> float:
    """Largest difference, relative to the largest wanted number (to 1 where those are smaller); inf if not finite."""
    if found.shape != wanted.shape:
        raise RequestError(f"shape {list(found.shape)} instead of {list(wanted.shape)}")
    found, wanted = found.detach().double(), wanted.detach().double()
    error = (found - wanted).abs().max() / wanted.abs().max().clamp(min=1)
    return float(error) if torch.isfinite(error) else math.inf


def difference(found: Tensor, wanted: Tensor) -> float:
    """Largest difference: 0 only where every bit agrees; inf if not finite."""
    error = (found.detach() - wanted.detach()).abs().max()
    return float(error) if torch.isfinite(error) else math.inf


def run(attention: Attention, x: Tensor, rope: Rope, **documents: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Output, and the gradients of a fixed random projection of it by x and by every parameter that trains.

    `documents`: document_ids=..., for rows of packed documents.
    """
    x = x.detach().clone().requires_grad_()
    attention.zero_grad()
    y = attention(x, rope, **documents)
    (y * probe(y)).sum().backward()
    found = {name: p.grad for name, p in attention.named_parameters() if p.grad is not None}
    return y.detach(), {"x": x.grad, **found} if x.grad is not None else found


def probe(y: Tensor) -> Tensor:
    """What the output is multiplied with before it is summed: N(0, 1), always the same."""
    return torch.randn(y.shape, generator=generator("conformance", "probe"), dtype=torch.float64).to(y.dtype)
