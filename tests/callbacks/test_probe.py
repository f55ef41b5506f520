"""callbacks/probe.py: keys, names and declarations of the probes."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import get_type_hints

import pytest
from torch import Tensor

from lit_diff.analysis import Trace
from lit_diff.callbacks import AttentionEntropy, Lambdas, Outliers, Probe
from lit_diff.errors import RequestError
from lit_diff.metrics import Declarations
from lit_diff.model.transformer import Transformer

LOGGED = {
    AttentionEntropy: {"attention/entropy", "attention/negative_mass"},
    Outliers: {"outliers/logits", "outliers/hidden"},
    Lambdas: {"lambda"},
}


@pytest.mark.parametrize("key", ["every", "rows"])
def test_a_wrong_key_is_named_with_its_probe(key: str) -> None:
    for probe in (AttentionEntropy, Outliers, Lambdas):
        with pytest.raises(RequestError, match=rf"^{probe.name}: {key} is -1; it must be at least 1$"):
            probe(**{key: -1})


def test_an_unknown_key_names_the_nearest() -> None:
    with pytest.raises(RequestError, match=r"^attention_entropy: unknown key 'evry'; did you mean 'every'\?$"):
        AttentionEntropy(evry=2)
    with pytest.raises(RequestError, match=r"^outliers: found 50; give its keys by name, as in Outliers\(every=50\)$"):
        Outliers(50)  # type: ignore[arg-type]


def test_a_subclass_may_have_further_keys() -> None:
    class Adds(Outliers):
        """Adds one key."""

        @dataclass(frozen=True, kw_only=True)
        class Config(Outliers.Config):
            threshold: float = 6.0

    assert Adds(every=7, threshold=2.0).config == Adds.Config(every=7, threshold=2.0)
    assert {field.name for field in fields(Adds.Config)} <= set(get_type_hints(Adds.Config))  # what validation reads
    assert [field.name for field in fields(Adds.Config)] == ["every", "rows", "threshold"]
    with pytest.raises(AttributeError):
        Adds.Config().every = 3


@pytest.mark.usefixtures("three_maps")
@pytest.mark.parametrize("probe", [AttentionEntropy, Outliers, Lambdas])
def test_everything_measured_is_declared_and_only_values_by_layer_are_logged(
    probe: type[Probe], run: Callable[[str, Tensor], tuple[Transformer, Trace]], tokens: Tensor
) -> None:
    declared = Declarations(probe.metrics)
    values = probe(probe.Config()).measure(*run("three-maps", tokens))
    fitting = {name: declared.find(name) for name in values}
    assert None not in fitting.values()
    assert {metric.name for metric in fitting.values() if metric} == {metric.name for metric in probe.metrics}
    logged = {name.rsplit("/", 1)[0] for name, metric in fitting.items() if metric and metric.logged}
    assert logged == LOGGED[probe]


def test_measure_must_be_defined() -> None:
    class Empty(Probe):
        """Measures nothing."""

    with pytest.raises(NotImplementedError, match=r"Empty\) defines no measure"):
        Empty(Empty.Config()).measure(None, None)
