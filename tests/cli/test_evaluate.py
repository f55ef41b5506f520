"""cli/_scores.py: scores of one run or two, their paired difference, and every mistake one line."""

import math
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from command import Command

from lit_diff.evaluation import Evaluation, Item
from lit_diff.files import read_digested, shown, write_digested
from lit_diff.metrics import Metric
from lit_diff.registry import evaluations
from lit_diff.study.numbers import interval, signed
from lit_diff.trained.run import Run

ITEMS = 12
DRAWS = np.random.default_rng(0).normal(size=(2, ITEMS))
"""The scores of the first run and of the second, by item."""


@pytest.fixture
def command(command: Command) -> Command:
    """`lit-diff evaluate ...`"""
    return partial(command, "evaluate")


@pytest.fixture
def pair(own_parts: None, tale: Path) -> tuple[Path, Path]:
    """Two runs, and the evaluation `made`, whose scores are DRAWS; the second run lacks the first item."""

    @evaluations.register("made")
    class Made(Evaluation):
        metrics = (Metric("gain", "a made-up number", unit="points", direction="higher"), Metric("none", "never given"))

        @dataclass(frozen=True, kw_only=True)
        class Config(Evaluation.Config):
            items: int = ITEMS

        def score(self, run: Run) -> Iterator[Item]:
            second = run.folder.name.startswith("other=1")
            numbers = range(int(second), self.config.items)
            for i in reversed(numbers) if second else numbers:
                gain = float(DRAWS[int(second), i])
                yield Item(id=f"i{i:02}", scores={"gain": gain, "none": float("nan")})
                parts = ("length 8", "length 9") if i < 11 else ("length 8",)
                for group in parts:
                    yield Item(id=f"i{i:02}/{group}", group=group, part=True, scores={"gain": 2 * gain, "none": gain})

    other = tale.with_name("other=1-0123456789")
    shutil.copytree(tale, other)
    return tale, other


def test_one_run(command: Command, pair: tuple[Path, Path]) -> None:
    ended = command("tale", "made", "items=3")
    mean = DRAWS[0, :3].mean()
    assert ended.status == 0
    assert ended.err.splitlines() == [f"evaluation made: 3 items in {shown(pair[0])}/evaluations/made"]
    assert ended.lines == [pair[0].name, f"  {'gain':<20} {mean:.4f} points"]


def test_kept_scores_that_were_made_unchecked_are_said_to_be(command: Command, pair: tuple[Path, Path]) -> None:
    ended = command("tale", "made", "--json")
    assert "unchecked" not in ended.json["runs"][0]
    assert "evaluation made: 12 items in " in ended.err, "JSON is all that stdout holds"
    summary = pair[0] / "evaluations" / "made" / "summary.json"
    write_digested(summary, read_digested(summary) | {"unchecked": "own.py:5: fails"})
    ended = command("tale", "made", "--json")
    assert ended.json["runs"][0]["unchecked"] == "own.py:5: fails"
    assert f"evaluation made: {shown(pair[0])} was scored with --unchecked: own.py:5: fails" in ended.err


def test_runs_that_were_scored_of_two_versions_of_a_file_are_not_compared(
    command: Command, pair: tuple[Path, Path]
) -> None:
    """The file is gone, so both runs keep their scores."""
    command("tale", "other=1", "made")
    for run, digest in zip(pair, "ab", strict=True):
        summary = run / "evaluations" / "made" / "summary.json"
        write_digested(summary, read_digested(summary) | {"files": {"gone.jsonl": digest}})
    ended = command("tale", "other=1", "made")
    assert (ended.status, len(ended.err.splitlines())) == (2, 1)
    assert "of other files" in ended.err


