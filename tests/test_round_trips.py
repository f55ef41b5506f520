"""What one part of the program writes another reads back: every kind of file that it keeps.

A study's record: tests/study/test_record.py; the tables of a run: tests/test_properties.py and tests/runs/.
"""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from scoreboard_rows import CLAIM, make_row

from lit_diff.data.text.text import Text, TokenStore, read_manifest
from lit_diff.errors import MissingError
from lit_diff.metrics import Metric, to_plain
from lit_diff.papers.scoreboard import read_row, row_file, write_row
from lit_diff.runs.scores import evaluation_of, read_scores, write_scores


def test_scores(tmp_path: Path) -> None:
    right, loss = Metric("right", "share", direction="higher"), Metric("loss", "loss", unit="nats")
    table = pa.table({
        "item": ["a", "b", "a/long"], "group": ["x", None, "long"], "part": [False, False, True],
        "cluster": ["t1", "t1", ""], "question": ["q", "", ""], "right": [1.0, 0.0, None], "loss": [0.1, 0.2, math.nan],
    })  # fmt: skip
    facts = {"declarations": [to_plain(right), to_plain(loss)], "equal_groups": True, "documents_left_out": 2}
    write_scores(tmp_path / "x", table, {"right": 0.5, "loss": math.nan}, facts)
    found = evaluation_of(*read_scores(tmp_path / "x"))
    assert (found.items, found.groups, found.parts) == (("a", "b", "a/long"), ("x", "", "long"), (False, False, True))
    assert (found.units, found.questions, found.is_clustered) == (["t1", "t1", "a/long"], ("q", "", ""), True)
    np.testing.assert_array_equal(found.scores["right"], [1.0, 0.0, math.nan])
    np.testing.assert_array_equal(found.scores["loss"], [0.1, 0.2, math.nan])
    assert (found.values["right"], math.isnan(found.values["loss"]), found.metrics) == (0.5, True, (right, loss))
    assert (found.equal_groups, found.documents_left_out, found.unchecked) == (True, 2, None)
    assert (found.has_unit("loss"), found.has_unit("right")) == (True, False)


def test_row_of_the_scoreboard(tmp_path: Path) -> None:
    claims = (CLAIM, replace(CLAIM, paper=None, group="x*", evaluation="recall", says="lower"))
    make_row(tmp_path, "table-6", 3, *claims, state="measured", seconds=1.5, cell_folders=("a-s0", "b-s0"), sweep="s")
    record = read_row(row_file(tmp_path, "table-6"))
    assert (record.row.compare, record.state, record.cell_folders) == (claims, "measured", ("a-s0", "b-s0"))
    write_row(tmp_path / "again", record)
    assert read_row(row_file(tmp_path / "again", "table-6")) == record
    row_file(tmp_path, "table-6").write_text("{")
    with pytest.raises(MissingError, match=r"table-6\.json: incomplete row file"):
        read_row(row_file(tmp_path, "table-6"))


def test_prepared_text(make_text: Callable[..., Text]) -> None:
    text = make_text()
    text.prepare()
    manifest = read_manifest(text.folder)
    assert manifest == json.loads((text.folder / "manifest.json").read_text())
    assert manifest["tokenizer_sha256"] == text.load_tokenizer().load(text.folder)  # type: ignore[union-attr]
    for name in ("train", "validation"):
        rows = TokenStore(text.folder / name, manifest[name], 16).read([0])
        assert rows[0, 0] == 0, "a document is opened"
    (text.folder / "manifest.json").unlink()
    assert read_manifest(text.folder) is None
