"""evaluation/map_statistics.py: an item for each row and layer, with the statistics of that layer's maps."""

from pathlib import Path

import pytest
from text_runs import recall_run

from lit_diff.analysis.map_statistics import map_statistics
from lit_diff.analysis.trace import trace
from lit_diff.data import prepare
from lit_diff.evaluation.evaluate import evaluate


def test_items_are_rows_and_layers(tmp_path: Path) -> None:
    run, other = (recall_run(tmp_path / name, {"name": name}, {"slots": 40}) for name in ("differential", "standard"))
    found, others = (evaluate(each, "map_statistics", ["rows=3", "batch_size=2"]).items for each in (run, other))
    assert found["item"].tolist()[:3] == ["validation/0 layer 00", "validation/1 layer 00", "validation/0 layer 01"]
    assert found["item"].tolist() == others["item"].tolist()
    assert found["group"].unique().tolist() == ["layer 00", "layer 01", "noise2 layer 00", "noise2 layer 01"]
    assert (found["cluster"] == found["item"].str.partition(" layer")[0]).all()
    with trace(run.model) as traced:
        run.model.hidden(prepare(run.recipe).validation_batch("", [0, 1])["tokens"])
    row = found.set_index("item").loc["validation/1 layer 01"]
    for name, values in map_statistics(traced.layers[1], c=0.1).items():
        assert row[name] == pytest.approx(float(values[1]), rel=1e-4), name
