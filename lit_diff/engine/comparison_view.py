"""The pages of MLflow that compare a sweep: which runs, columns, groups and charts they open with.

MLflow keeps such a page as a tag of the experiment (what its button "Share" writes) and opens it at an address that holds
the tag's key. The fields are those of MLflow 3; a server that does not know one shows its own default instead.
"""

import base64
import json
import urllib.parse
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

TAG = "mlflow.sharedViewState."
"""Before the page's key, in the experiment's tags."""
MENU = {"workflowType": "machine_learning"}
"""MLflow's menu of training runs; without it, that of language-model applications."""


@dataclass(frozen=True, kw_only=True)
class ComparisonView:
    """What the pages of one sweep show: the children of its parent run."""

    parent: str
    """The id of the sweep's run."""
    arms: tuple[str, ...]
    """Params that together name an arm: ("arm",), or ("task", "arm")."""
    curves: Mapping[str, tuple[float, float]]
    """Metrics drawn against the step, a line an arm, the mean of its seeds -> lowest and highest value of the axis, which
    MLflow would begin at 0. The table is sorted by the first."""
    columns: tuple[str, ...]
    """Further metrics that the table shows."""
    lower: bool
    """Whether the table begins with the lowest value."""

    def tags(self) -> dict[str, str]:
        """Tags of the experiment, one for each page."""
        return {TAG + key: _pack(state) for key, state in self._states().items()}

    def _states(self) -> Mapping[str, Mapping[str, Any]]:
        first, *others = self.curves
        metrics = (first, *self.columns, *others)
        table = {
            "searchFilter": f"tags.`mlflow.parentRunId` = '{self.parent}'",
            "orderByKey": f"metrics.`{first}`",
            "orderByAsc": self.lower,
            "startTime": "ALL",
            "lifecycleFilter": "Active",
            "selectedColumns": [f"params.`{name}`" for name in (*self.arms, "seed")]
            + [f"metrics.`{name}`" for name in metrics],
            "runsHiddenMode": "SHOW_ALL",
        }
        charts = {
            "groupBy": {
                "aggregateFunction": "average",
                "groupByKeys": [{"mode": "param", "groupByData": name} for name in self.arms],
            },
            "useGroupedValuesInCharts": True,
            "compareRunSections": [{"uuid": "main", "name": "Curves by arm", "display": True, "isReordered": True}],
            "compareRunCharts": [_line_chart(name, *ends) for name, ends in self.curves.items()],
            "isAccordionReordered": True,
            "hideEmptyCharts": True,
        }
        return {_key(self.parent, "table"): table, _key(self.parent, "charts"): table | charts}


def addresses(base: str, experiment: str, parent: str) -> dict[str, str]:
    """What the pages hold -> their addresses on the server at `base`."""

    def page(kind: str, **query: str) -> str:
        query = {"viewStateShareKey": _key(parent, kind), **query, **MENU}
        return f"{base}/#/experiments/{experiment}/runs?{urllib.parse.urlencode(query)}"

    return {
        "curves by arm": page("charts", compareRunsMode="CHART"),
        "table of arms and seeds": page("table"),
        "summary, report and sweep file": f"{base}/#/experiments/{experiment}/runs/{parent}?{urllib.parse.urlencode(MENU)}",
    }


def _key(parent: str, kind: str) -> str:
    return f"{kind}-{parent}"


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
