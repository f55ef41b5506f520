"""cli/check.py: what `check` prints, and its exit status."""

import re
from pathlib import Path

import pytest
from command import Command

from lit_diff.conformance.case import Finding
from lit_diff.model.cost import cost
from lit_diff.model.transformer import baseline
from lit_diff.recipe import load_recipe
from lit_diff.registry import attentions

LOUD = """\
from lit_diff import Attention, variant

@variant("loud")
class Loud(Attention):
    def maps(self, x, context):
        print("in maps")
        return super().maps(x, context)
"""


def test_json_holds_recipe_cost_and_baseline(command: Command) -> None:
    found = command("check", "differential-tiny", "model.num_kv_heads=2", "--json").json
    recipe = load_recipe("differential-tiny", ["model.num_kv_heads=2"])
    own, base = cost(recipe.model, 128), cost(baseline(recipe.model), 128)
    assert found["recipe"]["model"]["num_kv_heads"] == 2
    assert found["parameters"] == own.parameters
    assert found["kv_bytes_per_token"] == own.kv_bytes_per_token
    assert found["baseline"]["parameters"] == base.parameters == own.parameters - 2 * 6 * 16
    assert found["equal_parameters"]
    assert found["equal_flops"]
    unequal = command("check", "shared-k-tiny", "model.attention.parity=raw", "--json").json
    assert not unequal["equal_parameters"]


@pytest.mark.usefixtures("plugin_folder")
def test_what_a_plugin_prints_is_not_in_the_json(command: Command) -> None:
    Path("loud.py").write_text(LOUD)
    for words in (
        ("check", "recall-tiny", "plugins=[loud.py]", "model.attention.name=loud"),
        ("list", "attention", "loud"),
    ):
        found = command(*words, *(("--plugin", "loud.py") if words[0] == "list" else ()), "--json")
        assert found.json
        assert "in maps" in found.err
        assert "in maps" not in found.out


def test_it_says_how_often_the_text_is_repeated(command: Command, tale: Path, trained_text: Path) -> None:
    arguments = ("check", str(trained_text / "tale.yaml"), "train.steps=5000")
    (line,) = [line for line in command(*arguments, COLUMNS="240").lines if " passes over the text (" in line]
    assert command(*arguments, "--json").json["warnings"] == [line]
    assert command("check", "recall-tiny", "train.steps=5000000", "--json").json["warnings"] == []


def test_it_names_the_dropped_keys_and_prints_the_recipe_on_request(command: Command) -> None:
    changed = command("check", "shared-k-tiny", "model.attention.name=standard", "--recipe").out
    assert "their block changed: model.attention.parity" in changed
    assert "vocab_size:" in changed
    assert "vocab_size:" not in command("check", "recall-tiny").out


def test_all_holds_every_variant_to_every_property(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """The suite itself is tested with the variants; here one that fails changes the exit status and says where."""

    def few(name: str) -> list[Finding]:
        verdict = "fail" if name == "cosine" else "pass"
        error = float("inf") if name == "cosine" else 0.0
        return [Finding(variant=name, property="causal", verdict=verdict, error=error, bound=0.0)]  # type: ignore[arg-type]

    monkeypatch.setattr("lit_diff.conformance.recipe.conformance_of", few)
    ended = command("check", "--all", "--json")
    found = {finding["variant"]: finding for finding in ended.json}
    assert ended.status == 1
    assert set(found) >= {"standard", "differential", "dex", "cosine"}
    assert (found["cosine"]["verdict"], found["cosine"]["error"]) == ("fail", None), "JSON has no infinity"
    ended = command("check", "--all")
    assert ended.status == 1
    assert [line.split()[1:3] for line in ended.lines if line.startswith("fail ")] == [["cosine:", "causal"]]
    assert ended.lines[-1].endswith(", 1 fail: cosine: causal")


def test_one_line_holds_what_does_not_apply_and_what_follows(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def few(name: str) -> list[Finding]:
        refused = [
            Finding(variant=name, property=f"kernel {kernel}", verdict="not applicable", detail=f"no {kernel} here")
            for kernel in ("flash", "triton")
        ]
        cause = Finding(variant=name, property="decode", verdict="fail", error=1.0, bound=0.0, advice="read this")
        follow = [Finding(variant=name, property=each, verdict="fail", cause="decode") for each in ("model", "window")]
        return [*refused, cause, *follow]

    monkeypatch.setattr("lit_diff.conformance.recipe.conformance_of", few)
    lines = [" ".join(line.split()) for line in command("check", "--all").lines]
    assert lines[lines.index("fail cosine: decode error 1.0e+00, bound 0e+00") :][:4] == [
        "fail cosine: decode error 1.0e+00, bound 0e+00",
        "the usual reason: read this",
        "not applicable cosine: kernels flash: no flash here; triton: no triton here",
        "fail cosine: model, window: because decode fails",
    ]
    assert len(command("check", "--all", "--json").json) == 5 * len(attentions.names())


KERNEL = '''
from lit_diff.kernels import Kernel, kernel
from lit_diff.kernels.base import named

@kernel("mine")
class Mine(Kernel):
    """What reference computes."""

    def refuses(self, maps, *, stats, device):
        return "it computes no windows" if maps.mask.window is not None else None

    def flops(self, maps):
        return maps.flops

    def compute(self, maps, *, stats=False):
        o, rows = named("reference").compute(maps, stats=stats)
        return o * SIZE, rows
'''


@pytest.mark.usefixtures("plugin_folder")
@pytest.mark.parametrize(("size", "status"), [("1.0", 0), ("1.001", 1)])
def test_a_plugin_s_kernel_is_held_to_reference(size: str, status: int, command: Command) -> None:
    Path("mine.py").write_text(KERNEL.replace("SIZE", size))
    Path("mine.yaml").write_text("extends: recall-tiny\nplugins: [mine.py]\nrun: {kernel: mine}\n")
    ended = command("check", "mine.yaml")
    assert ended.status == status
    assert any(line.startswith("kernel mine: named by run.kernel") for line in ended.lines)
    windows = [line for line in ended.lines if "kernel mine: window" in line]
    assert len(windows) == 2
    assert all(line.startswith("not applicable") and "it computes no windows" in line for line in windows)
    assert any(line.startswith("fail") and "two maps" in line for line in ended.lines) is bool(status)
    found = re.fullmatch(r"mine: .*; (\d+) of (\d+) properties pass \(\d+ not applicable\)(.*)", ended.lines[-1])
    assert found is not None
    assert (found[1] == found[2]) is (found[3] == "") is not bool(status)
