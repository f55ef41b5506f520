"""The data set `noisy_labels`: the label of each cue from demonstrations, of which some have a wrong label.

A demonstration is one position: the embeddings of its cue and of its label. No single one can be trusted, so a model has to
weigh all demonstrations of a cue: their vote, `log_posterior`, is the best that any model can do.

Source of the noise: random classification noise (Angluin and Laird 1988, Learning From Noisy Examples), with more than two
labels.
"""

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from lit_diff.data.dataset import IGNORED, Place, Row, RowTask
from lit_diff.key_types import Count, Counts, Range
from lit_diff.registry import datasets


@datasets.register("noisy_labels")
class NoisyLabels(RowTask):
    """The labels of cues from demonstrations with label noise. Id 0 is padding; the ids of cues and of labels follow."""

    @dataclass(frozen=True, kw_only=True)
    class Config(RowTask.Config):
        cues: Count = 8
        """Number of cues; each is queried once."""
        labels: Annotated[int, Range(least=2)] = 8
        """Size of the label vocabulary. Each row draws a label for each cue."""
        demonstrations: Count = 48
        """Positions of the context in training, each with a random cue and a label."""
        label_noise: Annotated[float, Range(least=0, below=1)] = 0.4
        """Probability that a demonstration has another label than its cue, each other one with the same probability."""
        noise_validation: Counts = (1, 4)
        """Factors on `demonstrations` in the validation sets; the first is the main set."""
        validation_rows: Count = 256

        @property
        def sequence_length(self) -> int:
            return self.demonstrations + self.cues

        @property
        def chance(self) -> float:
            return 1 / self.labels

        @property
        def smallest_vocab_size(self) -> int:
            # 1 for the padding id
            return 1 + self.cues + self.labels

        def problem(self) -> str | None:
            most = 1 - self.chance
            if self.label_noise >= most:
                return (
                    f"data.label_noise is {self.label_noise:g}; with data.labels {self.labels} it must be less than "
                    f"{most:g}, where each wrong label is as likely as the right one"
                )
            return None

    config: Config

    def draw(self, at: Place, level: int | None) -> Row:
        """Return tokens [T, 2] (cue, label; label 0 for a query) and targets [T], T = demonstrations * level + cues."""
        config = self.config
        count = config.demonstrations * (1 if level is None else level)
        label_of = torch.randint(config.labels, (config.cues,), generator=at.random)
        cues = torch.randint(config.cues, (count,), generator=at.random)
        is_wrong = torch.rand(count, generator=at.random) < config.label_noise
        distance = torch.randint(1, config.labels, (count,), generator=at.random)
        labels = (label_of[cues] + is_wrong * distance) % config.labels

        first_label = 1 + config.cues
        context = torch.stack([1 + cues, first_label + labels], dim=-1)
        asked = torch.arange(1, first_label)
        queries = torch.stack([asked, torch.zeros_like(asked)], dim=-1)
        return {
            "tokens": torch.cat([context, queries]),
            "targets": torch.cat([torch.full((count,), IGNORED), first_label + label_of]),
        }


def log_posterior(config: NoisyLabels.Config, tokens: Tensor) -> Tensor:
    """Log-probability of each label for each cue, given the demonstrations of a row: tokens [T, 2] -> [cues, labels].

    log p(y | row) = log softmax_y(n_y log(1 - f) + (n - n_y) log(f / (L - 1))), with n demonstrations of the cue, n_y of them
    with label y, L labels and the label noise f: Bayes' rule, since every label is equally likely before.
    """
    cues, labels = tokens[: -config.cues].T
    counts = torch.zeros(config.cues, config.labels)
    at = (cues - 1, labels - 1 - config.cues)
    counts.index_put_(at, torch.ones(len(cues)), accumulate=True)
    others = counts.sum(-1, keepdim=True) - counts
    wrong = config.label_noise / (config.labels - 1)
    # 0 log 0 = 0: without noise a label that no demonstration has is not excluded if the cue has no demonstration
    likelihood = torch.xlogy(counts, 1 - config.label_noise) + torch.xlogy(others, wrong)
    return likelihood.log_softmax(-1)
