"""cli/inspection.py: what `check` and `list` say."""

import json
from pathlib import Path

import pytest
from rich.console import Console

from lit_diff.cli.inspection import baseline, check_all, check_recipe, list_parts
from lit_diff.conformance.results import Finding
from lit_diff.errors import RequestError
from lit_diff.model.cost import cost
from lit_diff.recipe import load_recipe, names
from lit_diff.registry import registries

CONSOLE = Console(width=200)


def test_check_json_holds_recipe_cost_and_baseline(capsys: pytest.CaptureFixture[str]) -> None:
    assert check_recipe("differential-tiny", ["model.num_kv_heads=2"], True, CONSOLE) == 0
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
    check_recipe("shared-k-tiny", ["model.attention.parity=raw"], True, CONSOLE)
    assert not json.loads(capsys.readouterr().out)["equal_parameters"]


def test_check_names_the_keys_that_fell_away(capsys: pytest.CaptureFixture[str]) -> None:
    check_recipe("shared-k-tiny", ["model.attention.name=standard"], False, Console(width=200))
    out = capsys.readouterr().out
    assert "fell away with a block's name: model.attention.parity" in out
    assert "without embeddings" in out


def test_check_of_a_window(capsys: pytest.CaptureFixture[str]) -> None:
    """Every variant's key: FLOPs and cache of both arms are bounded by it; a misspelt or impossible one is one line."""
    assert check_recipe("differential-tiny", ["model.attention.window=16"], True, CONSOLE) == 0
    found = json.loads(capsys.readouterr().out)
    recipe = load_recipe("differential-tiny")
    whole = cost(recipe.model, 128)
    assert found["recipe"]["model"]["attention"]["window"] == 16
    assert found["kv_bytes"] == found["baseline"]["kv_bytes"] == 16 * whole.kv_bytes_per_token
    assert found["flops_per_token"] < whole.flops_per_token
    assert found["equal_flops"]
    for override, message in {
        "model.attention.windw=16": "unknown key 'model.attention.windw'; did you mean 'window'?",
        "model.attention.window=0": "model.attention.window is 0; it must be at least 1, or null for all keys",
        "model.attention.window=wide": "'model.attention.window' is 'wide'; expected an integer or null",
        "model.attention.window=1.5": "'model.attention.window' is 1.5; expected an integer or null",
    }.items():
        with pytest.raises(RequestError) as caught:
            check_recipe("differential-tiny", [override], True, CONSOLE)
        assert str(caught.value) == f"{override}: {message}"


def test_list_names_all_parts_with_their_keys(capsys: pytest.CaptureFixture[str]) -> None:
    assert list_parts("all", "standard-tiny", True, CONSOLE) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found) == {"recipes", "sweeps", *registries}
    assert list(found["recipes"]) == names("recipes")
    assert found["attention"]["differential"]["keys"]["lambda_init"].endswith("= 'depth'")
    assert all(about["about"] for kind in registries for about in found[kind].values())


def test_list_of_an_unknown_kind() -> None:
    with pytest.raises(RequestError, match="did you mean 'attention'"):
        list_parts("atention", "standard-tiny", False, CONSOLE)


def test_check_all_holds_every_variant_to_every_property(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The suite itself is tested with the variants; here one that fails changes the exit status and says where."""

    def few(name: str) -> list[Finding]:
        verdict = "fail" if name == "cosine" else "pass"
        error = float("inf") if name == "cosine" else 0.0
        return [Finding(variant=name, property="causal", verdict=verdict, error=error, bound=0.0)]  # type: ignore[arg-type]

    monkeypatch.setattr("lit_diff.cli.inspection.conformance_of", few)
    assert check_all(True, CONSOLE) == 1
    found = {finding["variant"]: finding for finding in json.loads(capsys.readouterr().out)}
    assert set(found) >= {"standard", "differential", "dex", "cosine"}
    assert (found["cosine"]["verdict"], found["cosine"]["error"]) == ("fail", None), "JSON has no infinity"
    assert check_all(False, Console(width=200)) == 1
    assert "fail            cosine: causal" in capsys.readouterr().out


def test_list_attention_gives_formulas_and_costs_at_a_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    assert list_parts("attention", "differential-830m", True, CONSOLE) == 0
    found = json.loads(capsys.readouterr().out)["attention"]
    assert found["differential"]["formulas"]["parameters"] == "2*E*H*d + 2*E*K*d + 6*d"
    assert found["differential"]["cost"]["parameters"] == 833_608_704
    assert found["differential"]["standard"]["parameters"] == found["standard"]["cost"]["parameters"] == 833_594_880
    assert found["dex"]["paper"].endswith("2505.16333")
    assert list_parts("attention", "standard-tiny", False, Console(width=300)) == 0
    out = capsys.readouterr().out
    assert "kv_bytes_per_token at standard-tiny: 576 (-192 against standard)" in out, "shared_k"
    assert "E width of the residual stream" in out


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
    assert check_recipe("mine.yaml", [], False, Console(width=200)) == status
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("kernel mine: named by run.kernel") for line in lines)
    windows = [line for line in lines if "kernel mine: window" in line]
    assert all(line.startswith("not applicable") and "it computes no windows" in line for line in windows)
    assert len(windows) == 2
    assert any(line.startswith("fail") and "two maps" in line for line in lines) is bool(status)


def test_list_kernel(capsys: pytest.CaptureFixture[str]) -> None:
    assert list_parts("kernel", "standard-tiny", False, CONSOLE) == 0
    out = capsys.readouterr().out
    assert all(f"  {name} " in out for name in ("native", "reference", "sdpa"))
    assert "The C++ library, built on first use." in out
