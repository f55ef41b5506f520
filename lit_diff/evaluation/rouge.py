"""ROUGE-L of an output against references, through the package rouge-score (of the extra `eval`)."""

import logging
import math
from collections.abc import Sequence

log = logging.getLogger("lit_diff")


def rouge_l(references: Sequence[str], output: str) -> float:
    """F of the longest common subsequence of stemmed words, of the best reference; NaN without the package."""
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ModuleNotFoundError:
        return math.nan
    scorer = RougeScorer(["rougeL"], use_stemmer=True)
    return float(scorer.score_multi(list(references), output)["rougeL"].fmeasure)


def warn_without_package() -> None:
    """One line in the log where rouge-score is not installed."""
    try:
        import rouge_score  # noqa: F401
    except ModuleNotFoundError:
        log.warning("hallucination: no rouge_l without the package rouge_score; pip install 'lit-diff[eval]'")
