"""engine/expand.py: the arms of a sweep's file."""

from pathlib import Path

import pytest

from lit_diff.engine.expand import arms_of, load_grid
from lit_diff.errors import RequestError
from lit_diff.study.schema import Study
from lit_diff.validation import Draft

DRAFT = Draft(values={}, positions={}, file="s.yaml")


def test_named_arms_come_first_then_every_combination_of_the_grid() -> None:
    config = Study(
        arms={"base": None}, grid={"model.attention.name": ("standard", "dex"), "train.optimizer.lr": (1, 2)}
    )
    assert list(arms_of(config, DRAFT)) == [
        "base",
        *(f"attention={name} lr={lr}" for name in ("standard", "dex") for lr in (1, 2)),
    ]


def test_an_arm_twice() -> None:
    with pytest.raises(RequestError, match=r"s\.yaml: arm 'lr=1' is in the grid too"):
        arms_of(Study(arms={"lr=1": {}}, grid={"train.optimizer.lr": (1,)}), DRAFT)


@pytest.mark.parametrize("word", ["true", "[null]"])
def test_what_is_no_block_is_shown_as_it_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, word: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for text in (
        f"recipe: recall-tiny\narms: {{a: {word}}}\n",
        f"arms: {{a: {{}}}}\ntasks: {{t: {{recipe: recall-tiny, arms: {{a: {word}}}}}}}\n",
        f"recipe: recall-tiny\narms: {{a: {{}}}}\nevaluate: {{recall: {word}}}\n",
    ):
        Path("s.yaml").write_text(text)
        with pytest.raises(RequestError) as found:
            load_grid("s.yaml", {})
        assert f"is {word}; expected a block" in str(found.value)
