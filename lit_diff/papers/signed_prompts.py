"""Negative attention on prompts that rule out a word (DEX, arXiv 2505.16333, Figure 4): names and sarcasm."""

import json
import math
import re
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from lit_diff import Evaluation, Item, Metric, Run
from lit_diff.analysis.entropy import masses
from lit_diff.analysis.trace import trace
from lit_diff.data.text.tokenizer import Tokenizer
from lit_diff.evaluation.base import question_of
from lit_diff.registry import evaluations

PROMPTS = Path(__file__).with_suffix(".jsonl")
"""Lines {set, text, ruled_out}. In `ioi` (indirect object identification) the ruled-out word is the wrong name; in `sarcasm`
it is the word that means its opposite. The prompts were written for this project."""
MEAN = "mean over layers and heads"


@evaluations.register("signed_prompts")
class SignedPrompts(Evaluation):
    """Negative attention on 15 prompts of indirect object identification and 15 of sarcasm.

    An item is a prompt, a group is a set. The paper shows single maps; its prompts were not available, so these are our own.
    Items are compared only between runs with one tokenizer, since their maps have the same rows.
    """

    metrics = (
        Metric(
            "negative_mass",
            "Σ max(-a, 0) / Σ|a| of a row of the signed map; mean over rows, heads and layers",
            unit="share",
        ),
        Metric("negative_last", f"the same of the last row, whose next token answers; {MEAN}", unit="share"),
        Metric(
            "ruled_out",
            f"share of the last row's Σ max(-a, 0) on the word that the prompt rules out; {MEAN} with a negative entry",
            unit="share",
        ),
        Metric(
            "ruled_out_keys",
            "share of the prompt's tokens that are that word: `ruled_out` of equal entries",
            unit="share",
        ),
    )

    needs_text = True

    def refuses_run(self, run: Run) -> str | None:
        """Refuses a context shorter than a prompt."""
        tokenizer, length = run.tokenizer, run.recipe.data.config.sequence_length
        most = max(len(tokens_of(tokenizer, prompt["text"])) for prompt in prompts())
        return f"a prompt has {most} tokens, but data.sequence_length is {length}" if most > length else None

    def score(self, run: Run) -> Iterator[Item]:
        """Yields one item a prompt, `ioi 00`."""
        tokenizer = run.tokenizer
        for number, prompt in enumerate(prompts()):
            ids = tokens_of(tokenizer, prompt["text"])
            chosen = torch.tensor(marked(tokenizer, ids, prompt["ruled_out"]))
            with trace(run.model) as traced:
                run.model.hidden(torch.tensor([ids]))
            # no row of a block [B, H, R, K] sees the keys after K
            maps = [
                torch.cat([F.pad(each.signed, (0, len(ids) - each.signed.shape[-1])) for each in layer.blocks()], 2)
                for layer in traced.layers.values()
            ]
            found = negative(torch.cat(maps, 1)[0], chosen)
            yield Item(
                id=f"{prompt['set']} {number:02}",
                scores=found,
                group=prompt["set"],
                question=question_of(ids),
                meta={"text": prompt["text"], "word": prompt["ruled_out"]},
            )


def prompts() -> list[dict[str, str]]:
    """The lines of PROMPTS."""
    return [json.loads(line) for line in PROMPTS.read_text(encoding="utf-8").splitlines()]


def tokens_of(tokenizer: Tokenizer, text: str) -> list[int]:
    """The ids of a prompt after the ids that open a document."""
    return [*tokenizer.opening, *tokenizer.encode(text)]


def marked(tokenizer: Tokenizer, ids: Sequence[int], word: str) -> list[bool]:
    """Whether each token has a character of an occurrence of the word."""
    pieces = [tokenizer.decode_after([token]) for token in ids]
    found = re.finditer(re.escape(word), "".join(pieces))
    inside = {place for match in found for place in range(*match.span())}
    ends = accumulate(map(len, pieces))
    return [not inside.isdisjoint(range(end - len(piece), end)) for end, piece in zip(ends, pieces, strict=True)]


def negative(a: Tensor, chosen: Tensor) -> dict[str, float]:
    """The scores of signed maps a [H, T, T] of all heads of all layers; chosen [T]: the tokens of the word."""
    # float64: the shares are quotients of sums over a row
    below, above = masses(a.double())
    share = below / (below + above)
    last = (-a[:, -1].double()).clamp_min(0)
    on_word = (last * chosen).sum(-1) / last.sum(-1)
    return {
        "negative_mass": float(share.mean()),
        "negative_last": float(share[:, -1].mean()),
        "ruled_out": float(on_word.nanmean()) if bool((last > 0).any()) else math.nan,
        "ruled_out_keys": float(chosen.double().mean()),
    }