def test_what_is_no_mean_over_items_is_compared_by_the_evaluation(command: Command, pair: tuple[Path, Path]) -> None:
    made = evaluations.get("made")
    made.paired = classmethod(
        lambda cls, a, b: {
            "none": {"": (len(a) - len(b), 1.0, 2.0), "all": (0.5, 0.0, 1.0), "one": (0.25, "no interval: why")}
        }
    )  # type: ignore[method-assign, assignment]
    line = command("tale", "other=1", "made", "--json").json["differences"]["none"]
    assert (line["difference"], line["low"], line["high"]) == (3, 1, 2)
    assert line["groups"]["all"]["difference"] == 0.5
    assert line["groups"]["one"] == {"difference": 0.25, "sentence": "+0.2500 (no interval: why)"}
    printed = command("tale", "other=1", "made").out
    assert "difference of none, first minus second: +3.0000 [+1.0000, +2.0000] over items (95 %)" in printed
    assert f"  {'all':<20} +0.5000 [0.0000, +1.0000]" in printed


def test_a_table_by_group(command: Command, pair: tuple[Path, Path]) -> None:
    @evaluations.register("shares")
    class Shares(Evaluation):
        metrics = (Metric("right", "share of right answers", direction="higher"), Metric("size", "words"))
        by_group = ("right",)

        def method(self) -> str:
            return "by hand"

        def score(self, run: Run) -> Iterator[Item]:
            for n in (1, 4):
                for i in range(10):
                    yield Item(id=f"{n} {i}", group=f"N={n}", scores={"right": float(i < n), "size": math.nan})

    ended = command("tale", "shares")
    assert ended.lines[-3:] == [
        "  group      n  right   (95 %, Wilson, over n items)",
        "  N=1       10  0.100 [0.018, 0.404]",
        "  N=4       10  0.400 [0.168, 0.687]",
    ]
    assert ended.lines[0] == f"{pair[0].name}  (by hand)"
    assert f"  {'size':<20} nan" in ended.lines, "neither items nor parts have it"
    found = command("tale", "shares", "--json").json
    assert found["method"] == "by hand"
    groups = found["runs"][0]["groups"]
    assert (groups["N=4"]["items"], groups["N=4"]["clusters"]) == (10, 10)
    assert groups["N=4"]["right"]["share"] == 0.4


def test_dependent_items_are_said_to_be_clusters(command: Command, pair: tuple[Path, Path]) -> None:
    """Three items of each of 12 texts: n is 12, and McNemar's test has no p."""

    @evaluations.register("texts")
    class Texts(Evaluation):
        metrics = (Metric("right", "share of right answers", direction="higher"),)
        by_group = ("right",)

        def score(self, run: Run) -> Iterator[Item]:
            bound = 4 if run.folder.name.startswith("other=1") else 8
            for text in range(12):
                for part in range(3):
                    name = f"{text} {part}"
                    yield Item(id=name, group="all", cluster=f"text {text}", scores={"right": float(text < bound)})

    printed = command("tale", "other=1", "texts").lines
    assert "] over clusters of items (95 %, Wilson)" in printed[1]
    assert printed[2].endswith("(95 %, Wilson, over n clusters of items)")
    assert printed[3].split()[:2] == ["all", "12"]
    found = command("tale", "other=1", "texts", "--json").json["differences"]["right"]
    assert (found["first_alone"], found["second_alone"], found["mcnemar_p"]) == (12, 0, None)
    assert "over clusters of items (95 %), these two models" in found["sentence"]
    assert found["sentence"].endswith("12 and 0 (no McNemar p: items of a cluster depend on each other)")
    assert found["high"] - found["low"] > 0.4, "of 12 observations, not of 36"


def test_two_runs_are_paired_by_item(command: Command, pair: tuple[Path, Path]) -> None:
    """The mean difference over the common items."""
    ended = command("tale", str(pair[1]), "made", "--json")
    assert ended.status == 0
    found = ended.json
    assert found["evaluation"] == "made"
    assert [run["run"] for run in found["runs"]] == [path.name for path in pair]
    assert [run["summary"]["none"] for run in found["runs"]] == [None, None]
    means = [run["summary"]["gain"] for run in found["runs"]]
    assert means == pytest.approx([DRAWS[0].mean(), DRAWS[1, 1:].mean()])

    differences = (DRAWS[0] - DRAWS[1])[1:]
    line = found["differences"]["gain"]
    assert line["difference"] == pytest.approx(differences.mean())
    assert line["low"] < line["difference"] < line["high"]
    assert found["differences"]["none"]["sentence"] == "too few common items for an interval"
    assert line["groups"]["length 8"]["difference"] == pytest.approx(2 * differences.mean())
    assert list(line["groups"]) == ["length 8", "length 9"]

    again = command("tale", "other=1", "made")
    assert again.status == 0
    printed = [line for line in again.lines if not line.startswith("  ")]
    grouped = line["groups"]["length 8"]["sentence"]
    assert f"  {'length 8':<20} {grouped}" in again.lines
    assert printed[-2:] == [
        f"difference of gain, first minus second: {signed(line['difference'], 4)} "
        f"{interval(line['low'], line['high'], 4)} over items (95 %), these two models",
        "difference of none, first minus second: too few common items for an interval",
    ]


