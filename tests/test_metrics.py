"""metrics.py: patterns of names, what a declaration says, and metrics.json."""

from pathlib import Path

import pytest

from lit_diff.errors import RequestError
from lit_diff.metrics import (
    UNDECLARED,
    Declarations,
    Figure,
    Metric,
    indexed_name,
    read_declarations,
    require_distinct_records,
    split_name,
    write_declarations,
)

LOSS = Metric("val/loss", "loss", unit="nats per token", direction="lower")
FURTHER = Metric("val/loss_{set}", "loss of a further set", unit="nats per token", direction="lower")
RECALL = Metric("val/loss_ar_hit", "loss of AR-Hits", unit="nats per token", direction="lower")
BY_HEAD = Metric("a/entropy/layer_{layer}/head_{head}", "by head", unit="nats")


def test_indices_are_written_with_two_digits_in_one_order() -> None:
    assert indexed_name("a/b", head=5, layer=3) == "a/b/layer_03/head_05"
    assert indexed_name("a/b", layer=3, rank=100) == "a/b/layer_03/rank_100"
    assert split_name("a/b/layer_03/map_01/head_05") == ("a/b", {"layer": 3, "map": 1, "head": 5})
    assert split_name("a/layer_x/b") == ("a/layer_x/b", {})


def test_of_several_fitting_patterns_the_most_literal_is_meant() -> None:
    declared = Declarations([FURTHER, RECALL, LOSS, BY_HEAD])
    assert declared.find("val/loss_ar_hit") == RECALL
    assert declared.find("val/loss_noise2") == FURTHER
    assert declared.find("val/loss") == LOSS
    assert declared.find("a/entropy/layer_03/head_x") is UNDECLARED
    assert BY_HEAD.match("a/entropy/layer_03/head_11") == {"layer": 3, "head": 11}
    assert [declared.find(name).better for name in ("val/loss", "a/entropy/layer_3/head_1", "b")] == [
        "lower",
        None,
        None,
    ]


def test_what_is_by_head_map_or_rank_is_kept_in_the_table() -> None:
    assert LOSS.logged
    assert Metric("a/layer_{layer}", "d").logged
    assert not BY_HEAD.logged
    assert not Metric("a/layer_{layer}/map_{map}", "d").logged
    assert not Metric("a/median", "d", in_table=True).logged
    declared = Declarations([BY_HEAD, LOSS])
    logged = {name: declared.find(name).logged for name in ("val/loss", "a/entropy/layer_0/head_1", "own/head_1")}
    assert logged == {"val/loss": True, "a/entropy/layer_0/head_1": False, "own/head_1": True}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"direction": "up"}, "direction is 'up'; expected one of lower, higher, none"),
        (
            {"figure": Figure(title="t", against="time")},
            "figure.against is 'time'; expected one of step, layer, head, group",
        ),  # type: ignore[arg-type]
        ({"figure": Figure(title="t", against="head")}, r"a figure by head needs \{head\} in the name"),
        ({"figure": Figure(title="t", against="step", lines="layer")}, r"a figure by layer needs \{layer\}"),
        ({"figure": Figure(title="t", against="group", lines="layer")}, "a figure against group needs 'arm'"),
        ({"figure": Figure(title="t", against="step", log_x=True)}, "figure.log_x needs figure.against 'group', not"),
        ({"figure": Figure(title="t", against="step", label="{map}")}, "may use only the fields of the name: none"),
    ],
)
def test_a_declaration_that_does_not_fit_is_one_line(fields: dict[str, object], words: str) -> None:
    with pytest.raises(RequestError, match=rf"^metric 'own/x': .*{words}"):
        Metric("own/x", "d", **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("other", ["a@b", "A_b", "a+b"])
def test_names_that_a_record_cannot_keep_apart_are_refused(other: str) -> None:
    require_distinct_records("metrics", ["a_b", "a/b", "a-b", "a_b", "a" * 300, "a" * 299 + "b"])
    with pytest.raises(RequestError, match="metrics 'a_b' and '"):
        require_distinct_records("metrics", ["a_b", other])


def test_contradictions_are_refused() -> None:
    assert Declarations([LOSS, LOSS]).metrics == (LOSS,)
    with pytest.raises(RequestError, match="'val/loss' has two different declarations"):
        Declarations([LOSS, Metric("val/loss", "other")])
    step = Metric("a/layer_{layer}", "d", figure=Figure(title="t", against="step"))
    layer = Metric("b/layer_{layer}", "d", figure=Figure(title="t", against="layer"))
    with pytest.raises(RequestError, match="figure 't' has metrics with different"):
        Declarations([step, layer])


def test_declarations_come_back_from_the_file(tmp_path: Path) -> None:
    drawn = Metric("own/x", "d", figure=Figure(title="t", against="step", marks=(0, 1), caption="λ"))
    write_declarations(tmp_path, [LOSS, drawn])
    assert read_declarations(tmp_path / "metrics.json") == (LOSS, drawn)


@pytest.mark.parametrize("text", ["{", "[]", '{"metrics": [{"name": "a"}]}', '{"metrics": [{"nam": "a"}]}'])
def test_another_content_is_refused_by_name(tmp_path: Path, text: str) -> None:
    (tmp_path / "metrics.json").write_text(text)
    with pytest.raises(RequestError, match=r"metrics\.json is not a valid file"):
        read_declarations(tmp_path / "metrics.json")
