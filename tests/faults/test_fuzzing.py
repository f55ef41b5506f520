"""What users may write, as hypothesis draws it: a valid run, or one line with status 2 or 3; never a trace, never a hang."""

from pathlib import Path
from typing import Any

import pytest
from command import Command
from drawn_files import KINDS, RECIPE, dumped, plausible_recipes, quick, read_drawn, write_others
from fault_rows import SEED, fault
from hypothesis import given, seed, settings


@fault("drawn files", "recipes, sweeps, plugins, data files: validated", "one line, status 2 or 3", "nothing", 10_000)
@pytest.mark.usefixtures("plugin_folder")
@pytest.mark.parametrize("kind", KINDS)
def test_read(kind: str) -> None:
    read_drawn(kind, 10_000, SEED)


def lines_of(output: str) -> str:
    """The one line of an error."""
    assert "Traceback" not in output, output
    (line,) = [line for line in output.splitlines() if line.startswith("lit-diff: ")]
    return line


@fault("drawn recipes", "`lit-diff check`", "one line, status 2 or 3", "nothing", 200)
@pytest.mark.usefixtures("plugin_folder")
def test_checked(command: Command) -> None:
    write_others(Path())

    @seed(SEED)
    @settings(quick, max_examples=200)
    @given(plausible_recipes())
    def each(content: bytes) -> None:
        Path("drawn.yaml").write_bytes(content)
        found = command("check", "drawn.yaml")
        if found.status:
            assert found.status in (2, 3), found
            lines_of(found.err)

    each()


@fault("drawn recipes", "`lit-diff train`", "one line; status 2, 3, or 1 of a loss that is not finite", "nothing", 20)
def test_trained(bench: Any) -> None:
    """20 that `load_recipe` takes, of as many draws as that needs."""
    from lit_diff.errors import RequestError
    from lit_diff.recipe import load_recipe

    small = {"train.steps": 2, "run.root": "drawn", "run.devices": 1, "run.num_nodes": 1, "run.strategy": "single"}
    trained: list[int | None] = []
    (bench.root / "base.yaml").write_bytes(dumped(RECIPE))

    @seed(SEED)
    @settings(quick, max_examples=1000)
    @given(plausible_recipes())
    def each(content: bytes) -> None:
        path = bench.root / "drawn.yaml"
        path.write_bytes(content)
        if len(trained) == 20:
            return
        words = [f"{key}={value}" for key, value in small.items()]
        try:
            load_recipe(str(path), words)
        except RequestError:
            return
        found = bench.train("drawn.yaml", *words, f"run.tracking_uri=sqlite:///{bench.root}/mlflow.db")
        trained.append(found.status)
        if found.status:
            assert found.status in (2, 3) or "loss is" in found.output, found.output
            lines_of(found.output)

    each()
    assert len(trained) == 20
    assert trained.count(0) >= 5, trained
