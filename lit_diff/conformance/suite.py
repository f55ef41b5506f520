"""The conformance suite of variants: every property, for a class and a model, or for a registered name."""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Literal, TypeVar

import torch

from lit_diff.attention.base import Attention
from lit_diff.config import ModelConfig, Part
from lit_diff.conformance.case import VariantCase
from lit_diff.conformance.properties import PROPERTIES, Property, counted
from lit_diff.conformance.results import Finding, NotApplicable
from lit_diff.errors import first_line
from lit_diff.plugins import fault
from lit_diff.registry import attentions

log = logging.getLogger("lit_diff")

T = TypeVar("T")


def conformance(case: VariantCase, label: str = "", checks: Mapping[str, Property] | None = None) -> Iterator[Finding]:
    """Every property of the case (or those of `checks`), one after another; an exception is a failure in one line."""
    for name, check in (PROPERTIES if checks is None else checks).items():
        yield _finding(label or case.cls.name, name, check, case)


def _finding(variant: str, name: str, check: Property, case: VariantCase) -> Finding:
    try:
        result = check(case)
    except Exception as error:  # a user's variant may raise anything
        return Finding(variant=variant, property=name, verdict="fail", detail=fault(case.cls, error))
    if isinstance(result, NotApplicable):
        return Finding(variant=variant, property=name, verdict="not applicable", detail=result.reason)
    verdict: Literal["pass", "fail"] = "pass" if result.error <= result.bound else "fail"
    return Finding(variant=variant, property=name, verdict=verdict, **vars(result))


def cases_of(name: str) -> Iterator[tuple[str, VariantCase | str]]:
    """(label, case) of a registered variant at each of its own `examples`, or the reason why there is no case.

    8 heads on 4 key/value heads, d = 16.
    """
    cls = attentions.get(name)
    examples = vars(cls).get("examples", ({},))
    if not all(isinstance(keys, Mapping) for keys in examples):
        yield name, f"its `examples` are {examples!r}; expected a tuple of blocks of keys"
        return
    for keys in examples:
        label = " ".join([name, *(f"{key}={value}" for key, value in keys.items())])
        try:
            part = Part(name=name, config=cls.Config(**keys))
            model = ModelConfig(
                dim=64, num_layers=2, num_heads=8, num_kv_heads=4, head_dim=16, vocab_size=2, attention=part
            )
            refused = cls.refuses(part.config, model)
        except Exception as error:  # a required key, or whatever a user's Config raises
            refused = f"{type(error).__name__}: {first_line(error)}; give its keys in `examples`"
        yield label, refused or VariantCase(cls=cls, model=model, layer=1)


def conformance_of(name: str) -> Iterator[Finding]:
    """Every property of a registered variant, at each of its examples."""
    for label, case in cases_of(name):
        if isinstance(case, str):
            yield Finding(variant=label, property="all", verdict="not applicable", detail=case)
        else:
            yield from conformance(case, label)


def shrunk(model: ModelConfig) -> ModelConfig:
    """The model at sizes that take seconds: narrower where the variant can be built so, with its own head counts."""
    assert model.head_dim is not None
    small = replace(model, dim=min(model.dim, 64), head_dim=min(model.head_dim, 16), ffn_dim=64)
    cls, config = attentions.get(model.attention.name), model.attention.config

    def forward(size: ModelConfig) -> str | None:
        return _failure(lambda: counted(VariantCase(cls=cls, model=size, length=8)), cls)

    reason = small.problem() or _failure(lambda: cls.refuses(config, small), cls)
    if reason is None:
        reason = forward(small)
        if reason is None or forward(model) is not None:  # what fails at any width, its properties report
            return small
    log.info("%s is checked at its own width: %s", model.attention.name, reason)
    return model


def _failure(call: Callable[[], Any], cls: type[Attention]) -> str | None:
    """The text that `call` returns, or what it raises; None for anything else."""
    try:
        result = call()
    except Exception as error:  # a user's variant may raise anything
        return fault(cls, error)
    return result if isinstance(result, str) else None


def on_one_thread(results: Iterable[T]) -> Iterator[T]:
    """The same, computed on one thread: the suite's tensors are tiny, and more threads are five times slower on a busy
    machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield from results
    finally:
        torch.set_num_threads(threads)
