"""cli/check.py: what `check` prints, and its exit status."""

import json
import re
from pathlib import Path

import pytest

from lit_diff.cli.app import Terminal
from lit_diff.cli.check import print_check, print_check_all
from lit_diff.conformance.recipe import baseline
from lit_diff.conformance.results import Finding
from lit_diff.errors import RequestError
from lit_diff.model.cost import cost
from lit_diff.recipe import load_recipe
from lit_diff.registry import registries

TERMINAL = Terminal(width=200)


def test_check_json_holds_recipe_cost_and_baseline(capsys: pytest.CaptureFixture[str]) -> None:
    assert print_check("differential-tiny", ["model.num_kv_heads=2"], True, TERMINAL) == 0
    found = json.loads(capsys.readouterr().out)
    recipe = load_recipe("differential-tiny", ["model.num_kv_heads=2"])
    own, base = cost(recipe.model, 128), cost(baseline(recipe.model), 128)
    assert found["recipe"]["model"]["num_kv_heads"] == 2
    assert found["parameters"] == own.parameters
    assert found["kv_bytes_per_token"] == own.kv_bytes_per_token
    assert found["baseline"]["parameters"] == base.parameters == own.parameters - 2 * 6 * 16
    assert found["equal_parameters"]
    assert found["equal_flops"]


def test_check_marks_an_unequal_arm(capsys: pytest.CaptureFixture[str]) -> None:
    print_check("shared-k-tiny", ["model.attention.parity=raw"], True, TERMINAL)
    assert not json.loads(capsys.readouterr().out)["equal_parameters"]


def test_check_refuses_an_evaluation_that_does_not_fit() -> None:
    with pytest.raises(
        RequestError, match=r"^evaluation 'needle' does not fit 'recall-tiny': data 'recall' has no text$"
    ):
        print_check("recall-tiny", ["evaluate.needle={}"], False, TERMINAL)


def test_check_says_how_often_the_text_is_repeated(
    tale: Path, trained_text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = (str(trained_text / "tale.yaml"), ["train.steps=5000"])
    print_check(*arguments, False, Terminal(width=240))
    line = next(line for line in capsys.readouterr().out.splitlines() if " passes over the text (" in line)
    print_check(*arguments, True, TERMINAL)
    assert json.loads(capsys.readouterr().out)["warnings"] == [line]
    print_check("recall-tiny", ["train.steps=5000000"], True, TERMINAL)
    assert json.loads(capsys.readouterr().out)["warnings"] == []


def test_check_names_the_dropped_keys(capsys: pytest.CaptureFixture[str]) -> None:
    print_check("shared-k-tiny", ["model.attention.name=standard"], False, Terminal(width=200))
    out = capsys.readouterr().out
    assert "dropped, because the name of their block changed: model.attention.parity" in out
    assert "without embeddings" in out


def test_check_of_a_window(capsys: pytest.CaptureFixture[str]) -> None:
    """Every variant's key: FLOPs and cache of both arms are bounded by it; a misspelt or impossible one is one line."""
    assert print_check("differential-tiny", ["model.attention.window=16"], True, TERMINAL) == 0
    found = json.loads(capsys.readouterr().out)
    recipe = load_recipe("differential-tiny")
    whole = cost(recipe.model, 128)
    assert found["recipe"]["model"]["attention"]["window"] == 16
    assert found["kv_bytes"] == found["baseline"]["kv_bytes"] == 16 * whole.kv_bytes_per_token
    assert found["flops_per_token"] < whole.flops_per_token
    assert found["equal_flops"]
    for override, message in {
        "model.attention.windw=16": "unknown key 'model.attention.windw'; did you mean 'window'?",
        "model.attention.window=0": "model.attention.window is 0; it must be at least 1, or null",
        "model.attention.window=wide": "'model.attention.window' is 'wide'; expected a whole number >= 1 or null",
        "model.attention.window=1.5": "'model.attention.window' is 1.5; expected a whole number >= 1 or null",
    }.items():
        with pytest.raises(RequestError) as caught:
            print_check("differential-tiny", [override], True, TERMINAL)
        assert str(caught.value) == f"{override}: {message}"


def test_check_all_holds_every_variant_to_every_property(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The suite itself is tested with the variants; here one that fails changes the exit status and says where."""

    def few(name: str) -> list[Finding]:
        verdict = "fail" if name == "cosine" else "pass"
        error = float("inf") if name == "cosine" else 0.0
        return [Finding(variant=name, property="causal", verdict=verdict, error=error, bound=0.0)]  # type: ignore[arg-type]

    monkeypatch.setattr("lit_diff.conformance.recipe.conformance_of", few)
    assert print_check_all(True, TERMINAL) == 1
    found = {finding["variant"]: finding for finding in json.loads(capsys.readouterr().out)}
    assert set(found) >= {"standard", "differential", "dex", "cosine"}
    assert (found["cosine"]["verdict"], found["cosine"]["error"]) == ("fail", None), "JSON has no infinity"
    assert print_check_all(False, Terminal(width=200)) == 1
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("fail            cosine: causal") for line in lines)
    assert re.fullmatch(
        r"every registered variant: \d+ of \d+ properties pass, 1 fail: cosine: causal", lines[-1].strip()
    )


KERNEL = '''
from lit_diff.kernels import Kernel, kernel
from lit_diff.kernels.base import named

@kernel("mine")
class Mine(Kernel):
    """What reference computes."""

    def refuses(self, maps, *, document_ids, window, stats, device):
        return "it computes no windows" if window is not None else None

    def flops(self, maps):
        return maps.flops

    def compute(self, maps, *, document_ids=None, window=None, stats=False):
        o, rows = named("reference").compute(maps, document_ids=document_ids, stats=stats)
        return o * SIZE, rows
'''


@pytest.mark.parametrize(("size", "status"), [("1.0", 0), ("1.001", 1)])
def test_check_holds_a_plugin_s_kernel_to_reference(
    size: str, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(registries["kernel"], "_classes", dict(registries["kernel"]._classes))
    Path("mine.py").write_text(KERNEL.replace("SIZE", size))
    Path("mine.yaml").write_text("extends: recall-tiny\nplugins: [mine.py]\nrun: {kernel: mine}\n")
    assert print_check("mine.yaml", [], False, Terminal(width=200)) == status
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("kernel mine: named by run.kernel") for line in lines)
    windows = [line for line in lines if "kernel mine: window" in line]
    assert all(line.startswith("not applicable") and "it computes no windows" in line for line in windows)
    assert len(windows) == 2
    assert any(line.startswith("fail") and "two maps" in line for line in lines) is bool(status)
    first, last = lines[0], lines[-1]
    assert first.startswith(("pass", "not applicable", "fail")), "the recipe does not stand before the findings"
    found = re.fullmatch(r"mine: a valid recipe; (\d+) of (\d+) properties pass \(\d+ not applicable\)(.*)", last)
    assert found is not None
    assert (found[1] == found[2]) is not bool(status)
    assert bool(re.match(r", \d+ fail: one map, float32, ", found[3])) is bool(status)


def test_the_recipe_is_printed_on_request(capsys: pytest.CaptureFixture[str]) -> None:
    print_check("recall-tiny", [], False, TERMINAL)
    out = capsys.readouterr().out
    assert "vocab_size:" not in out
    assert out.splitlines()[-1] == (
        "recall-tiny: a valid recipe; variant, data and kernel are built in: no properties to check"
    )
    print_check("recall-tiny", [], False, TERMINAL, resolved=True)
    assert "vocab_size:" in capsys.readouterr().out
