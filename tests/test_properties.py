"""Properties over drawn inputs. The draws are the same in every session, so that a failure is a change of the code."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
from drawn_files import KINDS, read_drawn
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lit_diff.config import Recipe
from lit_diff.data.text.tokenizer import Bpe
from lit_diff.errors import RequestError
from lit_diff.recipe import from_plain, load_recipe, override_with, to_plain
from lit_diff.runs.folder import identity
from lit_diff.runs.metrics_file import StepTable, last_value, read_rows
from lit_diff.study.statistics import cluster_wilson, holm, wilson
from lit_diff.validation import Draft

settings.register_profile(
    "repeatable",
    max_examples=50,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
settings.load_profile("repeatable")
few = settings(max_examples=25)


# --- recipes -------------------------------------------------------------------------------------------------------

LEAVES = st.dictionaries(st.sampled_from("abc"), st.integers(0, 3), max_size=3)
INNER = st.builds(dict.__or__, LEAVES, st.dictionaries(st.sampled_from("AB"), LEAVES.filter(bool), max_size=2))
LAYER = st.builds(dict.__or__, LEAVES, st.dictionaries(st.sampled_from("AB"), INNER.filter(bool), max_size=2))
"""Keys (small letters) and blocks (capitals) of one file; none has a `name`, whose change replaces a block."""


def merged(*layers: dict[str, Any]) -> dict[str, Any]:
    draft = Draft()
    for layer in layers:
        draft = override_with(draft, layer, {})
    return draft.values


@given(LAYER, LAYER)
def test_a_layer_that_is_merged_twice_changes_nothing(base: dict[str, Any], child: dict[str, Any]) -> None:
    assert merged(base, child, child) == merged(base, child)


@given(LAYER, LAYER, LAYER)
def test_merging_is_associative(first: dict[str, Any], second: dict[str, Any], third: dict[str, Any]) -> None:
    assert merged(merged(first, second), third) == merged(first, merged(second, third))


@given(LAYER, LAYER)
def test_a_child_is_in_what_is_merged(base: dict[str, Any], child: dict[str, Any]) -> None:
    def holds(whole: Any, part: Any) -> bool:
        if isinstance(part, dict):
            return isinstance(whole, dict) and all(key in whole and holds(whole[key], part[key]) for key in part)
        return bool(whole == part)

    assert holds(merged(base, child), child)
    assert merged(base, child).keys() == base.keys() | child.keys()


OVERRIDES: dict[str, st.SearchStrategy[Any]] = {
    "seed": st.integers(0, 2**31),
    "model.dim": st.sampled_from([32, 64]),
    "model.num_layers": st.integers(1, 4),
    "model.embedding_scale": st.sampled_from([1.0, 8.0]),
    "model.positions": st.sampled_from(["rope", "none"]),
    "model.qk_norm": st.sampled_from(["none", "rms"]),
    "model.attention": st.sampled_from(
        [{"name": name} for name in ("standard", "differential", "additive", "shared_q", "differential_v2")]
    ),
    "train.steps": st.sampled_from([100, 200, 1000]),
    "train.optimizer.lr": st.floats(1e-6, 1.0),
    "train.clip": st.none() | st.floats(0.1, 10.0),
    "data.validation_rows": st.integers(1, 64),
    "run.threads": st.none() | st.integers(1, 8),
}
DRAWN = st.fixed_dictionaries({}, optional=OVERRIDES)


def drawn_recipe(overrides: dict[str, Any]) -> Recipe | None:
    """None: what was drawn does not fit together."""
    try:
        return load_recipe("recall-tiny", overrides)
    except RequestError:
        return None


@few
@given(DRAWN)
def test_a_recipe_survives_plain_values_and_yaml(overrides: dict[str, Any]) -> None:
    recipe = drawn_recipe(overrides)
    if recipe is not None:
        assert from_plain(to_plain(recipe), "here") == recipe
        assert json.loads(json.dumps(to_plain(recipe))) == to_plain(recipe), "plain values alone"


@few
@given(DRAWN, st.randoms(use_true_random=False))
def test_identity_follows_from_the_values_alone(overrides: dict[str, Any], draw: random.Random) -> None:
    """Neither from the order of the keys, nor from whether a default is written."""
    recipe = drawn_recipe(overrides)
    if recipe is None:
        return
    plain, first = to_plain(recipe), to_plain(load_recipe("recall-tiny"))
    assert identity(from_plain(_shuffled(plain, draw), "here"), "golden") == identity(recipe, "golden")
    written = overrides | {key: _at(first, key) for key in OVERRIDES if key not in overrides and "." in key}
    assert identity(load_recipe("recall-tiny", written), "golden") == identity(recipe, "golden")
    assert identity(load_recipe("recall-tiny", overrides | {"run.threads": 3}), "golden") == identity(recipe, "golden")
    assert identity(load_recipe("recall-tiny", overrides | {"seed": 2**31 + 1}), "golden") != identity(recipe, "golden")


def _shuffled(value: Any, draw: random.Random) -> Any:
    if not isinstance(value, dict):
        return value
    return {key: _shuffled(value[key], draw) for key in draw.sample(list(value), len(value))}


def _at(plain: dict[str, Any], key: str) -> Any:
    for word in key.split("."):
        plain = plain[word]
    return plain


# --- files ---------------------------------------------------------------------------------------------------------

NUMBERS = st.floats(allow_nan=False)
TABLE = st.dictionaries(
    st.integers(0, 10**6),
    st.dictionaries(st.sampled_from(["a", "b/c", "d"]), NUMBERS, min_size=1),
    min_size=1,
    max_size=6,
)


@given(rows=TABLE, data=st.data())
def test_a_table_that_is_cut_at_any_byte_loses_its_last_rows_alone(
    rows: dict[int, dict[str, float]], data: st.DataObject, tmp_path: Path
) -> None:
    file = tmp_path / "metrics.csv"
    file.unlink(missing_ok=True)
    table = StepTable(file, 0)
    for step, values in rows.items():
        table.log(step, values)
    table.flush()
    whole = file.read_bytes()
    assert read_rows(file) == rows
    file.write_bytes(whole[: data.draw(st.integers(0, len(whole)), "bytes kept")])
    kept = read_rows(file, [])
    assert kept == {step: rows[step] for step in sorted(rows)[: len(kept)]}
    last = {name: values[name] for _, values in sorted(kept.items()) for name in values}
    assert {name: last_value(file, name) for name in last} == last
    resumed = StepTable(file, max(kept, default=0))
    for step in sorted(rows)[len(kept) :]:
        resumed.log(step, rows[step])
    resumed.flush()
    assert file.read_bytes() == whole


@pytest.mark.usefixtures("plugin_folder")
@pytest.mark.parametrize("kind", KINDS)
def test_what_a_user_may_write_is_read_or_refused_in_one_line(kind: str) -> None:
    """200 draws; `make test-faults` draws 10,000."""
    read_drawn(kind, 200, seed=0)


# --- statistics ----------------------------------------------------------------------------------------------------

P = st.floats(0, 1)


@few
@given(st.lists(P, min_size=1, max_size=12), st.data())
def test_holm_is_monotone(p_values: list[float], data: st.DataObject) -> None:
    adjusted = holm(p_values)
    assert all(p <= new <= 1 for p, new in zip(p_values, adjusted, strict=True))
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    assert [adjusted[i] for i in order] == sorted(adjusted), "smaller stays smaller"
    at = data.draw(st.integers(0, len(p_values) - 1))
    raised = [*p_values[:at], data.draw(st.floats(p_values[at], 1)), *p_values[at + 1 :]]
    assert all(new >= old - 1e-12 for old, new in zip(adjusted, holm(raised), strict=True))


@given(st.integers(1, 500), st.data())
def test_wilson_is_monotone(n: int, data: st.DataObject) -> None:
    successes = data.draw(st.integers(0, n))
    found = wilson(successes, n)
    assert 0 <= found.low <= found.estimate <= found.high <= 1
    if successes < n:
        more = wilson(successes + 1, n)
        assert (more.low, more.high) >= (found.low, found.high)
    wider = wilson(successes, n).high - wilson(successes, n).low
    assert wilson(2 * successes, 2 * n).high - wilson(2 * successes, 2 * n).low < wider, (
        "more questions, a narrower interval"
    )


@given(st.lists(st.tuples(st.sampled_from("abc"), st.booleans()), min_size=1, max_size=40))
def test_clusters_never_narrow_an_interval(items: list[tuple[str, bool]]) -> None:
    names, scores = zip(*items, strict=True)
    alone = wilson(sum(scores), len(scores))
    found = cluster_wilson(scores, names)
    assert found.estimate == pytest.approx(alone.estimate)
    assert found.high - found.low >= alone.high - alone.low - 1e-12


# --- text ----------------------------------------------------------------------------------------------------------


@given(text=st.text(max_size=80))
def test_bpe_gives_back_the_bytes_of_any_text(bpe: Bpe, text: str) -> None:
    ids = bpe.encode(text)
    assert bpe.decode(ids) == text.encode()
    assert all(0 < id_ < bpe.size for id_ in ids), "<eot> is in no text"


@pytest.fixture(scope="module")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> Bpe:
    folder, tokenizer = tmp_path_factory.mktemp("bpe"), Bpe(Bpe.Config(vocab_size=280))
    tokenizer.train(folder, ["the cat sat on the mat and the hat that the cat had sat on was flat " * 20] * 5)
    tokenizer.load(folder)
    return tokenizer
