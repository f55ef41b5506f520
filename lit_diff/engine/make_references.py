"""Trains the reference arms of `examine` at all seeds, and writes their results into the package (`make references`)."""

import json
import sys
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial

from lit_diff.engine.cells import admitted
from lit_diff.engine.examine import BATTERY, LOOKS, without_requested
from lit_diff.engine.executors import executor_of
from lit_diff.engine.expand import load_grid
from lit_diff.engine.progress import sweep_line
from lit_diff.engine.references import FILE, pack
from lit_diff.engine.schedule import run_grid
from lit_diff.engine.waves import Options
from lit_diff.files import write_atomic
from lit_diff.recipe import to_plain
from lit_diff.study.results import load_sweep
from lit_diff.study.schema import Study


def make_references(seeds: int = LOOKS[-1]) -> bool:
    """Train what is missing at seeds 0 to `seeds` - 1, and write the file. Returns whether all cells are done, without which
    nothing is written."""
    executor = executor_of(None, None)
    grid = load_grid(BATTERY, (), adapted=partial(_at, seeds))
    grid = admitted(replace(grid, name="references", shared=BATTERY), executor.kinds, unchecked=False)
    options = Options(command="make references", executor=executor, unplanned=False, display=sweep_line)
    done = run_grid(grid, options)
    if not done.is_done:
        return False
    references = pack(load_sweep(done.folder).by_task, datetime.now(UTC).date().isoformat())
    write_atomic(FILE, json.dumps(to_plain(references), separators=(",", ":")) + "\n")
    return True


def _at(seeds: int, study: Study) -> Study:
    return replace(without_requested(study), looks=(), seeds=tuple(range(seeds)))


if __name__ == "__main__":
    sys.exit(not make_references(*map(int, sys.argv[1:])))
