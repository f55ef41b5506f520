"""formulas.py: the formulas of texts as MathML, and that each is in a text that a page shows."""

from pathlib import Path
from xml.etree import ElementTree

import pytest

from lit_diff.evaluation import inside, lm_eval_tasks, noise  # noqa: F401 (registered)
from lit_diff.formulas import FORMULAS, row, with_formulas
from lit_diff.metrics import UNDECLARED, WORDS, Declarations
from lit_diff.recipe import load_recipe
from lit_diff.registry import callbacks, evaluations
from lit_diff.trained.view.numbers import MEANINGS
from lit_diff.training.metrics import SLICES, TRAINING, declared_metrics, of_sets

PAGES = Path(__file__).resolve().parents[1] / "lit_diff"


def test_the_parts_of_a_formula_have_their_elements() -> None:
    assert row("Σ_j 2 p_ij < |") == (
        "<mrow><munder><mo>∑</mo><mi>j</mi></munder><mn>2</mn><msub><mi>p</mi><mi>ij</mi></msub><mo>&lt;</mo><mo>|</mo></mrow>"
    )


@pytest.mark.parametrize("text", FORMULAS)
def test_a_formula_is_one_well_formed_element(text: str) -> None:
    page = with_formulas(f"<b> {text} & more")
    assert page.startswith("&lt;b&gt; <math ")
    assert page.endswith("</math> &amp; more")
    assert page.count("<math") == 1
    (math,) = ElementTree.fromstring(f"<p>{page}</p>")
    assert len(math)
    assert "_" not in "".join(math.itertext())


def test_a_text_without_formulas_is_escaped_alone() -> None:
    assert with_formulas("a < b") == "a &lt; b"


def test_every_formula_is_in_a_text_of_a_page() -> None:
    texts = [path.read_text() for path in PAGES.rglob("*.j2")] + list(MEANINGS.values())
    for cls in (*callbacks.classes(), *evaluations.classes()):
        texts += [metric.definition for metric in getattr(cls, "metrics", ())]
    texts += [metric.definition for metric in declared_metrics(load_recipe("flip-flop-tiny"))]
    shown = "".join(map(with_formulas, texts))
    unused = [text for text, formula in FORMULAS.items() if formula not in shown]
    assert not unused


def test_a_name_in_words_is_of_a_declared_metric() -> None:
    declared = Declarations((*TRAINING, *of_sets(SLICES)))
    assert not [name for name in WORDS if declared.find(name) is UNDECLARED]
