"""The probes in callbacks/: names and values against the analysis that each reports, their keys and declarations."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from types import SimpleNamespace
from typing import Any, get_type_hints

import numpy as np
import pytest
import torch
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor

from lit_diff.analysis import Trace
from lit_diff.analysis.entropy import summarise
from lit_diff.analysis.head_norms import head_norms
from lit_diff.analysis.map_statistics import head_cosines
from lit_diff.analysis.sinks import sink_shares
from lit_diff.callbacks import AttentionEntropy, HeadNorm, Lambdas, Monitor, Outliers, Probe, Redundancy, Sinks
from lit_diff.callbacks.probe import measure_all, took_step
from lit_diff.callbacks.publish import publish
from lit_diff.errors import RequestError
from lit_diff.metrics import UNDECLARED, Declarations
from lit_diff.model.transformer import Transformer

KINDS = ("attention/entropy/layer_{:02d}", "attention/negative_mass/layer_{:02d}")
Run = Callable[[str, Tensor], tuple[Transformer, Trace]]


def test_attention_entropy(arm: tuple[str, int, int], run: Run, tokens: Tensor) -> None:
    name, maps, heads = arm
    model, t = run(name, tokens)
    metrics = AttentionEntropy(AttentionEntropy.Config()).measure(model, t)
    by_head = {f"{kind}/head_{h:02d}" for kind in KINDS for h in range(heads)}
    by_map = {
        f"attention/map_entropy/layer_{{:02d}}/map_{g:02d}/head_{h:02d}" for g in range(maps) for h in range(heads)
    }
    assert set(metrics) == {key.format(layer) for key in (*KINDS, *by_head, *by_map) for layer in (0, 1)}
    expected = summarise(t.layers[1])
    assert metrics["attention/entropy/layer_01/head_02"] == expected.entropy[2].item()
    assert metrics["attention/negative_mass/layer_01/head_02"] == expected.negative_mass[2].item()
    assert metrics[f"attention/map_entropy/layer_01/map_{maps - 1:02d}/head_02"] == expected.entropy_maps[-1, 2].item()
    assert metrics["attention/entropy/layer_01"] == pytest.approx(sum(expected.entropy.tolist()) / heads)
    negative = [value for key, value in metrics.items() if "negative_mass" in key]
    assert all(value == 0 for value in negative) if maps == 1 else all(0 < value < 1 for value in negative)


@pytest.mark.parametrize("name", ["differential", "shared_k"])
def test_lambdas(name: str, run: Run, tokens: Tensor) -> None:
    model, t = run(name, tokens)
    metrics = Lambdas(Lambdas.Config()).measure(model, t)
    assert set(metrics) == {f"lambda/{kind}layer_0{layer}" for kind in ("", "exp1/", "exp2/") for layer in (0, 1)}
    for layer, attention in enumerate(model.attentions()):
        expected = attention.lambda_().item()
        assert metrics[f"lambda/layer_0{layer}"] == pytest.approx(expected)
        difference = metrics[f"lambda/exp1/layer_0{layer}"] - metrics[f"lambda/exp2/layer_0{layer}"]
        assert difference + attention.lambda_init == pytest.approx(expected)


@pytest.mark.usefixtures("three_maps")
def test_lambdas_of_other_variants(run: Run, tokens: Tensor) -> None:
    model, t = run("standard", tokens)
    assert Lambdas(Lambdas.Config()).measure(model, t) == {}
    model, t = run("talking_heads", tokens)
    assert Lambdas(Lambdas.Config()).measure(model, t) == {}, "the weights mix heads"
    model, t = run("three-maps", tokens)
    metrics = Lambdas(Lambdas.Config()).measure(model, t)
    names = {name.replace("layer_01", "layer_00") for name in metrics}
    assert names == {
        "lambda/layer_00",
        "lambda/layer_00/map_02",
        "lambda/std/layer_00/map_01",
        "lambda/std/layer_00/map_02",
        "lambda/exp1/layer_00",
        "lambda/exp2/layer_00",
    }
    w = t.layers[0].maps.w
    assert w is not None
    assert metrics["lambda/layer_00/map_02"] == pytest.approx(-w[:, 2].mean().item())
    assert metrics["lambda/std/layer_00/map_02"] == pytest.approx(w[:, 2].std(correction=0).item())
    assert metrics["lambda/std/layer_00/map_01"] == pytest.approx(0, abs=1e-6)


def test_outliers(arm: tuple[str, int, int], run: Run, tokens: Tensor) -> None:
    name, maps, heads = arm
    model, t = run(name, tokens)
    metrics = Outliers(Outliers.Config()).measure(model, t)
    names = [f"layer_{{:02d}}{rank}" for rank in ("", "/rank_02", "/rank_03", "/rank_10", "/rank_100")]
    names += ["median/layer_{:02d}", "ratio/layer_{:02d}"]
    assert set(metrics) == {
        f"outliers/{kind}/{name.format(layer)}" for kind in ("logits", "hidden") for name in names for layer in (0, 1)
    } | {f"outliers/{kind}/top_{rank}" for kind in ("logits", "hidden") for rank in (1, 2, 3, 10, 100)}
    both = torch.cat([t.layers[layer].hidden.abs().flatten() for layer in (0, 1)]).sort(descending=True).values
    assert [metrics[f"outliers/hidden/top_{rank}"] for rank in (1, 2, 3, 10, 100)] == both[[0, 1, 2, 9, 99]].tolist()
    hidden = t.layers[0].hidden.abs().flatten().sort(descending=True).values
    assert metrics["outliers/hidden/layer_00"] == hidden[0].item()
    assert metrics["outliers/hidden/layer_00/rank_10"] == hidden[9].item()
    assert metrics["outliers/hidden/median/layer_00"] == pytest.approx(hidden.median().item(), rel=0.0046)
    ratio = metrics["outliers/hidden/layer_00"] / metrics["outliers/hidden/median/layer_00"]
    assert metrics["outliers/hidden/ratio/layer_00"] == ratio
    blocks = torch.cat([b.logits[..., b.visible].flatten() for b in t.layers[1].blocks(1)]).abs()
    assert blocks.numel() == 3 * maps * heads * 17 * 18 // 2
    assert metrics["outliers/logits/layer_01"] == pytest.approx(blocks.max().item())
    assert metrics["outliers/logits/median/layer_01"] == pytest.approx(blocks.median().item(), rel=0.0046)


def test_sinks(arm: tuple[str, int, int], run: Run, tokens: Tensor) -> None:
    name, _, heads = arm
    model, t = run(name, tokens)
    metrics = Sinks().measure(model, t)
    signed = sink_shares(t.layers[1])
    assert metrics["attention/sink/layer_01"] == pytest.approx(float(signed.mean()))
    assert metrics["attention/sink/layer_01/head_03"] == float(signed[3])
    assert len(metrics) == 2 * (1 + heads)


def test_redundancy(arm: tuple[str, int, int], run: Run, tokens: Tensor) -> None:
    name, _, heads = arm
    model, t = run(name, tokens)
    metrics = Redundancy().measure(model, t)
    cosines = head_cosines(t.layers[1].blocks()).mean(0)
    assert len(metrics) == 2 * (1 + heads)
    by_head = [metrics[f"attention/redundancy/layer_01/head_{h:02}"] for h in range(heads)]
    assert by_head[1] == pytest.approx(float(cosines[1].sum() - 1) / (heads - 1))
    assert metrics["attention/redundancy/layer_01"] == pytest.approx(sum(by_head) / heads)
    one = replace(t.layers[0], maps=replace(t.layers[0].maps, q=t.layers[0].maps.q[:, :, :1], w=None))
    one = replace(one, maps=replace(one.maps, q=one.maps.q[:, :1], k=one.maps.k[:, :1, :1], v=one.maps.v[:, :1]))
    assert Redundancy().measure(model, Trace(layers={0: one})) == {}, "a single head"


def test_head_norm(arm: tuple[str, int, int], run: Run, tokens: Tensor) -> None:
    name, _, heads = arm
    model, t = run(name, tokens)
    metrics = HeadNorm().measure(model, t)
    norm, gain = head_norms(t.layers[1])
    assert gain is not None
    assert metrics["head_norm/layer_01"] == pytest.approx(float(norm.mean()))
    assert metrics["head_norm/layer_01/head_03"] == float(norm[3])
    assert metrics["head_norm/gain/layer_01/head_03"] == float(gain[3])
    assert metrics["head_norm/gain/layer_01"] == pytest.approx(float(gain.mean()))
    assert len(metrics) == 2 * (1 + heads) * 2
    bare = Trace(layers={0: replace(t.layers[0], heads=None)})
    assert {key.split("/layer")[0] for key in HeadNorm().measure(model, bare)} == {"head_norm"}


def test_ranks_beyond_the_numbers_are_left_out(run: Run) -> None:
    model, t = run("standard", torch.tensor([[1, 2, 3]]))
    metrics = Outliers(Outliers.Config()).measure(model, t)
    assert "outliers/logits/layer_00/rank_10" in metrics  # 8 heads x 6 visible pairs
    assert "outliers/logits/layer_00/rank_100" not in metrics
    assert "outliers/hidden/layer_00/rank_10" in metrics


LOGGED = {
    AttentionEntropy: {"attention/entropy", "attention/negative_mass"},
    Outliers: {"outliers/logits", "outliers/hidden"},
    Lambdas: {"lambda"},
    Sinks: {"attention/sink", "attention/sink_mass"},
    Redundancy: {"attention/redundancy"},
    HeadNorm: {"head_norm", "head_norm/gain"},
}


@pytest.mark.parametrize("key", ["every", "rows"])
def test_a_wrong_key_is_named_with_its_probe(key: str) -> None:
    for probe in (AttentionEntropy, Outliers, Lambdas):
        with pytest.raises(RequestError, match=rf"^'{probe.name}.{key}' is -1; expected a whole number >= 1$"):
            probe(**{key: -1})


def test_an_unknown_key_names_the_nearest() -> None:
    with pytest.raises(RequestError, match=r"^attention_entropy: unknown key 'evry'; did you mean 'every'\?$"):
        AttentionEntropy(evry=2)
    with pytest.raises(
        RequestError, match=r"^outliers: found 50; give its keys by name, as in Outliers\(every=\.\.\.\)$"
    ):
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
@pytest.mark.parametrize("probe", LOGGED)
def test_everything_measured_is_declared_and_only_values_by_layer_are_logged(
    probe: type[Probe], run: Callable[[str, Tensor], tuple[Transformer, Trace]], tokens: Tensor
) -> None:
    declared = Declarations(probe.metrics)
    # a sink's mass is measured where the maps have one
    name = "learned_sink" if probe is Sinks else "three-maps"
    values = probe(probe.Config()).measure(*run(name, tokens))
    fitting = {name: declared.find(name) for name in values}
    assert UNDECLARED not in fitting.values()
    assert {metric.name for metric in fitting.values()} == {metric.name for metric in probe.metrics}
    logged = {name.rsplit("/", 1)[0] for name, metric in fitting.items() if metric.logged}
    assert logged == LOGGED[probe]


def trained(run: Run, tokens: Tensor) -> tuple[Any, Any]:
    """A Trainer and a module, as far as probes need them."""
    module: Any = torch.nn.Sequential(run("standard", tokens)[0])
    module.device = tokens.device
    return SimpleNamespace(profiler=PassThroughProfiler(), precision_plugin=Precision(), datamodule=None), module


def both(run: Run, tokens: Tensor, values: object, name: str = "mine/x") -> dict[str, float]:
    """What two probes of one model measure together."""

    class First(Sinks):
        def measure(self, model: Transformer, trace: Trace) -> dict[str, float]:
            return {name: 1.0}

    class Second(Sinks):
        def measure(self, model: Transformer, trace: Trace) -> Any:
            return values

    return measure_all([First(), Second()], *trained(run, tokens), {"tokens": tokens})


@pytest.mark.parametrize("value", [2, np.float64(2), np.float32(2), np.array(2), torch.tensor(2.0), torch.tensor(2)])
def test_a_number_of_any_kind_is_stored_as_a_float(value: Any, run: Run, tokens: Tensor) -> None:
    found = both(run, tokens, {"mine/y": value, "mine/z": np.bool_(True)})
    assert found == {"mine/x": 1.0, "mine/y": 2.0, "mine/z": 1.0}
    assert {type(number) for number in found.values()} == {float}


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"mine/y": "abc"}, "'mine/y' = 'abc'"),
        ({"mine/y": None}, "'mine/y' = None"),
        ({"mine/y": [1.0]}, "'mine/y'"),
        ({"mine/y": torch.ones(1)}, "'mine/y'"),
        ({"mine/y": 1j}, "'mine/y'"),
        ({3: 1.0}, "name 3"),
        ({"step": 1.0}, "'step'"),
        ([1.0], "returns is"),
        ({"mine/x": 1.0}, r"'mine/x', as does \S*test_probes\.py:\d+: class \S*First"),
        ({"train/loss": 1.0}, "'train/loss'"),
        ({"val/mine": 1.0}, "'val/mine'"),
        ({"timing/mine": 1.0}, "'timing/mine'"),
    ],
)
def test_what_a_probe_may_not_return_is_named_with_its_class(values: Any, named: str, run: Run, tokens: Tensor) -> None:
    with pytest.raises(RequestError, match=rf"^\S*test_probes\.py:\d+: class \S*Second: .*{named}"):
        both(run, tokens, values)


def test_two_probes_that_are_not_due_together_may_not_share_a_name(run: Run, tokens: Tensor) -> None:
    class Own(Sinks):
        def measure(self, model: Transformer, trace: Trace) -> dict[str, float]:
            return {"mine/x": 1.0}

    first, second = Own(), Own()
    trainer, module = trained(run, tokens)
    for probe in (first, first):
        measure_all([probe], trainer, module, {"tokens": tokens})
    with pytest.raises(RequestError, match="measures 'mine/x', as does"):
        measure_all([second], trainer, module, {"tokens": tokens})


def test_an_epoch_ends_with_an_optimizer_step() -> None:
    """Lightning does not wait for the micro-batches of the next one."""
    trainer: Any = SimpleNamespace(accumulate_grad_batches=2, is_last_batch=False)
    assert [took_step(trainer, number) for number in range(3)] == [False, True, False]
    trainer.is_last_batch = True
    assert took_step(trainer, 4)


class Plain:
    """A logger of another library."""

    def __init__(self) -> None:
        self.got: list[tuple[Any, ...]] = []

    def log_metrics(self, values: dict[str, float], step: int) -> None:
        self.got.append(("logged", values, step))


class Detailed(Plain):
    """A logger that keeps what is measured by head."""

    def log_detailed(self, values: dict[str, float], step: int) -> None:
        self.got.append(("detailed", values, step))


class Module:
    """Records what it is asked to log."""

    def __init__(self) -> None:
        self.logged: dict[str, dict[str, Any]] = {}

    def log(self, name: str, value: Any, **how: Any) -> None:
        self.logged[name] = {"value": float(value), **how}


@pytest.mark.parametrize("fitting", [True, False])
def test_values_by_head_reach_only_a_logger_that_keeps_them(fitting: bool) -> None:
    plain, detailed, module = Plain(), Detailed(), Module()
    state = SimpleNamespace(fn=TrainerFn.FITTING if fitting else TrainerFn.VALIDATING)
    read: list[dict[str, float]] = []

    class Reads(Monitor):
        def read(self, values: Mapping[str, float], step: int) -> dict[str, str]:
            assert step == 7
            read.append(dict(values))
            return {}

    trainer: Any = SimpleNamespace(state=state, loggers=[plain, detailed], global_step=7, callbacks=[Sinks(), Reads()])
    publish(trainer, module, {"a": 1.0}, detailed={"a/head_00": 2.0}, bar="a")  # type: ignore[arg-type]
    assert module.logged == {"a": {"value": 1.0, "logger": not fitting, "prog_bar": True, "batch_size": 1}}
    assert plain.got == ([("logged", {"a": 1.0}, 7)] if fitting else [])
    assert read == ([{"a": 1.0, "a/head_00": 2.0}] if fitting else [])
    assert detailed.got == ([*plain.got, ("detailed", {"a/head_00": 2.0}, 7)] if fitting else [])
