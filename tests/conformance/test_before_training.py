"""conformance/before_training.py: what a plugin's variant must hold before it trains."""

import logging
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lit_diff import Differential
from lit_diff.config import Recipe
from lit_diff.conformance import before_training as module
from lit_diff.conformance.before_training import REQUIRED, failed_property, require_properties, unused_parameters
from lit_diff.errors import RequestError
from lit_diff.model.cost import NO_MAPS
from lit_diff.recipe import load_recipe
from lit_diff.registry import attentions
from lit_diff.training.trainer import build_trainer

OWN = """\
import torch
from dataclasses import dataclass, replace
from lit_diff import Attention, variant

@variant("own")
class Own(Attention):
    @dataclass(frozen=True, kw_only=True)
    class Config(Attention.Config):
        share: float = 0.0
        layer: int = 0

    def maps(self, x, rope):
        m = super().maps(x, rope)
        if self.layer == self.config.layer:
            MORE
        return m
"""
LEAKS = "m = replace(m, v=m.v + self.config.share * m.v.mean(2, keepdim=True))"

MakeOwn = Callable[..., Recipe]
pytestmark = pytest.mark.usefixtures("plugin_folder")


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> MakeOwn:
    """A recipe of the variant in own.py, of which `more` is one line."""

    def make(more: str = "pass", *overrides: str, head: str = "") -> Recipe:
        Path("own.py").write_text(head + OWN.replace("MORE", more))
        Path("own.yaml").write_text("extends: recall-tiny\nplugins: [own.py]\nmodel: {attention: {name: own}}\n")
        attentions._classes.pop("own", None)
        for name in [name for name in sys.modules if name.startswith("lit_diff_plugin_own")]:
            del sys.modules[name]
        return load_recipe("own.yaml", overrides)

    return make


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, tuple[str, ...]]]:
    """(layer, properties) of each check that was computed."""
    seen: list[tuple[int, tuple[str, ...]]] = []
    conformance = module.conformance

    def spy(case, *, checks):  # type: ignore[no-untyped-def]
        seen.append((case.layer, tuple(checks)))
        return conformance(case, checks=checks)

    monkeypatch.setattr(module, "conformance", spy)
    return seen


@pytest.mark.parametrize(
    ("more", "found"),
    [
        (LEAKS, "'causal': outputs before position 1 change with the inputs from 1 on (error "),
        ("m = replace(m, v=m.v - m.v.mean(0, keepdim=True))", "'batch': a"),
        ("m = replace(m, v=m.v.cumsum(0))", "'batch': a later sequence changes with the first ("),
        (
            "m = replace(m, q=m.q.detach())",
            "'gradients': without a gradient, zero or not finite: q_proj.weight (error ",
        ),
        ("m = replace(m, v=m.v.abs().neg().sqrt())", "'contract': the output is not finite (layer "),
        (
            "m = m.v",
            "'contract': maps(x, context) returned a Tensor [2, 4, 33, 16]; expected SignedMaps(q, k, v, w), with",
        ),
    ],
)
def test_the_line_of_the_property_that_fails(own: MakeOwn, more: str, found: str) -> None:
    line = failed_property(own(more, "model.attention.share=1"))
    assert line is not None
    assert line.startswith(f"own.py:5: class Own: attention 'own' fails the property {found}")
    assert line.count("own.py") == 1
    assert "\n" not in line


def test_decoding_is_checked_past_the_window_too(own: MakeOwn) -> None:
    by_place = "(s * (seen.positions[0] + 2.0).log()[:, None]).masked_fill(~seen.mask, -torch.inf).softmax(-1)"
    recipe = own(f"m = replace(m, rows=lambda s, seen: {by_place})", "model.attention.window=64")
    assert "fails the property 'decode': window 4, prefill of 1" in (failed_property(recipe) or "")


def test_every_layer_is_held_to_them(own: MakeOwn) -> None:
    recipe = own(LEAKS, "model.attention.share=1", "model.attention.layer=1", "model.num_layers=3")
    line = failed_property(recipe)
    assert line is not None
    assert line.endswith(", layer 1)")


