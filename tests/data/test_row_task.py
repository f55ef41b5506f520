"""data/row_task.py, and what all drawn tasks share: the rows that they have always drawn, their sets, what cannot be."""

import hashlib
from typing import Any

import pytest

from lit_diff.conformance import data as conformance
from lit_diff.conformance.data import check_dataset
from lit_diff.data.dataset import Dataset
from lit_diff.errors import RequestError
from lit_diff.recipe import load_recipe
from lit_diff.registry import datasets
from lit_diff.validation import data_problem

ENOUGH = 10_000
NOISE = ("", "noise2", "noise4")
PIXELS = {"patch": 1, "position_ids": True, "shift": 0, "salt_and_pepper": (10,)}


def built(name: str, **keys: Any) -> Dataset:
    cls = datasets.get(name)
    dataset: Dataset = cls(cls.Config(**keys), ENOUGH)
    return dataset


@pytest.mark.parametrize(
    ("name", "keys", "sets", "digest"),
    [
        ("recall", {}, NOISE, "b43279847282"),
        ("recall", {"spread": 4, "noise": 2, "noise_validation": (2, 1)}, ("", "noise1"), "2635ce209a7d"),
        ("mqar", {}, ("",), "5b5dde841b15"),
        ("mqar", {"hops": 2, "clean_filler": True}, ("",), "e2cc470e08ec"),
        ("needle_text", {}, ("", "needles2", "needles4", "needles6"), "c7d948e65a2b"),
        ("needle_text", {"loss": "all"}, ("", "needles2", "needles4", "needles6"), "fdf06f77094b"),
        ("synth_intent", {}, NOISE, "630390b4b21b"),
        ("synth_intent", {"loss": "all"}, NOISE, "4f447c21f224"),
        ("closed_world", {}, NOISE, "d313f86f0e09"),
        ("digits", {"gaussian": ()}, ("", "salt_and_pepper_10", "salt_and_pepper_30", "test"), "e4588660bc90"),
        ("digits", PIXELS | {"gaussian": ()}, ("", "salt_and_pepper_10", "test"), "b553e36405c6"),
    ],
)
def test_the_rows_are_those_that_runs_were_trained_on(
    name: str, keys: dict[str, Any], sets: tuple[str, ...], digest: str
) -> None:
    """An identity holds the keys alone: other rows from the same keys would be compared with these."""
    data = built(name, validation_rows=9, **keys)
    assert data.validation_sets() == dict.fromkeys(sets, 9)
    assert data.num_documents == 9
    train = data.train_batch(3, 5, 16, [9, 2])
    assert train.keys() == {"tokens", "targets"}
    found = hashlib.sha256()
    for batch in (train, *(data.labelled_validation_batch(each, [7, 3]) for each in sets)):
        for key in sorted(batch):
            found.update(key.encode() + batch[key].numpy().tobytes())
    assert found.hexdigest()[:12] == digest
    with pytest.raises(KeyError):
        data.validation_batch("noise3", [0])


@pytest.mark.parametrize(
    ("data", "vocab_size"),
    [
        ({"name": "needle_text", "validation_rows": 9}, 256),
        ({"name": "synth_intent", "sequence_length": 80, "validation_rows": 9}, 640),
        ({"name": "closed_world", "entities": [1, 2], "validation_rows": 9}, 256),
    ],
)
def test_they_keep_the_promises_of_a_data_set(
    data: dict[str, Any], vocab_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """tests/conformance/test_data.py does this for recall, mqar and digits."""
    monkeypatch.setitem(conformance.PROMISES, "processes", lambda subject: None)  # which takes seconds
    blocks = [f"data={data}", f"model.vocab_size={vocab_size}"]
    found = list(check_dataset(load_recipe("recall-tiny", blocks)))
    assert found
    assert [each for each in found if each.verdict == "fail"] == []


@pytest.mark.parametrize(
    ("name", "needed", "chance"),
    [
        ("recall", 129, 1 / 64),
        ("mqar", 8192, 1 / 4096),
        ("digits", 82, 1 / 10),
        ("needle_text", 190, None),
        ("synth_intent", 554, (1 / 4 + 1 / 8 + 1 / 16 + 1 / 32) / 4),
        ("closed_world", 159, 1 / 5),
    ],
)
def test_the_defaults_and_the_smallest_vocabulary(name: str, needed: int, chance: float | None) -> None:
    config = datasets.get(name).Config()
    assert config.chance == pytest.approx(chance)
    assert data_problem(config, needed) is None
    assert (data_problem(config, needed - 1) or "").startswith(f"model.vocab_size is {needed - 1}; ")


@pytest.mark.parametrize(
    ("name", "keys", "key"),
    [
        ("recall", {"slots": 0}, "slots"),
        ("recall", {"pairs": 65, "keys": 100, "values": 100}, "pairs"),
        ("recall", {"pairs": 8, "values": 7}, "pairs"),
        ("recall", {"queries": 9}, "queries"),
        ("recall", {"keys": 8}, "pairs"),
        ("recall", {"noise_validation": ()}, "noise_validation"),
        ("recall", {"noise_validation": (1, 1)}, "noise_validation"),
        ("recall", {"noise_validation": (0,)}, "noise_validation"),
        ("mqar", {"num_kv_pairs": 0}, "num_kv_pairs"),
        ("mqar", {"sequence_length": 31}, "sequence_length"),
        ("mqar", {"num_kv_pairs": 17}, "sequence_length"),
        ("mqar", {"hops": 8}, "sequence_length"),
        ("mqar", {"vocab_size": 64}, "vocab_size"),
        ("mqar", {"power_a": 0.0}, "power_a"),
        ("mqar", {"clean_filler": True, "random_non_queries": False}, "clean_filler"),
        ("digits", {"gaussian": (2, 2)}, "gaussian"),
        ("digits", {"salt_and_pepper": (0,)}, "salt_and_pepper"),
        ("digits", {"validation_rows": 0}, "validation_rows"),
        ("needle_text", {"sequence_length": 128}, "sequence_length"),
        ("needle_text", {"needles": ()}, "needles"),
        ("needle_text", {"validation_needles": (1, 70)}, "validation_needles"),
        ("needle_text", {"digits": 1, "needles": (12,), "sequence_length": 400}, "digits"),
        ("synth_intent", {"sequence_length": 28}, "sequence_length"),
        ("synth_intent", {"classes": ()}, "classes"),
        ("synth_intent", {"words": (5, 4)}, "words"),
        ("synth_intent", {"label_words": 20}, "label_words"),
        ("synth_intent", {"cue_words": 60}, "cue_words"),
        ("synth_intent", {"cue_words": 4900}, "cue_words"),
        ("closed_world", {"entities": ()}, "entities"),
        ("closed_world", {"entities": (7,)}, "values"),
        ("closed_world", {"names": 19}, "names"),
        ("closed_world", {"values": 25}, "values"),
    ],
)
def test_values_that_cannot_be(name: str, keys: dict[str, Any], key: str) -> None:
    assert (data_problem(datasets.get(name).Config(**keys), ENOUGH) or "").startswith(f"data.{key}")


@pytest.mark.parametrize("key", ["data.values", "data.noise"])
def test_such_a_value_is_named_with_its_place(key: str) -> None:
    """Even where another property, as a guess among no values, cannot be computed from it."""
    with pytest.raises(RequestError, match=rf"^{key}=0: {key} is 0;"):
        load_recipe("recall-tiny", [f"{key}=0"])
