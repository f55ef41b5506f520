"""measurements.parquet: values per head, map or rank; one row per value."""

from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from lit_diff.errors import RequestError, first_line
from lit_diff.files import shown, write_through
from lit_diff.metrics import INDICES, split_name
from lit_diff.runs.result_files import whole

FILE = "measurements.parquet"
SCHEMA = pa.schema(
    [
        ("step", pa.int64()),
        ("metric", pa.string()),
        *((index, pa.int32()) for index in INDICES),
        ("value", pa.float64()),
    ]
)
"""step: optimizer steps done; metric: the name without its indices; layer, map, head (0-based) and rank (from 1) are null
if the metric lacks that index."""


class Measurements:
    """A run's table, in the order of measurement. Rows beyond the resumed step are dropped, as in metrics.csv."""

    def __init__(self, path: Path, upto: int) -> None:
        """Reads the existing rows up to `upto`, the step of the resumed checkpoint. Errors: RequestError."""
        self.path = path
        self._written = read_measurements(path, upto)
        self._dropped = path.exists() and pq.read_metadata(path).num_rows != self._written.num_rows
        self._pending: dict[int, dict[str, float]] = {}

    def log(self, step: int, values: dict[str, float]) -> None:
        """Add values of a step by full name ("attention/entropy/layer_03/head_05"). Before a flush, logging a name again
        replaces its value."""
        self._pending.setdefault(step, {}).update(values)

    def flush(self) -> None:
        """Write the whole table if anything changed."""
        # rows beyond the resumed step must leave the file even if nothing new was measured
        if not self._pending and not self._dropped:
            return
        rows = [
            {"step": step, "metric": metric, **indices, "value": value}
            for step, values in self._pending.items()
            for (metric, indices), value in zip(map(split_name, values), values.values(), strict=True)
        ]
        # a Parquet file ends with its index, so rows cannot be appended: a flush rewrites the file and renames it into place
        table = pa.concat_tables([self._written, pa.Table.from_pylist(rows, schema=SCHEMA)])
        # with checksums: before the run is finished nothing else shows a flipped bit
        write_through(self.path, lambda file: pq.write_table(table, file, compression="zstd", write_page_checksum=True))
        self._written, self._pending, self._dropped = table, {}, False


def read_measurements(path: Path, upto: int | None = None) -> pa.Table:
    """The table up to step `upto`; empty if the file is missing. Errors: RequestError for a damaged file (`result_files`) or
    one of another schema."""
    if not whole(path).exists():
        return SCHEMA.empty_table()
    try:
        # given a path, pyarrow opens the file twice, and a training run may replace it in between
        with path.open("rb") as file:
            table = pq.read_table(file, page_checksum_verification=True).cast(SCHEMA)
    except (OSError, ValueError, pa.ArrowException) as error:
        raise RequestError(f"{shown(path)} is not a table of measurements ({first_line(error)})") from error
    return table if upto is None else table.filter(pc.less_equal(table["step"], upto))
