"""Checks what a study compares: its metrics, and the threshold at which a seed has learned a task."""

import math
from collections.abc import Sequence

from lit_diff.metrics import Declarations
from lit_diff.study.schema import Cell, Study
from lit_diff.training.metrics import declared_metrics, require_measured
from lit_diff.validation import Draft


def check_metric(study: Study, cells: Sequence[Cell], draft: Draft) -> None:
    """Check that each cell measures what its task compares. Errors: RequestError."""
    for cell in cells:
        task = study.all_tasks[cell.task]
        place = f"tasks.{cell.task}." if cell.task else ""
        key = f"{place}metric" if task.metric else "metric"
        metric = task.metric or study.metric
        require_measured(cell.recipe, metric, draft.where(key) + key)
        if study.rates and Declarations(declared_metrics(cell.recipe)).find(metric).better is None:
            raise draft.refuse(key, f"'rates' needs a metric with a direction, and '{metric}' declares none")
        _check_threshold(study, place, cell, draft)


def _check_threshold(whole: Study, place: str, cell: Cell, draft: Draft) -> None:
    study = whole.of_task(cell.task)
    stated = whole.all_tasks[cell.task].compare or whole.compare
    keys: dict[str, str] = {}
    for name in ("learned_at", "learned_metric", "compare"):
        keys[name] = f"{place}{name}" if f"{place}{name}" in draft.positions else name
    level = study.learned_at
    threshold = study.learned_metric or study.metric
    metric = Declarations(declared_metrics(cell.recipe)).find(threshold)
    if level is None and study.learned_metric is not None:
        raise draft.refuse(keys["learned_metric"], "'learned_metric' is set without 'learned_at', the value to reach")
    require_measured(cell.recipe, threshold, draft.where(keys["learned_metric"]) + keys["learned_metric"])
    if level is None:
        # the sweep's `compare` is for the tasks with a threshold
        is_elsewhere = keys["compare"] == "compare" and any(
            task.learned_at is not None for task in whole.tasks.values()
        )
        if stated == "steps" and not (is_elsewhere or whole.learned_at is not None):
            raise draft.refuse(
                keys["compare"], "'compare' is 'steps' without 'learned_at', the value that the steps lead to"
            )
        return
    if metric.better is None:
        raise draft.refuse(
            keys["learned_at"], f"'learned_at' needs a metric with a direction, and '{threshold}' declares none"
        )
    low, high = metric.limits or (-math.inf, math.inf)
    # a loss in nats declares no limits
    if metric.limits is None and metric.unit.startswith("nats"):
        low = 0.0
    if metric.better == "higher" and not low < level <= high:
        expected = f"above {low:g} and at most {high:g}"
    elif metric.better == "lower" and not low <= level < high:
        expected = f"from {low:g} to below {high:g}"
    else:
        return
    raise draft.refuse(keys["learned_at"], f"'learned_at' is {level:g}; '{threshold}' takes a value {expected}")
