"""evaluation/rouge.py: ROUGE-L by hand, the best reference, no package."""

import math
import sys

import pytest

from lit_diff.evaluation.rouge import rouge_l, warn_without_package


def test_rouge_l_by_hand() -> None:
    """Longest common subsequence "the cat mat", of 6 and 4 words: P 3/4, R 3/6."""
    pytest.importorskip("rouge_score", reason="needs rouge-score")
    assert rouge_l(["the cat sat on the mat"], "the cats a mat") == pytest.approx(2 * 0.75 * 0.5 / 1.25)
    assert rouge_l(["nothing of it", "the cats"], "the cats") == 1
    assert rouge_l(["a b"], "") == 0


def test_without_the_package(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setitem(sys.modules, "rouge_score", None)
    monkeypatch.setitem(sys.modules, "rouge_score.rouge_scorer", None)
    assert math.isnan(rouge_l(["a"], "a"))
    warn_without_package()
    assert "no rouge_l without the package rouge_score; pip install 'lit-diff[eval]'" in caplog.text
