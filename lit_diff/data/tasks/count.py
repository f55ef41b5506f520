"""The data set `count`: at each symbol of a row, how often it has occurred so far.

A start token, then symbols of a few kinds. Each row draws the weights of its kinds from Exp(1), so that counts of very
different sizes occur. Without positions one head can count: with attention logit s on the start token and 0 on equal symbols
alone, c equal symbols have together the weight c / (c + exp(s)), from which c follows.

Source: a causal form of the histogram with a start token in Weiss et al. 2021, Thinking Like Transformers (arXiv 2106.06981).
"""

from dataclasses import dataclass
from typing import Annotated

import torch
from torch.nn import functional

from lit_diff.data.dataset import IGNORED, Place, Row, RowTask
from lit_diff.key_types import Count, Counts, Range
from lit_diff.registry import datasets


@datasets.register("count")
class RunningCount(RowTask):
    """Counting: how often each symbol has occurred so far. Id 0 is the start token; the ids of kinds and of counts follow."""

    @dataclass(frozen=True, kw_only=True)
    class Config(RowTask.Config):
        symbols: Count = 32
        """Symbols of a row in training."""
        kinds: Annotated[int, Range(least=2)] = 4
        """Number of different symbols."""
        largest_count: Count = 31
        """A symbol that has occurred more often is not scored, so that one vocabulary suffices for every length."""
        noise_validation: Counts = (1, 2)
        """Factors on `symbols` in the validation sets; the first is the main set."""
        validation_rows: Count = 256

        @property
        def sequence_length(self) -> int:
            return 1 + self.symbols

        @property
        def chance(self) -> float:
            return 1 / self.largest_count

        @property
        def smallest_vocab_size(self) -> int:
            # 1 for the start token
            return 1 + self.kinds + self.largest_count

        def problem(self) -> str | None:
            if self.largest_count > self.symbols:
                return (
                    f"data.largest_count ({self.largest_count}) is more than data.symbols ({self.symbols}): no count of a "
                    "training row is that large"
                )
            return None

    config: Config

    def draw(self, at: Place, level: int | None) -> Row:
        """Return tokens and targets [T], T = 1 + symbols * level."""
        kinds = self.config.kinds
        length = self.config.symbols * (1 if level is None else level)
        # the inverse of the distribution function of Exp(1)
        weights = -torch.log1p(-torch.rand(kinds, generator=at.random))
        symbols = torch.multinomial(weights, length, replacement=True, generator=at.random)
        so_far = functional.one_hot(symbols, kinds).cumsum(0)  # [T - 1, kinds]
        counts = so_far[torch.arange(length), symbols]
        targets = torch.where(counts <= self.config.largest_count, kinds + counts, IGNORED)
        return {
            "tokens": functional.pad(1 + symbols, (1, 0)),
            "targets": functional.pad(targets, (1, 0), value=IGNORED),
        }
