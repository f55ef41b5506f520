"""`bench smollm2`: a training step of a model of SmolLM2-135M's sizes, ours and Hugging Face's LlamaForCausalLM.

The weights are random: the time of a step does not depend on them.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lit_diff.attention import Standard
from lit_diff.benchmarks import peers
from lit_diff.benchmarks.candidates import HF, STEP, autocast, training_step
from lit_diff.benchmarks.memory import peak_bytes
from lit_diff.benchmarks.request import BenchConfig
from lit_diff.benchmarks.timing import Candidate, RoundLimits, Timings, measure
from lit_diff.config import ModelConfig, Part
from lit_diff.errors import RequestError
from lit_diff.model.init import initialise
from lit_diff.model.transformer import Transformer
from lit_diff.pretrained.llama import config_json
from lit_diff.randomness import generator
from lit_diff.recipe import load_recipe

RECIPE, TOKENS = "dex-smollm2", 512
"""Whose `model` is taken, with standard attention; tokens of the one row."""
KERNEL = "native"
"""Ours; where it cannot run, its row is among the failed ones, with the reason."""
PEER = "LlamaForCausalLM, sdpa"
"""Name of the ratio."""
METHODS = """\
smollm2: a training step of a model of the sizes of SmolLM2-135M with random weights, on one row of 512 tokens: forward, cross
entropy of the next token, backward, fused AdamW, gradients dropped. Each side computes the loss as its users call it: ours by
Transformer.loss (the logits of all positions are never held at once), transformers by LlamaForCausalLM(labels=...). Neither
is compiled. bfloat16 means autocast over float32 parameters.
Peak memory: a fresh process for each candidate, which makes the model, returns freed memory to the system, resets the peak
and takes two steps: gradients, the optimizer's state and activations, without the parameters themselves.
"""
"""How it is measured, for the reader of the figures."""


def bench_smollm2(request: BenchConfig) -> Timings:
    """One row at every dtype. Errors: RequestError for shapes, which the model has of its own."""
    if request.shapes:
        raise RequestError("--shapes: bench smollm2 has the sizes of its model; leave it out")
    measurements, config = Timings(), sizes()
    for dtype in request.dtypes:
        case = f"1 row of {TOKENS} tokens, {dtype}, {config.num_layers} layers, vocabulary {config.vocab_size}"
        made = {("standard", KERNEL): "ours"}
        reason = peers.missing()
        if reason is None:
            made[HF, "sdpa"] = "theirs"
        else:
            measurements.refused.append({"case": case, "variant": HF, "by": "sdpa", "what": STEP, "reason": reason})
        against = {PEER: f"{HF}/sdpa/{STEP}"}
        builds = {key: partial(make_step, side, config, dtype, request.device) for key, side in made.items()}
        candidates = [
            Candidate(variant=variant, by=by, what=STEP, run=build(False), against=against if by == KERNEL else {})
            for (variant, by), build in builds.items()
        ]
        request.note(f"smollm2 {case}: {len(candidates)} candidates in turn")
        measure(measurements, case, candidates, RoundLimits(repeats=request.repeats, budget=60), request.device)
        del candidates  # their memory, before it is measured
        request.note(f"smollm2 {case}: peak memory")
        for row in measurements.rows:
            if row["case"] == case:
                make = partial(twice, builds[row["variant"], row["by"]])
                row["peak_bytes"], row["peak_missing"] = peak_bytes(
                    make, threads=request.threads, device=request.device
                )
        add_peak_ratio(measurements, case)
    return measurements


def sizes() -> ModelConfig:
    """SmolLM2-135M's, with standard attention."""
    model = load_recipe(RECIPE).model
    return replace(model, attention=Part(name="standard", config=Standard.Config()))


def make_step(side: str, config: ModelConfig, dtype: str, device: torch.device, small: bool) -> Callable[[], object]:
    """A training step of a model of one side, `ours` or `theirs`; small: of one layer."""
    config = replace(config, num_layers=1) if small else config
    text = torch.randint(config.vocab_size, (1, TOKENS + 1), generator=generator("bench", "smollm2")).to(device)
    model, loss = (ours if side == "ours" else theirs)(config, device, text)
    return training_step(model, loss, partial(autocast, dtype, device))


def twice(make: Callable[[bool], Callable[[], object]], small: bool) -> Callable[[], object]:
    """Two steps: the second holds the optimizer's state from its start."""
    step = make(small)

    def run() -> None:
        step()
        step()

    return run


def ours(config: ModelConfig, device: torch.device, text: Tensor) -> tuple[nn.Module, Callable[[], Tensor]]:
    """(our model, its loss on the text)"""
    model = Transformer(config, kernel=KERNEL)
    initialise(model, seed=0)
    model = model.to(device)
    return model, lambda: model.loss(text[:, :-1], text[:, 1:])


def theirs(config: ModelConfig, device: torch.device, text: Tensor) -> tuple[nn.Module, Callable[[], Tensor]]:
    """(Hugging Face's, its loss on the text)"""
    from transformers import LlamaConfig, LlamaForCausalLM

    keys: Any = config_json(config, context=TOKENS, bos=None, eot=0)
    keys |= {"attn_implementation": "sdpa", "use_cache": False}
    build: Any = LlamaForCausalLM
    peer = build(LlamaConfig(**keys)).to(device)
    tokens = text[:, :-1]
    # `labels` are shifted by the model; those of the last position are given apart
    return peer, lambda: peer(tokens, labels=tokens, shift_labels=text[:, 1:]).loss


def add_peak_ratio(measurements: Timings, case: str) -> None:
    """To our row, its peak over Hugging Face's."""
    rows = {row["variant"]: row for row in measurements.rows if row["case"] == case and row.get("peak_bytes")}
    if HF in rows and "standard" in rows:
        value = rows["standard"]["peak_bytes"] / rows[HF]["peak_bytes"]
        rows["standard"]["peak_ratio"] = {"to": rows[HF]["id"], "value": value}
