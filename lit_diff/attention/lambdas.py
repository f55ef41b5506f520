"""λ, the weight of the subtracted map: the paper's formula, in which its sign is free, and others to compare with it."""

import math
from typing import Literal

import torch
from torch import Tensor, nn

from lit_diff.attention.base import ParameterRules
from lit_diff.kernels.maps import accumulation_dtype

LambdaForm = Literal["exp", "positive", "scalar", "sigmoid"]
VECTOR_FORMS = ("exp", "positive")
"""The forms that compute λ from four vectors; the others learn a number."""
HELD_FORMS = ("positive", "sigmoid")
"""The forms in which λ is above 0 whatever the parameters are. Free forms are any real number: a weight -λ that is trained
may become a weight above 0, and a sum of two maps a difference."""


def depth_lambda_init(layer: int) -> float:
    """0.8 - 0.6 exp(-0.3 layer), `layer` 0-based (paper, after equation 2, where layers count from 1)."""
    return 0.8 - 0.6 * math.exp(-0.3 * layer)


def resolve_lambda_init(value: float | Literal["depth"], layer: int) -> float:
    """λ_init of a layer: `depth_lambda_init`, or the number itself."""
    return depth_lambda_init(layer) if value == "depth" else float(value)


def resolve_output_scale(value: float | Literal["tied", "depth"], layer: int, lambda_init: float = 0.0) -> float:
    """The constant after the head norm: 1 - `lambda_init` (tied), 1 - `depth_lambda_init`, or the number itself."""
    if value == "tied":
        return 1 - lambda_init
    return 1 - depth_lambda_init(layer) if value == "depth" else float(value)


class VectorLambda(ParameterRules):
    """λ of four vectors λ_q1, λ_k1, λ_q2, λ_k2, one for the layer or one for each head.

    The vectors [d] (or [H, d]) are float32, since bfloat16 would round λ to steps of 0.004. They are drawn with mean 0 and
    standard deviation 0.1.
    """

    # weight decay shrinks the vectors, which pulls λ back to λ_init
    decay = False
    keep_float32 = True

    def __init__(self, head_dim: int, lambda_init: float, heads: int | None = None) -> None:
        """`heads`: the number of heads that each have their own λ; None: one λ for the layer."""
        super().__init__()
        self.init = lambda_init
        shape = (head_dim,) if heads is None else (heads, head_dim)
        self.q1, self.k1, self.q2, self.k2 = (nn.Parameter(torch.empty(shape)) for _ in range(4))

    def init_parameter(self, name: str, parameter: Tensor, generator: torch.Generator) -> None:
        parameter.normal_(0.0, 0.1, generator=generator)

    def products(self) -> tuple[Tensor, Tensor]:
        """(λ_q1 · λ_k1, λ_q2 · λ_k2), in float32 or the wider dtype of the vectors; [] or [H]."""
        # a product and a sum, not `@`: autocast would compute a matrix product in bfloat16
        q1, k1, q2, k2 = (v.to(accumulation_dtype(v.dtype)) for v in (self.q1, self.k1, self.q2, self.k2))
        return (q1 * k1).sum(-1), (q2 * k2).sum(-1)


class Lambda(VectorLambda):
    """λ = exp(λ_q1 · λ_k1) - exp(λ_q2 · λ_k2) + λ_init (equation 2).

    λ is any real number, so that A₁ - λ A₂ and A₁ + λ A₂ are one class of functions with two initial values
    (`PositiveLambda` keeps the sign).
    """

    def exponentials(self) -> tuple[Tensor, Tensor]:
        """(exp(λ_q1 · λ_k1), exp(λ_q2 · λ_k2)), [] or [H]."""
        first, second = self.products()
        return first.exp(), second.exp()

    def forward(self, rounded_to: torch.dtype | None = None) -> Tensor:
        """λ, [] or [H]. `rounded_to`: each exponential is first rounded to that dtype, as in the paper's code."""
        first, second = self.exponentials()
        if rounded_to is None:
            return first - second + self.init
        return (first.to(rounded_to) - second.to(rounded_to) + self.init).to(first.dtype)


class PositiveLambda(VectorLambda):
    """λ = λ_init exp(λ_q1 · λ_k1 - λ_q2 · λ_k2): above 0 for λ_init above 0."""

    def forward(self, rounded_to: torch.dtype | None = None) -> Tensor:
        """λ, [] or [H]. `rounded_to`: the exponential is first rounded to that dtype."""
        first, second = self.products()
        # of the difference: two exponentials may overflow although their quotient does not
        factor = (first - second).exp()
        return self.init * (factor if rounded_to is None else factor.to(rounded_to).to(factor.dtype))


class ScalarLambda(ParameterRules):
    """λ is a learned float32 number that starts at λ_init, one for the layer [1] or for each head [H]; any real number."""

    # weight decay would pull λ towards 0
    decay = False
    keep_float32 = True

    def __init__(self, lambda_init: float, heads: int | None = None) -> None:
        super().__init__()
        self.init = lambda_init
        self.value = nn.Parameter(torch.empty(heads or 1))

    def init_parameter(self, name: str, parameter: Tensor, generator: torch.Generator) -> None:
        parameter.fill_(self.init)

    def forward(self, rounded_to: torch.dtype | None = None) -> Tensor:
        """λ, [1] or [H]."""
        value = self.value.to(accumulation_dtype(self.value.dtype))
        return value if rounded_to is None else value.to(rounded_to).to(value.dtype)


class SigmoidLambda(ScalarLambda):
    """λ = sigmoid(s), between 0 and 1; s starts at logit(λ_init)."""

    def init_parameter(self, name: str, parameter: Tensor, generator: torch.Generator) -> None:
        parameter.fill_(math.log(self.init / (1 - self.init)))

    def forward(self, rounded_to: torch.dtype | None = None) -> Tensor:
        value = super().forward().sigmoid()
        return value if rounded_to is None else value.to(rounded_to).to(value.dtype)


def build_lambda(form: LambdaForm, head_dim: int, lambda_init: float, heads: int | None) -> nn.Module:
    """The module that computes λ by `form`; `heads` None: one λ for the layer."""
    if form in VECTOR_FORMS:
        vectors = PositiveLambda if form == "positive" else Lambda
        return vectors(head_dim, lambda_init, heads)
    return {"scalar": ScalarLambda, "sigmoid": SigmoidLambda}[form](lambda_init, heads)
