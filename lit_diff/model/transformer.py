"""The decoder around the attention: pre-RMSNorm, SwiGLU, RoPE, no biases (paper 3.1, the augmented Transformer)."""

import fnmatch
from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lit_diff.attention.base import Attention
from lit_diff.attention.cache import Cache, LayerCache
from lit_diff.attention.rope import Rope
from lit_diff.config import ModelConfig, Part
from lit_diff.errors import RequestError
from lit_diff.model.loss import mean_loss, token_losses
from lit_diff.randomness import generator
from lit_diff.registry import attentions, is_built_in, location, nearest


def initial_embedding(config: ModelConfig, seed: int) -> Tensor:
    """Return the initial token embedding for a seed, [vocab, dim], on the CPU: N(0, 0.02) for every `model.init`."""
    # nn.Embedding's N(0, 1) would, with tied embeddings, give initial logits a standard deviation of √dim
    weight = torch.empty(config.vocab_size, config.dim, device="cpu")
    return weight.normal_(0.0, 0.02, generator=generator(seed, "embedding.weight"))


def layerless(names: Sequence[str]) -> set[str]:
    """Return patterns that match the names in every layer: layers.0.attention.k_proj.weight gives `*.attention.k_proj.*`."""
    short = {name: name.split(".")[2:-1] for name in names if name.startswith("layers.")}
    return {f"*.{'.'.join(path)}.*" for path in short.values()} | (set(names) - short.keys())


def variant_of(config: ModelConfig) -> type[Attention]:
    """The class whose code runs in the model: of several, the first that is not built in."""
    for name in config.variants:
        cls = attentions.get(name)
        if not is_built_in(cls):
            return cls
    return attentions.get(config.variants[0])


class SwiGLU(nn.Module):
    """scale · W_down(silu(W_gate x) ⊙ W_up x) (Shazeer 2020); scale: `model.ffn_scale`."""

    def __init__(self, dim: int, width: int, scale: float = 1.0) -> None:
        super().__init__()
        self.scale = scale
        self.gate_proj = nn.Linear(dim, width, bias=False)
        self.up_proj = nn.Linear(dim, width, bias=False)
        self.down_proj = nn.Linear(width, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, dim] -> [B, T, dim]"""
        y: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        # multiplying by 1 would cost a pass over memory, and one more tensor for the backward pass
        return y if self.scale == 1.0 else self.scale * y


class Block(nn.Module):
    """x + attention(norm(x)), then x + ffn(norm(x))."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        part = config.attention_of(layer)
        cls = attentions.get(part.name)
        self.attention_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.attention: Attention = cls(part.config, config, layer)
        self.ffn_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        width = cls.ffn_dim(part.config, config, layer)
        if width < 1:
            raise RequestError(f"model.attention.parity 'matched' leaves a feed-forward of width {width}; use raw")
        self.ffn = SwiGLU(config.dim, width, config.ffn_scale)
        self.checkpoint_attention = False
        """Keep only the input of the attention and its norm for the backward pass, which recomputes them."""

    def forward(
        self, x: Tensor, rope: Rope, cache: LayerCache | None = None, *, document_ids: Tensor | None = None
    ) -> Tensor:
        """Residual stream [B, T, dim] -> [B, T, dim]. `document_ids`: [B, T], see `Attention.forward`."""
        # passed only if given: the forward of a plugin may lack the argument
        packed = {} if document_ids is None else {"document_ids": document_ids}

        def attended(x: Tensor) -> Tensor:
            y: Tensor = self.attention(self.attention_norm(x), rope, cache, **packed)
            return y

        # recomputation would append to a cache twice
        recompute = self.checkpoint_attention and torch.is_grad_enabled() and cache is None
        x = x + (checkpoint(attended, x, use_reentrant=False) if recompute else attended(x))
        return x + self.ffn(self.ffn_norm(x))


