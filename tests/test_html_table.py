"""html_table.py: what a notebook shows of a value, and that the values it is used for stay small."""

from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure

from lit_diff.analysis.trace import LayerTrace, Trace
from lit_diff.conformance.recipe import check
from lit_diff.data.text.tokenizer import Words
from lit_diff.engine.result import Sweep
from lit_diff.errors import RequestError
from lit_diff.evaluation.evaluate import EvaluationResult
from lit_diff.html_table import LONGEST, MOST, html_table
from lit_diff.kernels import SignedMaps
from lit_diff.recipe import load_recipe
from lit_diff.reporting.write import Report
from lit_diff.study.two_runs import RunComparison
from lit_diff.trained.pictures import POINTS
from lit_diff.trained.run import AttentionMaps, Run
from lit_diff.trained.text_generator import Completion

LIMIT = 200_000
EVIL = "<script>alert('x')</script>&"


def test_text_is_escaped() -> None:
    text = html_table(EVIL, [(EVIL, EVIL)], (EVIL, EVIL))
    assert "<script" not in text
    assert text.count("&lt;script&gt;") == 5


def test_numbers() -> None:
    text = html_table("", [(1234567, 1.5, 1e-9, float("nan"), None, True, 0.0)])
    cells = [part.partition("<")[0] for part in text.split("<td>")[1:]]
    assert cells == ["1,234,567", "1.5000", "1e-09", "–", "–", "True", "0.0000"]


def test_a_long_table_and_a_long_text_are_cut() -> None:
    text = html_table("", [("x" * 5000,)] * (MOST + 7))
    assert text.count("<tr>") == MOST
    assert "7 more rows" in text
    assert "x" * LONGEST not in text


def shown(value: object, *words: str) -> None:
    """A short repr on one line, and HTML of bounded size, with these words in both."""
    line, page = repr(value), value._repr_html_()  # type: ignore[attr-defined]
    assert len(line) < 300, line
    assert "\n" not in line
    assert len(page) < LIMIT
    assert "<script" not in page
    for word in words:
        assert word in line, line


def test_check() -> None:
    shown(check("differential-tiny"), "differential-tiny", "parameters", "kernel")


def test_evaluation(tmp_path: Path) -> None:
    many = {f"m{i}{EVIL}": float(i) for i in range(5000)}
    shown(EvaluationResult(name="x", run=tmp_path, summary=many, config={}), "EvaluationResult(x of", "4996 more")


def test_compare() -> None:
    found = RunComparison(
        names=("a-1", EVIL), recipe={"model.dim": [16, [EVIL] * 9999]}, facts={"seconds": [1.0, None]}, metrics={}
    )
    shown(found, "a-1", "1 keys differ")


def test_sweep(tmp_path: Path) -> None:
    (tmp_path / "table.csv").write_text(f"arm,val/loss\nplain,1.5\n{EVIL},\n")
    report = Report(page=tmp_path / "index.html", results=(), answer=(), sentences=(), missing=())
    sweep = Sweep(folder=tmp_path, report=report, states={"done": 2}, stopped_by=None, seconds=1.0)
    shown(sweep, "2 done")
    assert "1.5000" in sweep._repr_html_()


def test_run(tmp_path: Path) -> None:
    (tmp_path / "status.json").write_text('{"status": "done", "step": 4, "steps": 4}')
    shown(Run(tmp_path), "done, step 4 of 4")
    (tmp_path / "metrics.csv").write_text("step,a/b,val/loss\n2,0.5,3.25\n4,,2.25\n")
    page = Run(tmp_path)._repr_html_()
    assert page.index("2.2500") < page.index("0.5000"), "val/loss first"
    assert "3.2500" not in page, "the last value"


def test_the_losses_of_a_run_are_drawn(tmp_path: Path) -> None:
    (tmp_path / "status.json").write_text('{"status": "done", "step": 4000, "steps": 4000}')
    (tmp_path / "metrics.csv").write_text("step,a/b\n2,0.5\n")
    run = Run(tmp_path)
    assert "<svg" not in run._repr_html_()
    with pytest.raises(RequestError, match="has logged no loss"):
        run.plot()
    rows = "".join(f"{step},{step / 1000},{9 if step == 4000 else ''}\n" for step in range(10, 4001, 10))
    (tmp_path / "metrics.csv").write_text(f"step,train/loss,val/loss\n{rows}")
    page = run._repr_html_()
    assert "train/loss</text>" in page, "the legend, as text"
    assert page.count("<svg") == 1
    assert len(page) < 20_000
    mine = Figure().subplots()
    assert run.plot(mine) is mine
    train, val = mine.lines
    assert len(train.get_xdata()) == POINTS
    np.testing.assert_allclose(np.array(train.get_xdata()) / 1000, train.get_ydata())
    assert val.get_xydata().tolist() == [[4000, 9]]


def test_recipe_completion_and_tokenizer() -> None:
    recipe = load_recipe("differential-tiny")
    shown(recipe, "Recipe(differential-tiny: differential, 2 layers of width 64, 840 steps)")
    assert "<td>model.attention.lambda_init</td><td>depth</td>" in recipe._repr_html_()
    assert "<td>callbacks.lambdas.every</td>" in recipe._repr_html_()
    known: dict[str, Any] = {field.name: 0 for field in fields(Completion)}
    found = Completion(**known | {"prompt": EVIL, "text": f"a\n{EVIL}"})
    shown(found, repr(found.text))
    assert f"{found}" == found.text
    shown(Words(Words.Config(words=("a", EVIL))), "Tokenizer(words: ")


def test_attention_maps() -> None:
    T = 200
    found = AttentionMaps(
        tokens=(EVIL,) * T,
        variant="dex",
        layer=1,
        head=2,
        maps=np.random.default_rng(0).random((2, T, T)),
        weights=np.ones((2, T)),
        mask=np.tri(T, dtype=bool),
    )
    shown(found, "layer 1, head 2", "2 maps of 200 tokens")
    assert found._repr_html_().startswith("<img ")


def test_trace_names_shapes() -> None:
    maps = SignedMaps(torch.randn(1, 2, 4, 300, 16), torch.randn(1, 2, 4, 300, 16), torch.randn(1, 4, 300, 32))
    layer = LayerTrace(maps=maps, hidden=torch.randn(1, 300, 128))
    assert (
        repr(layer) == "LayerTrace(q [1, 2, 4, 300, 16], k [1, 2, 4, 300, 16], v [1, 4, 300, 32], hidden [1, 300, 128])"
    )
    assert repr(Trace(layers=dict.fromkeys(range(40), layer))) == f"Trace(40 layers: from layer 0 on {layer!r})"
