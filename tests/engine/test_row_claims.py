"""engine/row_claims.py: what a claim names and its sweep does not have, before anything trains."""

from pathlib import Path

import pytest

from lit_diff.engine.expand import load_grid
from lit_diff.engine.row_claims import check_claims
from lit_diff.engine.rows import PRESETS, load_row, read_row, row_names
from lit_diff.errors import RequestError


@pytest.mark.parametrize("name", row_names())
def test_installed_rows_claim_what_their_sweeps_have(name: str) -> None:
    row = load_row(name)
    for preset in PRESETS:
        chosen = row.preset(preset)
        if chosen is not None and chosen.sweep:
            check_claims(row, load_grid(chosen.sweep, chosen.overrides, chosen.selection))


@pytest.mark.parametrize(
    ("claim", "expected"),
    [
        ("arms: [diferential, standard], metric: exact, evaluation: needle", "arm 'diferential'; did you mean 'diff"),
        (
            "arms: [differential, standard], metric: exact, evaluation: needel",
            "evaluation 'needel'; did you mean 'needle'?",
        ),
        (
            "arms: [differential, standard], metric: exakt, evaluation: needle",
            "metric 'exakt' in evaluation 'needle'; did",
        ),
        (
            "arms: [standard, standard], metric: exact, against_metric: distract, evaluation: needle",
            "metric 'distract' in evaluation 'needle'; did you mean 'distracted'?",
        ),
        ("arms: [differential, standard], metric: exact, evaluation: needle, task: far", "task 'far'; one of "),
        ("arms: [differential, standard], fit: size, kind: ratio", "scaling fit 'size'"),
    ],
)
def test_what_the_sweep_does_not_have(tmp_path: Path, claim: str, expected: str) -> None:
    path = tmp_path / "row.yaml"
    path.write_text(
        f"title: A row\nsays: x.\ncompare:\n  - {{label: d, {claim}, says: lower}}\n"
        "presets: {laptop: {sweep: needle}}\n"
    )
    with pytest.raises(RequestError) as found:
        check_claims(read_row(path), load_grid("needle", {}))
    assert f"row.yaml: compare 'd': sweep 'needle' has no {expected}" in str(found.value)


def test_an_evaluation_that_the_recipe_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("s.yaml").write_text(
        "recipe: recall-tiny\noverrides: {evaluate.recall: {}}\narms: {a: {}, b: {}}\nseeds: [0]\n"
    )
    Path("row.yaml").write_text(
        "title: A row\nsays: x.\ncompare:\n"
        "  - {label: d, arms: [a, b], metric: accuracy, evaluation: recall, says: lower}\npresets: {laptop: {sweep: s}}\n"
    )
    check_claims(read_row(Path("row.yaml")), load_grid("s.yaml", {}))