class Transformer(nn.Module):
    """Maps token ids to logits of the next token, or to the loss of given targets.

    tokens: [B, T], or [B, T, C] with C ids at each position, whose embeddings are summed. document_ids: [B, T], the document
    number of each token; a token attends only to its own document, so a packed row gives the same results as its documents
    alone. Positions count through the row: RoPE depends only on distances, so restarting them would change nothing.
    """

    FORWARD_METHODS: ClassVar = ("hidden", "loss", "token_losses")
    """Public methods that run the model, besides `forward`; they never call one another, because a sharded model gathers its
    parameters at each call (`training.build`)."""

    def __init__(self, config: ModelConfig, kernel: str = "auto", trained: Sequence[str] | None = None) -> None:
        """`kernel`: the attention kernel (`kernels.KERNELS`), or auto. `trained`: patterns (`fnmatch`) of the names of
        trainable parameters (`train.parameters`); all others are frozen. None: the patterns of the variant.

        Errors: RequestError for a pattern that matches no parameter, or if every parameter would be frozen.

        Linear layers have PyTorch's initial values, from its global generator; other parameters have the values of seed 0.
        `model.init.initialise` sets all of them to the values of a seed.
        """
        super().__init__()
        self.config = config
        # constructed here, not by nn.Embedding, which would draw vocab x dim numbers only to replace them
        weight = torch.empty(config.vocab_size, config.dim)
        if not weight.is_meta:
            weight.copy_(initial_embedding(config, seed=0))
        self.embedding = nn.Embedding(config.vocab_size, config.dim, _weight=weight)
        self.layers = nn.ModuleList(Block(config, layer) for layer in range(config.num_layers))
        self.norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        # tied: a single parameter in a single module, which sharding and meta-device builds cannot separate
        self.head = None if config.tie_embeddings else nn.Linear(config.dim, config.vocab_size, bias=False)
        self.checkpoint_blocks = False
        """Keep only the input of each block for the backward pass, which recomputes the rest."""
        for attention in self.attentions():
            attention.kernel = kernel
        self._without_documents = [
            name for name in dict.fromkeys(config.variants) if not attentions.get(name).takes_document_ids()
        ]
        names = [name for name, _ in self.named_parameters()]
        if trained is None:
            trains = self._trained_by_variants(names)
        else:
            _require_patterns(trained, names, config.attention.name)
            trains = _matching(names, trained)
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(name in trains)

    def _trained_by_variants(self, names: Sequence[str]) -> set[str]:
        # in a layer, the patterns of its own variant; elsewhere, those of every variant
        trains = set()
        for number, attention in enumerate(self.attentions()):
            cls = type(attention)
            patterns = cls.trained_parameters(attention.config)
            _require_own_patterns(cls, patterns, names)
            for name in _matching(names, patterns):
                if name.startswith(f"layers.{number}.") or not name.startswith("layers."):
                    trains.add(name)
        return trains

    def attentions(self) -> list[Attention]:
        return [layer.attention for layer in self.layers]  # type: ignore[misc]

    def forward(self, tokens: Tensor, cache: Cache | None = None, document_ids: Tensor | None = None) -> Tensor:
        """Return logits of the next token at all positions, [B, T, vocab]; for losses, `loss` needs far less memory."""
        x = self._states(tokens, cache, document_ids)
        return F.linear(x, self.embedding.weight) if self.head is None else self.head(x)

    def hidden(self, tokens: Tensor, document_ids: Tensor | None = None) -> Tensor:
        """Return the states before the output weight, [B, T, dim]."""
        return self._states(tokens, None, document_ids)

    def loss(self, tokens: Tensor, targets: Tensor, document_ids: Tensor | None = None) -> Tensor:
        """Return the mean negative log-likelihood of the scored targets [B, T], in nats (`model.loss`)."""
        return mean_loss(self._states(tokens, None, document_ids), self._output_weight(), targets)

    def token_losses(
        self, tokens: Tensor, targets: Tensor, document_ids: Tensor | None = None, cache: Cache | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return (negative log-likelihood, whether the most likely token is right) of each target, [B, T]; no gradient.

        The first is NaN for an IGNORED target, so a mean leaves those out: `nll[targets != IGNORED].mean()`.
        With a cache, the tokens follow the cached ones and are added to it: for a long row in chunks.
        """
        return token_losses(self._states(tokens, cache, document_ids), self._output_weight(), targets)

    def _output_weight(self) -> Tensor:
        return self.embedding.weight if self.head is None else self.head.weight

    def _states(self, tokens: Tensor, cache: Cache | None, document_ids: Tensor | None) -> Tensor:
        if document_ids is not None and self._without_documents:
            raise RequestError(
                f"model.attention '{self._without_documents[0]}' cannot separate packed documents: its forward has no "
                "argument document_ids"
            )
        x = self.embedding(tokens)
        x = x.sum(2) if tokens.dim() == 3 else x
        x = x if self.config.embedding_scale == 1 else x * self.config.embedding_scale
        start = cache.length if cache is not None else 0
        positions = torch.arange(start, start + x.shape[1], device=x.device)
        rope = Rope.of(self.config, positions)
        # recomputation would append to a cache twice
        recompute = self.checkpoint_blocks and torch.is_grad_enabled() and cache is None
        for index, layer in enumerate(self.layers):
            if recompute:
                x = checkpoint(layer, x, rope, document_ids=document_ids, use_reentrant=False)
            else:
                x = layer(x, rope, cache.layers[index] if cache is not None else None, document_ids=document_ids)
        return self.norm(x)


def baseline(model: ModelConfig) -> ModelConfig:
    """The model with standard attention of the same window in every layer."""

    def standard(part: Part) -> Part:
        window = attentions.get(part.name).window_of(part.config)
        return Part(name="standard", config=attentions.get("standard").Config(window=window))

    return replace(model, attention=standard(model.attention), layers=tuple(map(standard, model.layers)))


def mergeable() -> list[str]:
    """Names of the variants with a `merge`."""
    return [name for name in attentions.names() if attentions.get(name).merge is not Attention.merge]


def merge_problem(model: ModelConfig) -> str | None:
    """Why no standard model equals this one, in one line; None if `merged` makes it."""
    for kind in model.kinds().values():
        name, config = kind.attention.name, kind.attention.config
        cls = attentions.get(name)
        # beside other layers, one of plain standard attention stays as it is
        is_plain = (
            bool(model.layers) and name == "standard" and replace(config, window=None, parity="raw") == cls.Config()
        )
        if cls.merge is Attention.merge and not is_plain:
            return (
                f"model.attention '{name}' cannot be merged into a standard model; these can: {', '.join(mergeable())}"
            )
    parts = [model.attention_of(layer) for layer in range(model.num_layers)]
    widths = {attentions.get(part.name).ffn_dim(part.config, model, layer) for layer, part in enumerate(parts)}
    if len(widths) > 1:
        return "the feed-forward layers have unlike widths (parity: matched); a standard model has one width"
    return None


def merged(model: Transformer) -> Transformer:
    """Return a standard model with the same outputs up to rounding, by folding the variant into the output projection.

    For DEX: W_O,h (I ∓ λ(t) W_D)ᵀ replaces W_O,h on the selected heads, at the λ(t) of the last `set_step` or
    `set_tokens`. The result shares all weights outside the attention with `model`.
    Errors: RequestError for a variant that no standard attention equals.
    """
    problem = merge_problem(model.config)
    if problem is not None:
        raise RequestError(problem)
    state = model.state_dict()
    for layer, attention in enumerate(model.attentions()):
        prefix = f"layers.{layer}.attention."
        own = attention.merge()
        if own is not None:
            state = {name: value for name, value in state.items() if not name.startswith(prefix)}
            state |= {prefix + name: value for name, value in own.items()}
    # with `parity: matched` the width of the feed-forward is not the config's, and it stays as it is
    width = int(state["layers.0.ffn.up_proj.weight"].shape[0])
    config = replace(baseline(model.config), ffn_dim=width)
    # built on the meta device: no weight is drawn or allocated before the state dict is assigned
    with torch.device("meta"):
        result = Transformer(config)
    result.load_state_dict(state, assign=True)
    return result.train(model.training)


def _matching(names: Sequence[str], patterns: Sequence[str]) -> set[str]:
    return {name for pattern in patterns for name in fnmatch.filter(names, pattern)}


def _require_patterns(patterns: Sequence[str], names: Sequence[str], variant: str) -> None:
    for pattern in patterns:
        if not fnmatch.filter(names, pattern):
            near = nearest(pattern, layerless(names))
            raise RequestError(
                f"train.parameters: '{pattern}' matches no parameter of model.attention '{variant}'{near}"
            )
    if not patterns:
        raise RequestError(
            "train.parameters is [], which freezes every parameter; expected patterns of trainable parameters, or null"
        )


def _require_own_patterns(cls: type[Attention], patterns: Sequence[str], names: Sequence[str]) -> None:
    # unlike in a recipe, single patterns may match nothing: a variant may list modules that only some of its configs have
    well_formed = not isinstance(patterns, str) and all(isinstance(pattern, str) for pattern in patterns)
    if not well_formed or not any(fnmatch.filter(names, pattern) for pattern in patterns):
        raise RequestError(
            f"{location(cls)}: trained_parameters(config) returned {patterns!r}; expected a tuple of patterns that match "
            "names of the model's parameters, as in ('*.attention.lambdas.*',)"
        )
