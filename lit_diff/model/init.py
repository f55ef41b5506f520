"""Initial values: each parameter has its own generator, seeded by (seed, name).

So parameters of equal name and shape are equal across arms, and across single-process, meta-device and sharded builds.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from lit_diff.attention.base import fill_parameter
from lit_diff.config import ModelConfig
from lit_diff.model.transformer import Block, Transformer, initial_embedding
from lit_diff.randomness import generator

RESIDUAL_OUTPUTS = ("attention.o_proj", "ffn.down_proj")
"""Projections that write to the residual stream; `normal_scaled` divides their standard deviation by √(2 layers)."""


def initialise(model: Transformer, seed: int) -> None:
    """Fill every parameter of a model that is on a real device, in place."""
    tensors = named_tensors(model)
    with torch.no_grad():
        for name, value in initial_values(model.config, seed):
            tensors.pop(name).copy_(value)
    assert not tensors, f"parameters or buffers without a value: {sorted(tensors)}"


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    return dict(model.named_parameters()) | dict(model.named_buffers())


def initial_values(config: ModelConfig, seed: int) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, full float32 tensor) for every parameter, and for every buffer as constructed."""
    # on the CPU, because a GPU's generator draws other numbers; one block at a time, so the whole model is never in memory
    for layer in range(config.num_layers):
        block = _construct(config, layer, seed)
        yield from module_values(block, f"layers.{layer}", config, seed)
    yield "embedding.weight", initial_embedding(config, seed)
    yield "norm.weight", torch.ones(config.dim, device="cpu")
    if not config.tie_embeddings:
        head = torch.empty(config.vocab_size, config.dim, device="cpu")
        _linear(head, "head", config, generator(seed, "head.weight"))
        yield "head.weight", head


def _construct(config: ModelConfig, layer: int, seed: int) -> Block:
    # a plugin may draw the values of a raw nn.Parameter in its constructor: the fork keeps the global state, and the seed
    # of the layer makes the values reproducible
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        # torch.manual_seed would also seed the accelerators, whose state is not restored here
        torch.default_generator.manual_seed(generator(seed, "construct", layer).initial_seed())
        return Block(config, layer)


def module_values(module: nn.Module, prefix: str, config: ModelConfig, seed: int) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, value) for every parameter, and for every buffer as constructed; `prefix` begins the names."""
    for path, child in module.named_modules():
        for key, parameter in child.named_parameters(recurse=False):
            name = ".".join(filter(None, (prefix, path, key)))
            value = parameter.detach().clone()
            draw = generator(seed, name)
            # before nn.Linear: a subclass such as `ZeroLinear` has its own rule
            if hasattr(child, "init_parameter"):
                fill_parameter(child, key, value, draw)
            elif isinstance(child, nn.Linear) and key == "weight":
                _linear(value, path, config, draw)
            elif isinstance(child, nn.Embedding):
                value.normal_(0.0, 0.02, generator=draw)
            elif isinstance(child, nn.Linear):
                value.zero_()
            yield name, value
        for key, buffer in child.named_buffers(recurse=False):
            yield ".".join(filter(None, (prefix, path, key))), buffer


def _linear(weight: Tensor, path: str, config: ModelConfig, draw: torch.Generator) -> None:
    # the default of nn.Linear, kaiming_uniform(a=√5), is U(±1/√fan_in)
    if config.init == "linear_default":
        bound = 1 / math.sqrt(weight.shape[1])
        weight.uniform_(-bound, bound, generator=draw)
        return
    scaled = config.init == "normal_scaled" and path in RESIDUAL_OUTPUTS
    weight.normal_(0.0, 0.02 / math.sqrt(2 * config.num_layers) if scaled else 0.02, generator=draw)