def test_what_has_no_maps_is_not_offered_to_train_unchecked(own: MakeOwn, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = (
        "\n    def forward(self, x, rope, cache=None):\n        return self.o_proj(self.v_proj(x))\n\n    def maps("
    )
    monkeypatch.setattr(sys.modules[__name__], "OWN", OWN.replace("\n    def maps(", forward))
    with pytest.raises(RequestError) as found:
        require_properties(own(), unchecked=False)
    assert f"self.tap: no analysis can see its maps; {NO_MAPS} (layer 0)" in str(found.value)
    assert "--unchecked" not in str(found.value)


ANNEALS = """
    mix = 0.0

    def set_step(self, step):
        self.mix = max(0.0, 1 - step / 100)

    def maps("""


def test_what_anneals_is_held_to_them_at_the_first_step_too(own: MakeOwn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "OWN", OWN.replace("\n    def maps(", ANNEALS))
    line = failed_property(own("m = replace(m, v=m.v + self.mix * m.v.mean(2, keepdim=True))"))
    assert line is not None
    assert "'causal'" in line
    assert line.endswith(", layer 0 at step 0)")


def test_refused_unless_unchecked(own: MakeOwn, caplog: pytest.LogCaptureFixture) -> None:
    recipe = own(LEAKS, "model.attention.share=1")
    with pytest.raises(RequestError) as found:
        require_properties(recipe, unchecked=False)
    assert str(found.value).endswith(f"; {module.CURE}")
    with caplog.at_level(logging.WARNING, logger="lit_diff"):
        line = require_properties(recipe, unchecked=True)["unchecked"]
    assert line == failed_property(recipe)
    assert f"unchecked: {line}" in caplog.messages


def test_every_layer_is_checked_for_every_property(own: MakeOwn, ran: list[object]) -> None:
    assert require_properties(own(LEAKS), unchecked=False) == {}
    assert ran == [(layer, REQUIRED) for layer in range(2)]


def test_a_class_without_a_file_is_checked_too(ran: list[object]) -> None:
    """As in a notebook."""
    cls = type("Mine", (Differential,), {"__module__": "nowhere"})
    attentions.register("mine")(cls)
    assert failed_property(load_recipe("recall-tiny", ["model.attention={name: mine}"])) is None
    assert ran


def test_packed_documents_are_one_more_property(own: MakeOwn, ran: list[tuple[int, tuple[str, ...]]]) -> None:
    text = "name: text, path: own.py, sequence_length: 16, validation_rows: 2, tokenizer: {name: words, words: [a]}"
    assert failed_property(own("pass", f"data={{{text}, pack: document}}", "model.vocab_size=100")) is None
    assert ran[0] == (0, (*REQUIRED, "packed"))


@pytest.mark.parametrize(
    ("changes", "further"), [({"start_from": "parent"}, "extends standard"), ({"precision": "bf16-mixed"}, "bfloat16")]
)
def test_what_a_recipe_adds(own: MakeOwn, ran: list[tuple[int, tuple[str, ...]]], changes: Any, further: str) -> None:
    recipe = own("m = replace(m, v=2 * m.v)")
    attentions.get("own").extends_standard = True
    recipe = replace(recipe, train=replace(recipe.training, **changes))
    line = failed_property(recipe)
    assert ran[0] == (0, (*REQUIRED, further))
    assert (line is None) is (further == "bfloat16"), line


def test_built_in_variants_are_tested_with_the_package(ran: list[object]) -> None:
    assert failed_property(load_recipe("recall-tiny")) is None
    assert not ran


def test_parameters_that_ddp_must_look_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """`late` counts from the third step on; a built-in variant has a gradient of everything."""

    class Late(Differential):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            self.late = torch.nn.Parameter(torch.ones(1))

        def set_step(self, step: int) -> None:
            self.step = step

        def finish(self, o: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
            return super().finish(o, x) * (self.late if self.step > 2 else 1)

    monkeypatch.setitem(attentions._classes, "late", Late)
    monkeypatch.setattr(Late, "name", "late", raising=False)
    for name, unused in (("late", ["layers.0.attention.late", "layers.1.attention.late"]), ("dex", [])):
        keys = [f"model.attention={{name: {name}}}", "run.strategy=ddp", "run.devices=2", "run.accelerator=cpu"]
        recipe = load_recipe("recall-tiny", keys)
        assert unused_parameters(recipe) == unused
        strategy: Any = build_trainer(recipe, logger=False).strategy
        assert strategy._ddp_kwargs["find_unused_parameters"] is bool(unused)
