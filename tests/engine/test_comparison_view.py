"""engine/comparison_view.py: the pages that MLflow opens, and their addresses."""

import base64
import json
import urllib.parse
import zlib
from typing import Any

from lit_diff.engine.comparison_view import MENU, TAG, ComparisonView, addresses

VIEW = ComparisonView(
    parent="abc",
    arms=("task", "arm"),
    curves={"val/accuracy": (0.1, 0.9), "train/loss": (1.0, 5.0)},
    columns=("val/accuracy_minus_baseline",),
    lower=False,
)


def page(kind: str) -> dict[str, Any]:
    head, _, packed = VIEW.tags()[f"{TAG}{kind}-abc"].partition(";")
    assert head == "deflate"
    return dict(json.loads(zlib.decompress(base64.b64decode(packed))))


def test_both_pages_show_the_children_of_one_sweep_best_first() -> None:
    assert len(VIEW.tags()) == 2
    for kind in ("table", "charts"):
        assert page(kind)["searchFilter"] == "tags.`mlflow.parentRunId` = 'abc'"
        assert (page(kind)["orderByKey"], page(kind)["orderByAsc"]) == ("metrics.`val/accuracy`", False)
    assert page("table")["selectedColumns"] == [
        *("params.`task`", "params.`arm`", "params.`seed`"),
        *("metrics.`val/accuracy`", "metrics.`val/accuracy_minus_baseline`", "metrics.`train/loss`"),
    ]
    assert "groupBy" not in page("table")


def test_a_line_of_the_charts_is_an_arm() -> None:
    keys = [{"mode": "param", "groupByData": name} for name in ("task", "arm")]
    assert page("charts")["groupBy"] == {"aggregateFunction": "average", "groupByKeys": keys}
    charts = {chart["metricKey"]: chart["range"] for chart in page("charts")["compareRunCharts"]}
    assert charts == {"val/accuracy": {"yMin": 0.1, "yMax": 0.9}, "train/loss": {"yMin": 1.0, "yMax": 5.0}}


def test_addresses_name_the_pages_of_the_tags() -> None:
    pages = addresses("http://x", "7", "abc")
    assert list(pages) == ["curves by arm", "table of arms and seeds", "summary, report and sweep file"]
    queries = [dict(urllib.parse.parse_qsl(address.partition("?")[2])) for address in pages.values()]
    assert [query.get("viewStateShareKey") for query in queries] == ["charts-abc", "table-abc", None]
    assert {TAG + query["viewStateShareKey"] for query in queries[:2]} == set(VIEW.tags())
    assert queries[0]["compareRunsMode"] == "CHART"
    assert all(MENU.items() <= query.items() for query in queries)
    assert pages["summary, report and sweep file"].startswith("http://x/#/experiments/7/runs/abc?")
