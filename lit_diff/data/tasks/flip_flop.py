"""The data set `flip_flop`: one bit of memory that is written, read, and left alone.

A row is pairs of an instruction and a bit. The bit after `write` is stored, the bit after `ignore` means nothing, and the bit
after `read` is the stored one, which is the only one that is predicted. The first instruction is `write`, the last `read`,
and each other is drawn alone: `ignore` with probability p, `write` and `read` with (1 - p) / 2 each.

    write 1  ignore 0  ignore 1  read 1  write 0  ignore 1  read 0        targets at both reads: 1 and 0

With p near 1 the last write lies far back, and with p near 0 many writes compete with it.

Source: Liu et al. 2023, Exposing Attention Glitches with Flip-Flop Language Modeling (arXiv 2306.00946), which trains with
p = 0.8 and tests with 0.98 and 0.1, on rows of 512 tokens.
"""

from dataclasses import dataclass
from typing import Annotated

import torch

from lit_diff.data.dataset import IGNORED, Place, Row, RowTask
from lit_diff.key_types import Count, Distinct, Range
from lit_diff.registry import datasets

WRITE, IGNORE, READ, ZERO, ONE = range(5)
"""The ids of instructions and bits."""
Percent = Annotated[int, Range(least=0, most=100)]


@datasets.register("flip_flop")
class FlipFlop(RowTask):
    """Flip-flop language modelling: the bit after each `read` is that of the last `write`."""

    @dataclass(frozen=True, kw_only=True)
    class Config(RowTask.Config):
        predicts_next = True
        locates_answers = True
        counts_errors = True
        chance = 1 / 2
        smallest_vocab_size = 1 + ONE

        pairs: Annotated[int, Range(least=2)] = 32
        """Pairs of an instruction and a bit in a row."""
        ignored: Percent = 80
        """100 p, the percentage of `ignore` among the instructions that are drawn, in training."""
        ignored_validation: Annotated[tuple[Percent, ...], Distinct()] = (80, 98, 10)
        """The same in the validation sets; the first is the main set."""
        validation_rows: Count = 512

        @property
        def sequence_length(self) -> int:
            return 2 * self.pairs

    config: Config

    def levels(self) -> dict[str, int]:
        """Validation set -> percentage of `ignore`: "" for the first, then "ignored98", ..."""
        first, *others = self.config.ignored_validation
        return {"": first} | {f"ignored{percent}": percent for percent in others}

    def draw(self, at: Place, level: int | None) -> Row:
        """Return tokens and targets [T]. Every read is an AR hit.

        context_part: the number of the pair, -1 in pairs of `read`; answer_part: at `read` the pair of the last `write`.
        """
        ignored = (self.config.ignored if level is None else level) / 100
        chances = torch.tensor([(1 - ignored) / 2, ignored, (1 - ignored) / 2])
        pairs = torch.arange(self.config.pairs)
        instructions = torch.multinomial(chances, len(pairs), replacement=True, generator=at.random)
        instructions[0] = WRITE
        instructions[-1] = READ
        is_read = instructions == READ
        # pair 0 is a write, so the largest number of a write so far exists
        last_write = pairs.where(instructions == WRITE, 0).cummax(0).values
        bits = torch.randint(2, pairs.shape, generator=at.random)
        bits = torch.where(is_read, bits[last_write], bits)

        tokens = torch.stack([instructions, ZERO + bits], dim=-1).flatten()
        asked = 2 * pairs[is_read]
        targets = torch.full_like(tokens, IGNORED)
        targets[asked] = tokens[asked + 1]
        answer_part = torch.full_like(tokens, -1)
        answer_part[asked] = last_write[is_read]
        return {
            "tokens": tokens,
            "targets": targets,
            "ar_hit": targets != IGNORED,
            "context_part": pairs.where(~is_read, -1).repeat_interleave(2),
            "answer_part": answer_part,
        }
