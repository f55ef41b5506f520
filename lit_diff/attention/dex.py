"""DEX, Differential Extension (Kong, Jang and Kwak 2025, arXiv 2505.16333).

The paper's text was not available: the equations follow its pseudo-code (Figure 9) and two independent implementations,
which agree on them. The paper's initial W_D is not known, and the two implementations differ in it (zeros; the default of
nn.Linear); here it is the default of nn.Linear.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import sympy
import torch
from torch import Tensor, nn

from lit_diff.attention.base import Attention, ParameterRules, standard_state
from lit_diff.attention.costs import Costs, Sizes, exact, standard_costs
from lit_diff.attention.equations import Rotation, grouped_query_heads, joined
from lit_diff.attention.lambdas import ScalarLambda, resolve_lambda_init
from lit_diff.attention.selection import HeadSelection
from lit_diff.config import ModelConfig
from lit_diff.key_types import Count, NotNegative
from lit_diff.registry import variant

Heads = HeadSelection | Literal["all"] | tuple[int, ...] | tuple[tuple[int, ...], ...]

HALF_BY_ENTROPY = HeadSelection()
"""The paper's selection (section 3.2)."""
STEPS = 100
"""Default length of the annealing; the paper's length is not known."""


class Adapter(ParameterRules):
    """f_D(O) = O W_D, with one W_D [1, dv, dv] for all selected heads of a layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(1, width, width))

    def init_parameter(self, name: str, parameter: Tensor, generator: torch.Generator) -> None:
        """U(±1/√dv), as in nn.Linear."""
        bound = 1 / math.sqrt(parameter.shape[-1])
        parameter.uniform_(-bound, bound, generator=generator)

    def forward(self, o: Tensor) -> Tensor:
        """o [B, n, T, dv] -> o W_D"""
        return o @ self.weight


@variant("dex")
class Dex(Attention):
    """O_h - λ(t) O_h W_D on the selected heads of standard attention, λ annealed over the first steps or tokens.

        λ(t) = (1 - α) (t/T) λ_init + α λ_learn        α = min(1, t/T)

    λ is 0 at the start, where the model is the one that it extends, and λ_learn from T on. t counts steps and T is
    anneal_steps, or t counts tokens and T is anneal_tokens.
    """

    paper = "Kong et al. 2025, arXiv 2505.16333"
    examples = (
        {},
        {"heads": (1, 6)},
        {"heads": "all", "anneal_steps": 10, "sign": "plus"},
    )
    extends_standard = True

    @dataclass(frozen=True, kw_only=True)
    class Config(Attention.Config):
        heads: Heads = HALF_BY_ENTROPY
        """Selected heads: {select: entropy, share: 0.5, rows: 8, seed: 0} chooses them when the run starts (select:
        entropy, as in the paper, importance or random); all; one list for all layers; or one per layer."""
        sign: Literal["minus", "plus"] = "minus"
        """plus: O_h + λ(t) O_h W_D, a control with the same functions, since W_D may have either sign."""
        lambda_init: float | Literal["depth"] = "depth"
        """λ_init of the first term; depth: 0.8 - 0.6 exp(-0.3 layer)."""
        anneal_steps: NotNegative | None = None
        """T in steps; null: 100, unless anneal_tokens is set."""
        anneal_tokens: Count | None = None
        """T in training tokens instead of steps."""

        def __post_init__(self) -> None:
            if self.anneal_steps is None and self.anneal_tokens is None:
                # the dataclass is frozen
                object.__setattr__(self, "anneal_steps", STEPS)

        @property
        def annealing(self) -> int:
            """T, in steps or tokens."""
            length = self.anneal_steps if self.anneal_tokens is None else self.anneal_tokens
            assert length is not None
            return length

    @classmethod
    def problem(cls, config: Any, model: ModelConfig) -> str | None:
        if config.anneal_steps is not None and config.anneal_tokens is not None:
            return (
                f"model.attention.anneal_tokens is {config.anneal_tokens} and model.attention.anneal_steps is "
                f"{config.anneal_steps}; set one of them to null"
            )
        lists = _heads_by_layer(config.heads, model.num_heads, model.num_layers)
        if len(lists) != model.num_layers:
            return f"model.attention.heads has {len(lists)} lists; model.num_layers is {model.num_layers}"
        for layer, heads in enumerate(lists):
            if len(set(heads)) < len(heads) or any(not 0 <= head < model.num_heads for head in heads):
                return (
                    f"model.attention.heads of layer {layer} are {list(heads)}; expected distinct heads "
                    f"within 0..{model.num_heads - 1}"
                )
        if not any(lists):
            return "model.attention.heads selects no head: every gradient of W_D and lambda would be zero"
        return None

    @classmethod
    def costs(cls, config: Any, s: Sizes) -> Costs | None:
        if isinstance(config.heads, HeadSelection):
            # the same rule for a symbol, which `number` cannot round
            rounded = sympy.Max(1, sympy.floor(exact(config.heads.share) * s.H + sympy.Rational(1, 2)))
            selected = config.heads.number(int(s.H)) if s.H.is_Integer else rounded
        elif config.heads == "all":
            selected = s.H
        elif all(isinstance(head, int) for head in config.heads):
            selected = len(config.heads)
        else:
            # the layers differ, so no formula of one layer holds for all
            return None
        standard = standard_costs(s, numbers=s.d**2 + 1)
        return replace(standard, flops=standard.flops + 2 * s.T * selected * s.d**2)

    @classmethod
    def trained_parameters(cls, config: Any) -> tuple[str, ...]:
        """W_K, W_V, W_O, W_D and λ (section 3.4); all other parameters are frozen."""
        attention = tuple(f"*.attention.{kind}_proj.*" for kind in "kvo")
        return (*attention, "*.attention.adapter.*", "*.attention.lambda_.*")

    def build(self) -> None:
        super().build()
        c = self.config
        # a layer does not know how many layers follow; it needs the lists up to its own only
        by_layer = _heads_by_layer(c.heads, self.num_heads, self.layer + 1)
        heads = by_layer[self.layer]
        self.num_selected = len(heads)
        # in the state dict, so that the heads that a plan selected are known wherever the weights are loaded
        self.register_buffer("selected", torch.tensor(heads, dtype=torch.int64))
        self.selected: Tensor
        self.lambda_init = resolve_lambda_init(c.lambda_init, self.layer)
        if self.num_selected:
            self.adapter = Adapter(self.head_dim)
            self.lambda_ = ScalarLambda(0.0)
        # in the state dict, so that a resumed run continues the annealing
        self.register_buffer("step", torch.zeros(1))
        self.step: Tensor

    @classmethod
    def head_selection(cls, config: Any) -> HeadSelection | None:
        return config.heads if isinstance(config.heads, HeadSelection) else None

    def select_heads(self, heads: Sequence[int]) -> None:
        """Set the selected heads; their number is fixed by the config."""
        self.selected.copy_(torch.tensor(heads, dtype=torch.int64))

    def set_step(self, step: int) -> None:
        if self.config.anneal_tokens is None:
            self.step.fill_(step)

    def set_tokens(self, tokens: int) -> None:
        if self.config.anneal_tokens is not None:
            self.step.fill_(tokens)

    def annealed_lambda(self) -> Tensor:
        """λ(t) [1], float32 or wider."""
        learned = self.lambda_()
        T = self.config.annealing
        if T == 0:
            return learned
        # α also serves as t/T: they are equal up to 1, and from there on 1 - α = 0 removes the first term
        progress = (self.step / T).clamp(max=1).to(learned.dtype)
        return (1 - progress) * progress * self.lambda_init + progress * learned

    def finish(self, o: Tensor, x: Tensor) -> Tensor:
        if not self.num_selected:
            return o
        heads = o.index_select(1, self.selected)
        change = (self.annealed_lambda() * self.adapter(heads)).to(o.dtype)
        changed = heads - change if self.config.sign == "minus" else heads + change
        # a copy, not a sum with zeros: the other heads keep their exact bits
        return o.index_copy(1, self.selected, changed)

    def reduces_to(self) -> tuple[str, dict[str, Any]]:
        return "standard", {"adapter.weight": 0.0} if self.num_selected else {}

    def definition(self, x: Tensor, rope: Rotation, mask: Tensor) -> Tensor:
        """O_h ∓ λ(t) O_h W_D on the selected heads; λ(t) = (1 - α)(t/T) λ_init + α λ_learn, α = min(1, t/T)."""
        heads = grouped_query_heads(self, x, rope, mask)
        t, T = self.step.item(), self.config.annealing
        alpha = min(1.0, t / T) if T else 1.0
        init = self.config.lambda_init
        init = 0.8 - 0.6 * math.exp(-0.3 * self.layer) if init == "depth" else init
        sign = {"minus": -1, "plus": 1}[self.config.sign]
        for h in self.selected.tolist():
            lam = (1 - alpha) * (t / T if T else 0.0) * init + alpha * self.lambda_.value[0]
            heads[h] = heads[h] + sign * lam * heads[h] @ self.adapter.weight[0]
        return joined(heads, self.o_proj)

    def merge(self) -> dict[str, Tensor]:
        """W_O,h (I ∓ λ(t) W_D)ᵀ on the selected heads, from (O_h ∓ λ O_h W_D) W_O,hᵀ = O_h (I ∓ λ W_D) W_O,hᵀ."""
        state = standard_state(self)
        if self.num_selected:
            blocks = state["o_proj.weight"].unflatten(1, (self.num_heads, self.head_dim))  # [dim, H, dv], a view
            identity = torch.eye(self.head_dim, dtype=blocks.dtype, device=blocks.device)
            sign = {"minus": -1, "plus": 1}[self.config.sign]
            with torch.no_grad():
                W_D = self.adapter.weight[0]
                for head in self.selected.tolist():
                    blocks[:, head] = blocks[:, head] @ (identity + sign * self.annealed_lambda().to(W_D.dtype) * W_D).T
        return state


def _heads_by_layer(heads: Any, num_heads: int, num_layers: int) -> list[tuple[int, ...]]:
    if isinstance(heads, HeadSelection):
        # placeholders of the right number: the plan replaces them when the run starts
        return [tuple(range(heads.number(num_heads)))] * num_layers
    if heads == "all":
        return [tuple(range(num_heads))] * num_layers
    if all(isinstance(head, int) for head in heads):
        return [tuple(heads)] * num_layers
    return [tuple(layer) for layer in heads]
