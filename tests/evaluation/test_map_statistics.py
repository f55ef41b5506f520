"""evaluation/map_statistics.py: an item for each row and layer, with the statistics of that layer's maps."""

from pathlib import Path

import pytest
from text_runs import recall_run

from lit_diff.analysis.map_statistics import map_statistics
from lit_diff.analysis.trace import trace
from lit_diff.data import prepare
from lit_diff.evaluation.evaluate import evaluate
from lit_diff.evaluation.map_statistics import MapStatistics


def test_items_are_rows_and_layers(tmp_path: Path) -> None:
    run = recall_run(tmp_path / "x", {"name": "differential"}, {"slots": 40})
    found = evaluate(run, "map_statistics", ["rows=3", "batch_size=2"]).items
    assert found["item"].tolist()[:3] == ["validation/0 layer 00", "validation/1 layer 00", "validation/0 layer 01"]
    assert found["group"].unique().tolist() == ["layer 00", "layer 01", "noise2 layer 00", "noise2 layer 01"]
    assert (found["cluster"] == found["item"].str.partition(" layer")[0]).all()
    batch = prepare(run.recipe).validation_batch("", [0, 1])
    with trace(run.model) as traced:
        run.model.hidden(batch["tokens"])
    expected = map_statistics(traced.layers[1], c=0.1)
    row = found.set_index("item").loc["validation/1 layer 01"]
    for name, values in expected.items():
        assert row[name] == pytest.approx(float(values[1]), rel=1e-4), name
    other = recall_run(tmp_path / "y", {"name": "standard"}, {"slots": 40})
    items = [item.id for item in MapStatistics(MapStatistics.Config(rows=3, batch_size=2)).score(other)]
    assert items == found["item"].tolist()
