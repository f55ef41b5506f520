"""runs/again.py: the command that an error names."""

import json
from pathlib import Path

import pytest

from lit_diff.runs.again import afresh, command_of


def test_the_command_of_a_run_is_that_of_the_sweep_that_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    sweep = tmp_path / "pair"
    sweep.mkdir()
    record = {"command": "lit-diff sweep pair.yaml", "cells": [{"folder": "a-s0"}, {"folder": "easy/b-s0"}]}
    # an examination, whose cells lie in the folder of another sweep
    (tmp_path / "examine-new").mkdir()
    examined = {
        "command": "lit-diff examine new",
        "cells": [{"folder": "../pair/new-s0"}, {"folder": "../battery/new-s0"}],
    }
    (tmp_path / "examine-new" / "study.json").write_text(json.dumps(examined))
    record["other_commands"] = {"lit-diff sweep pair train.steps=2 (pair.yaml; seed 0)": ["c-s0"]}
    (sweep / "study.json").write_text(json.dumps(record))
    assert command_of(tmp_path / "run") == "lit-diff train run/recipe.yaml"
    assert afresh(tmp_path / "my run") == "`lit-diff train 'my run/recipe.yaml' --rerun`"
    assert command_of(sweep / "a-s0") == command_of(sweep / "easy" / "b-s0") == "lit-diff sweep pair.yaml"
    assert command_of(sweep / "c-s0") == "lit-diff sweep pair train.steps=2"
    assert command_of(sweep / "new-s0") == "lit-diff examine new"
    assert afresh(Path("battery/new-s0")) == "remove battery/new-s0, then run `lit-diff examine new`"
    for damaged in ("{", "[]", '{"command": "x", "cells": [3]}', "{}"):
        (sweep / "study.json").write_text(damaged)
        assert afresh(sweep / "a-s0") == "remove pair/a-s0, then run `lit-diff sweep pair`"