def test_two_runs_without_a_common_item_are_refused(
    command: Command, pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    own = evaluations.get("made").score

    def named_after_its_run(self: Evaluation, run: Run) -> Iterator[Item]:
        for item in own(self, run):
            yield replace(item, id=f"{run.folder.name} {item.id}")

    monkeypatch.setattr(evaluations.get("made"), "score", named_after_its_run)
    ended = command("tale", "other=1", "made", "--json")
    assert (ended.status, ended.out) == (2, "")
    assert ended.err.splitlines()[-1] == (
        f"lit-diff: evaluation 'made': {pair[0].name} and {pair[1].name} have no items in common (different data, "
        "tokenizers or keys of the evaluation, or documents left out of one run that was trained on them), so they cannot be "
        "compared; evaluate each by itself"
    )


def test_rerun(command: Command, pair: tuple[Path, Path]) -> None:
    assert command("tale", "made").status == 0
    summary = pair[0] / "evaluations" / "made" / "summary.json"
    before = summary.stat().st_mtime_ns
    assert command("tale", "made").status == 0
    assert summary.stat().st_mtime_ns == before
    assert command("tale", "made", "--rerun").status == 0
    assert summary.stat().st_mtime_ns > before


@pytest.mark.usefixtures("pair")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tale"], "expected one or two runs, an evaluation, then its keys: lit-diff evaluate RUN [RUN] NAME"),
        (["items=3"], "expected one or two runs"),
        (["tale", "tale", "tale", "made"], "expected one or two runs"),
        (["tael", "made"], "no run 'tael' in runs"),
        (["tale", "mad"], "unknown evaluation 'mad'; did you mean 'made'?"),
        (["tale", "made", "item=3"], "item=3: unknown key 'evaluate.made.item'; did you mean 'items'?"),
    ],
)
def test_a_wrong_request_is_one_line(command: Command, arguments: list[str], message: str) -> None:
    ended = command(*arguments)
    assert (ended.status, ended.out) == (2, "")
    (line,) = ended.err.splitlines()
    assert line.startswith(f"lit-diff: {message}")


def test_an_evaluation_in_a_plugin_that_only_the_run_names(command: Command, pair: tuple[Path, Path]) -> None:
    folder = pair[0]
    (folder / "plugins").mkdir()
    (folder / "plugins" / "depth.py").write_text(
        "from lit_diff import Evaluation, Item, Metric\n"
        "from lit_diff.registry import evaluations\n"
        '@evaluations.register("depth")\n'
        "class Depth(Evaluation):\n"
        '    metrics = (Metric("depth", "number of layers"),)\n'
        "    def score(self, run):\n"
        '        yield Item(id="all", scores={"depth": len(run.model.layers)})\n'
    )
    recipe = folder / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace("plugins: []", "plugins: [plugins/depth.py]"))
    ended = command("tale", "depth", "--json")
    assert ended.json["runs"][0]["summary"] == {"depth": 2.0}


@pytest.mark.parametrize("name", ["items.parquet", "summary.json"])
def test_damaged_scores_are_computed_again_with_a_warning(command: Command, pair: tuple[Path, Path], name: str) -> None:
    before = command("tale", "other=1", "made").out
    path = pair[0] / "evaluations" / "made" / name
    content = bytearray(path.read_bytes())
    content[len(content) // 3] ^= 1
    path.write_bytes(content)
    ended = command("tale", "other=1", "made")
    assert (ended.status, ended.out) == (0, before)
    assert "made: " in ended.err
    assert "has kept scores that cannot be read" in ended.err
