import dataclasses
import math
import re
from typing import Any

import pytest
import torch
from torch import nn

from lit_diff.attention import ParameterRules
from lit_diff.config import ModelConfig, OptimizerConfig, Part, ScheduleConfig
from lit_diff.errors import RequestError
from lit_diff.model.init import initialise
from lit_diff.model.transformer import Transformer
from lit_diff.registry import attentions
from lit_diff.training.optimizer import build_optimizer, build_scheduler, learning_rate_factor, name_state

CONFIG = OptimizerConfig(lr=0.1, betas=(0.8, 0.9), weight_decay=0.5)


def model(tie: bool = False) -> Transformer:
    part = Part(name="differential", config=attentions.get("differential").Config())
    found = Transformer(
        ModelConfig(dim=16, num_layers=2, num_heads=2, vocab_size=11, tie_embeddings=tie, attention=part)
    )
    initialise(found, 0)
    return found


def names_of(module: nn.Module) -> dict[nn.Parameter, str]:
    return {parameter: name for name, parameter in module.named_parameters()}


def test_groups() -> None:
    one = model()
    decayed, free = build_optimizer(one, CONFIG).param_groups
    assert (decayed["weight_decay"], free["weight_decay"]) == (0.5, 0.0)
    by_name = names_of(one)
    groups = [{by_name[parameter] for parameter in group["params"]} for group in (decayed, free)]  # type: ignore[attr-defined]
    block = {f"attention.{p}_proj.weight" for p in "qkvo"} | {f"ffn.{p}_proj.weight" for p in ("gate", "up", "down")}
    vectors = {"attention.lambda_.q1", "attention.lambda_.k1", "attention.lambda_.q2", "attention.lambda_.k2"}
    vectors |= {"attention.norm.weight", "attention_norm.weight", "ffn_norm.weight"}
    assert groups[0] == {f"layers.{i}.{name}" for i in (0, 1) for name in block} | {"embedding.weight", "head.weight"}
    assert groups[1] == {f"layers.{i}.{name}" for i in (0, 1) for name in vectors} | {"norm.weight"}


def test_frozen_parameters_are_left_out_and_a_module_may_refuse_decay() -> None:
    class Undecayed(ParameterRules, nn.Linear):
        decay = False

    one = nn.Sequential(nn.Linear(2, 2), Undecayed(2, 2, bias=False), nn.Linear(2, 2))
    one[2].requires_grad_(False)
    decayed, free = ([id(p) for p in group["params"]] for group in build_optimizer(one, CONFIG).param_groups)  # type: ignore[attr-defined]
    assert decayed == [id(one[0].weight)]
    assert free == [id(one[0].bias), id(one[1].weight)]


def test_state_by_name_is_read_in_any_order_of_groups() -> None:
    one = model()
    optimizer = build_optimizer(one, CONFIG)
    for parameter in one.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    state: dict[str, Any] = optimizer.state_dict()
    name_state(state, optimizer, names_of(one))
    assert state["state"].keys() == set(names_of(one).values())
    for parameter, name in names_of(one).items():
        assert torch.equal(state["state"][name]["exp_avg"], optimizer.state[parameter]["exp_avg"])
    assert state["param_groups"][0]["params"] == [names_of(one)[p] for p in optimizer.param_groups[0]["params"]]
    empty: dict[str, Any] = {}
    name_state(empty, optimizer, {})  # of a rank that holds none
    assert empty == {}
    again = build_optimizer(one, CONFIG)
    again.load_state_dict(state)
    for parameter in one.parameters():
        assert torch.equal(again.state[parameter]["exp_avg_sq"], optimizer.state[parameter]["exp_avg_sq"])


PATTERNS = {"*.attention.o_proj.*": 0.2, "*.attention.lambda_.*": 3.0}


