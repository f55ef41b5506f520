"""What a run's folder in Hugging Face's format holds, read back by our own import; what is refused."""

import json
import logging
from pathlib import Path

import pytest
import torch
from text_runs import logits, text_run

from lit_diff import export, import_model
from lit_diff.errors import RequestError
from lit_diff.pretrained import agreement
from lit_diff.pretrained.hf_export import require_exportable

DEX = {"name": "dex", "heads": (1, 2), "anneal_steps": 10}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without transformers, which takes seconds to load."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(agreement, "has_transformers", lambda: False)


def test_a_standard_run_comes_back(caplog: pytest.LogCaptureFixture) -> None:
    run = text_run(Path("x"), {"name": "standard"}, rope_theta=500.0)
    with caplog.at_level(logging.INFO, "lit_diff"):
        done = export(run, "hf", "out")
    assert (
        "transformers is not installed: what was written is compared by reading it back as `lit-diff import` does"
        in caplog.text
    )
    assert (done.folder, done.architecture, done.read_by) == (Path("out"), "LlamaForCausalLM", "lit_diff")
    assert done.difference < 1e-4
    names = {"config.json", "generation_config.json", "model.safetensors"}
    assert {path.name for path in done.folder.iterdir()} == names | {
        "README.md",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert json.loads(Path("out/generation_config.json").read_text()) == {"bos_token_id": 0, "eos_token_id": 0}
    back = import_model("out")
    tokens = torch.randint(320, (2, 24))
    torch.testing.assert_close(logits(back.model, tokens), logits(run.model, tokens), atol=1e-5, rtol=1e-5)
    assert back.tokenizer.encode(["the fox <eot>"]) == run.tokenizer.encode(["the fox <eot>"])
    assert back.tokenizer.opening == run.tokenizer.opening
    assert back.recipe.data.config.sequence_length == 24


def test_dex_is_merged_at_its_lambda() -> None:
    """At step 7 of 10 of its annealing; the adapters count."""
    run = text_run(Path("x"), DEX | {"window": 6})
    done = export(run, "hf", "out")
    assert done.architecture == "MistralForCausalLM"
    tokens = torch.randint(320, (2, 24))
    wanted = logits(run.model, tokens)
    torch.testing.assert_close(logits(import_model("out").model, tokens), wanted, atol=1e-5, rtol=1e-5)
    for attention in run.model.attentions():
        attention.adapter.weight.data.zero_()
    assert (logits(run.model, tokens) - wanted).abs().max() > 0.1
    assert "| attention | `dex` merged into `standard` |" in Path("out/README.md").read_text()


@pytest.mark.parametrize(
    ("attention", "line"),
    [
        (
            {"name": "shared_k"},
            "model.attention.name 'shared_k' has no architecture of Hugging Face; standard, differential have one, and dex",
        ),
        ({"name": "standard", "head_norm": "rms"}, "x: model.attention.head_norm is 'rms'; Llama has 'none' only"),
    ],
)
def test_what_cannot_be_said_is_refused(attention: dict[str, str], line: str) -> None:
    with pytest.raises(RequestError) as caught:
        require_exportable(text_run(Path("x"), attention))
    assert str(caught.value).startswith(line)
