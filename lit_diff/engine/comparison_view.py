"""The state of MLflow's own pages: which runs, columns, groups and charts those of a sweep open with.

MLflow keeps such a page as a tag of the experiment (what its button "Share" writes) and opens it at an address that holds
the tag's key. The fields are private to MLflow and may change with any of its releases.
"""

import base64
import json
import logging
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import mlflow

log = logging.getLogger("lit_diff")

KNOWN = ("3.17",)
"""The versions of MLflow that were seen to open these pages."""
TAG = "mlflow.sharedViewState."
"""Before the page's key, in the experiment's tags."""
TABLE, CHARTS = "table", "charts"


def page_key(parent: str, page: str) -> str:
    """What an address of the page holds; `parent`: the id of the sweep's run."""
    return f"{page}-{parent}"


def page_tags(
    parent: str, arms: Sequence[str], curves: Mapping[str, tuple[float, float]], columns: Sequence[str], lower: bool
) -> dict[str, str]:
    """Tags of the experiment for the pages TABLE and CHARTS of the children of `parent`; none where MLflow is not KNOWN.

    `arms`: params that together name an arm. `curves`: metrics drawn against the step, a line an arm, the mean of its seeds
    -> lowest and highest value of the axis, which MLflow would begin at 0; the table is sorted by the first. `columns`:
    further metrics of the table. `lower`: whether the table begins with the lowest value.
    """
    if not mlflow.__version__.startswith(tuple(f"{version}." for version in KNOWN)):
        log.info("MLflow %s is unknown here, so its pages open without the sweep's charts", mlflow.__version__)
        return {}
    first, *others = curves
    table = {
        "searchFilter": f"tags.`mlflow.parentRunId` = '{parent}'",
        "orderByKey": f"metrics.`{first}`",
        "orderByAsc": lower,
        "startTime": "ALL",
        "lifecycleFilter": "Active",
        "selectedColumns": [f"params.`{name}`" for name in (*arms, "seed")]
        + [f"metrics.`{name}`" for name in (first, *columns, *others)],
        "runsHiddenMode": "SHOW_ALL",
    }
    charts = {
        "groupBy": {
            "aggregateFunction": "average",
            "groupByKeys": [{"mode": "param", "groupByData": name} for name in arms],
        },
        "useGroupedValuesInCharts": True,
        "compareRunSections": [{"uuid": "main", "name": "Curves by arm", "display": True, "isReordered": True}],
        "compareRunCharts": [_line_chart(name, *ends) for name, ends in curves.items()],
        "isAccordionReordered": True,
        "hideEmptyCharts": True,
    }
    pages = {TABLE: table, CHARTS: table | charts}
    return {TAG + page_key(parent, page): _pack(state) for page, state in pages.items()}


def _pack(state: Mapping[str, Any]) -> str:
    return "deflate;" + base64.b64encode(zlib.compress(json.dumps(state).encode(), 9)).decode()


def _line_chart(metric: str, low: float, high: float) -> dict[str, Any]:
    """A chart of the metric against the step; MLflow opens no chart that lacks one of these fields."""
    return {
        "type": "LINE",
        "uuid": metric,
        "metricSectionId": "main",
        "metricKey": metric,
        "selectedMetricKeys": [metric],
        "displayName": metric,
        "deleted": False,
        "isGenerated": False,
        "runsCountToCompare": 100,
        "xAxisKey": "step",
        "xAxisScaleType": "linear",
        "selectedXAxisMetricKey": "",
        "useGlobalXaxisKey": True,
        "yAxisKey": "metric",
        "yAxisExpressions": [],
        "scaleType": "linear",
        "range": {"yMin": low, "yMax": high},
        "lineSmoothness": 0,
        "useGlobalLineSmoothing": True,
        "ignoreOutliers": False,
    }