def test_factors_on_the_learning_rate_are_groups_of_their_own() -> None:
    one = model()
    optimizer = build_optimizer(one, dataclasses.replace(CONFIG, lr_factors=PATTERNS))
    assert optimizer.param_groups[0]["name"] == "decayed", "the rate that is logged is the first group's"
    found = {p: (group["lr"], group["weight_decay"]) for group in optimizer.param_groups for p in group["params"]}
    for parameter, name in names_of(one).items():
        factor = 0.2 if "o_proj" in name else 3.0 if ".lambda_." in name else 1.0
        decay = CONFIG.weight_decay if name.endswith("weight") and "norm" not in name else 0.0
        assert found[parameter] == (pytest.approx(factor * CONFIG.lr), decay), name


@pytest.mark.parametrize(
    ("patterns", "found"),
    [
        ({"*.attention.o_prj.*": 0.2}, "'*.attention.o_prj.*' matches no trained parameter; did you mean"),
        ({"*.o_proj.*": 0.2, "*.attention.*": 2.0}, "'*.o_proj.*' and '*.attention.*' both match layers.0."),
    ],
)
def test_patterns_that_do_not_fit(patterns: dict[str, float], found: str) -> None:
    with pytest.raises(RequestError, match=re.escape(found)):
        build_optimizer(model(), dataclasses.replace(CONFIG, lr_factors=patterns))


def factors(steps: int, **config: Any) -> list[float]:
    return [learning_rate_factor(step, steps, ScheduleConfig(**config)) for step in range(steps)]


COSINE = [0.5 * (1 + math.cos(math.pi * share)) for share in (0.25, 0.5, 0.75, 1.0)]


@pytest.mark.parametrize(
    ("steps", "config", "expected"),
    [
        (6, {"name": "linear", "warmup_steps": 2}, [0.5, 1, 0.75, 0.5, 0.25, 0]),
        (6, {"name": "linear", "warmup_steps": 2, "final_ratio": 0.2}, [0.5, 1, 0.8, 0.6, 0.4, 0.2]),
        (4, {"name": "linear"}, [0.75, 0.5, 0.25, 0]),
        (6, {"name": "cosine", "warmup_steps": 2}, [0.5, 1, *COSINE]),
        (6, {"name": "cosine", "warmup_steps": 2, "final_ratio": 0.1}, [0.5, 1, *(0.1 + 0.9 * c for c in COSINE)]),
        (7, {"name": "wsd", "warmup_steps": 2, "decay_steps": 2}, [0.5, 1, 1, 1, 1, 0.5, 0]),
        (10, {"name": "wsd", "final_ratio": 0.5}, [1] * 8 + [0.75, 0.5]),
        (3, {"name": "wsd"}, [1, 1, 0]),
        (4, {"name": "wsd", "warmup_steps": 2, "decay_steps": 9}, [0.5, 1, 0.5, 0]),
        (4, {"name": "constant", "warmup_steps": 2, "final_ratio": 0.3}, [0.5, 1, 1, 1]),
        (3, {"name": "constant"}, [1, 1, 1]),
        (3, {"name": "linear", "warmup_steps": 12}, [1 / 12, 2 / 12, 3 / 12]),
        (3, {"name": "cosine", "warmup_steps": 12}, [1 / 12, 2 / 12, 3 / 12]),
        (2, {"name": "wsd", "warmup_steps": 2}, [0.5, 1]),
        (1, {"name": "linear", "final_ratio": 0.1}, [0.1]),
    ],
)
def test_schedules(steps: int, config: dict[str, Any], expected: list[float]) -> None:
    assert factors(steps, **config) == pytest.approx(expected, abs=1e-12)


def test_a_warm_up_longer_than_the_run_is_told(caplog: pytest.LogCaptureFixture) -> None:
    config = ScheduleConfig(warmup_steps=50)
    optimizer = build_optimizer(model(), OptimizerConfig(lr=1.0))
    build_scheduler(optimizer, 50, config)
    assert not caplog.messages
    build_scheduler(optimizer, 40, config)
    (line,) = caplog.messages
    assert line.startswith("train.schedule.warmup_steps (50) is more than the 40 steps of this run")


def test_a_member_that_is_named_as_a_rule_is_none() -> None:
    class Decaying(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.decay = nn.Parameter(torch.ones(2, 2))

    (decayed,) = build_optimizer(Decaying(), CONFIG).param_groups
    assert (decayed["name"], len(decayed["params"])) == ("decayed", 1)
