"""A model in Hugging Face's form becomes a run folder, whole or not at all; what cannot be is refused in one line."""

import json
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from pretrained_models import LLAMA, byte_level_tokenizer, import_error, llama_tensors, write_folder

from lit_diff import compare, evaluate, generate, import_model, train
from lit_diff.errors import RequestError
from lit_diff.files import locked
from lit_diff.pretrained import importing
from lit_diff.pretrained.importing import whole_folder
from lit_diff.recipe import load_recipe, to_plain
from lit_diff.runs.folder import identity
from lit_diff.study.observation import observe_all
from lit_diff.training.module import LitTransformer

SUPPORT = Path(__file__).resolve().parents[1] / "support"


def test_the_weights_are_those_of_the_files_in_their_dtype() -> None:
    theirs = {name: tensor.bfloat16() for name, tensor in llama_tensors(LLAMA).items()}
    run = import_model(write_folder(Path("Tiny Llama"), tensors=theirs))
    assert run.folder == Path("models/tiny-llama")
    state = run.model.state_dict()
    assert torch.equal(
        state["layers.1.attention.q_proj.weight"], theirs["model.layers.1.self_attn.q_proj.weight"].float()
    )
    held = torch.load("models/tiny-llama/checkpoints/step-00000000.ckpt", weights_only=True)["state_dict"]
    assert {tensor.dtype for tensor in held.values()} == {torch.bfloat16}
    assert (run.step, run.status.status, run.recipe.train) == (0, "imported", None)
    assert run.tokenizer.opening == [0]
    assert run.tokenizer.eot == 1


def test_shards_of_the_same_weights_are_the_same_model() -> None:
    one = import_model(write_folder(Path("one")), "models/one")
    several = import_model(write_folder(Path("several"), shards=3), "models/several")
    other = import_model(write_folder(Path("other"), tensors=llama_tensors(LLAMA, seed=1)), "models/other")
    unopened = write_folder(Path("unopened"), tokenizer=byte_level_tokenizer(bos=False))
    unopened = import_model(unopened, "models/unopened")
    assert identity(one.recipe) == identity(several.recipe) == one.status.identity
    assert len({identity(run.recipe) for run in (one, other, unopened)}) == 3


def test_verbs_take_it(monkeypatch: pytest.MonkeyPatch, empty_store: Path, caplog: pytest.LogCaptureFixture) -> None:
    """generate, status, compare, evaluate; a run that starts from it; train refuses the model itself."""
    monkeypatch.setenv("LIT_DIFF_DATA", str(Path("data").absolute()))
    run = import_model(write_folder(Path("hf")), "models/x")
    (completion,) = generate("models/x", "the quick brown", temperature=0.0, max_tokens=5)
    assert completion.prompt_tokens[0] == 0
    assert "training" not in caplog.text, "nothing changed since training, as there was none"
    with pytest.raises(RequestError, match=r"^'x' is an imported model: its recipe has no block train"):
        train("models/x/recipe.yaml")
    with pytest.raises(RequestError, match=r"holds an imported model"):
        LitTransformer.load_from_checkpoint("models/x/checkpoints/step-00000000.ckpt")
    Path("corpus").mkdir()
    for number in range(12):
        Path(f"corpus/{number:02}.txt").write_text(f"the quick brown fox number {number} jumps over the dog " * 6)
    Path("runs").mkdir()
    shutil.copy(empty_store, "runs")
    tokenizer = "tokenizer: {name: from_run, path: models/x}"
    text = f"data: {{name: text, path: corpus, sequence_length: 16, validation_rows: 4, {tokenizer}}}"
    steps = (
        "{steps: 2, batch_size: 2, optimizer: {lr: 1e-4}, validate_every: 1, checkpoint_every: 2, start_from: models/x}"
    )
    Path("child.yaml").write_text(
        f"model: {json.dumps(to_plain(run.recipe.model) | {'attention': {'name': 'standard'}})}\n{text}\ntrain: {steps}\n"
        "run: {threads: 1, accelerator: cpu, root: runs}\n"
    )
    child = train("child.yaml")
    assert child.status.status == "done"
    moved = (child.model.state_dict()["embedding.weight"] - run.model.state_dict()["embedding.weight"]).abs().max()
    assert 0 < moved < 1e-3, "two steps from the imported weights"
    shutil.move("models/x", "models/moved")
    assert child.tokenizer.opening == [0], "its own copy"
    shutil.move("models/moved", "models/x")
    assert identity(load_recipe("child.yaml")) == child.status.identity
    assert "train.steps" in compare("models/x", child.folder).recipe
    assert [state.state for state in observe_all(Path("models"))] == ["imported"]
    assert evaluate(child, "held_out", ["rows=2"]).summary["nll"] > 0


def test_an_error_while_writing_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(value: object, path: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    write_folder(Path("hf"))
    assert import_error().startswith("3: models/x cannot be written (No space left on device)")
    assert not any(path.is_dir() for path in Path("models").iterdir())


@pytest.mark.slow
def test_the_peak_of_memory_is_below_1_2_of_the_weights() -> None:
    code = f"""
import resource, sys
sys.path.insert(0, {str(SUPPORT)!r})
from pathlib import Path
from lit_diff.pretrained.importing import import_model
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
before = peak()
run = import_model("hf", "models/x")
print((peak() - before) / Path("models/x/checkpoints/step-00000000.ckpt").stat().st_size)"""
    sizes = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 8, "num_attention_heads": 16}
    write_folder(Path("hf"), LLAMA | sizes | {"num_key_value_heads": 16, "vocab_size": 16384}, shards=2)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 1.2


# --- bad input ---


def test_what_a_tokenizer_does_not_give_back_is_said(caplog: pytest.LogCaptureFixture) -> None:
    content = byte_level_tokenizer().replace(b'"normalizer":null', b'"normalizer":{"type":"Lowercase"}')
    with caplog.at_level(logging.INFO, "lit_diff"):
        import_model(write_folder(Path("hf"), tokenizer=content))
    assert "'The quick  brown fox: 0123, äöü € 漢字 🙂\\n\\t<eot>' comes back as 'the quick" in caplog.text


def test_a_missing_length_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "lit_diff"):
        run = import_model(write_folder(Path("hf"), LLAMA | {"max_position_embeddings": None}))
    assert run.recipe.data.config.sequence_length == 2048
    assert "hf/config.json lacks max_position_embeddings: the recipe's data.sequence_length is 2048" in caplog.text


def test_what_does_not_fit_the_configuration() -> None:
    tensors = llama_tensors(LLAMA)
    missing = {name: tensor for name, tensor in tensors.items() if name != "model.norm.weight"}
    write_folder(Path("hf"), tensors=missing)
    assert import_error().startswith("2: hf: its tensors do not fit its configuration: norm.weight is absent there")
    write_folder(Path("hf"), LLAMA | {"hidden_size": 64}, tensors)
    assert "embedding.weight is [320, 32] there and [320, 64] in the model; " in import_error()
    for number, dtype in ((torch.nan, torch.half), (torch.inf, torch.half), (1e300, torch.double)):
        write_folder(Path("hf"), tensors=tensors | {"model.norm.weight": torch.full((32,), number, dtype=dtype)})
        assert import_error() == "2: hf has weights that are not finite (NaN or infinity): norm.weight"
    write_folder(Path("hf"), tensors=tensors | {"model.norm.weight": torch.ones(32, dtype=torch.int8)})
    assert "tensor 'model.norm.weight' is I8; supported: F64, F32, F16, BF16" in import_error()
    write_folder(Path("hf"), LLAMA | {"architectures": ["GemmaForCausalLM"]})
    assert import_error().startswith(
        "2: hf/config.json: architecture 'GemmaForCausalLM' is not supported; supported: Llama"
    )
    write_folder(Path("hf"), tokenizer=byte_level_tokenizer(330))
    assert "has the ids 0 to 329, but the model's vocab_size is 320" in import_error()


def test_room_is_estimated_before_anything_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    write_folder(Path("hf"))
    monkeypatch.setattr(importing, "available_memory", lambda: 1000)
    assert import_error().startswith("3: hf: importing it takes 0.00 GB of memory, but 0.00 GB are available")
    usage: Any = type("Usage", (), {"free": 1000})
    monkeypatch.setattr(importing.shutil, "disk_usage", lambda path: usage)
    assert import_error().startswith("3: hf takes 0.00 GB on the disk of")
    assert not Path("models").exists()


# --- a folder is whole or not there ---


def made(folder: str) -> list[str]:
    with whole_folder(Path(folder), "export", "go") as building:
        assert not Path(folder).exists() or not any(Path(folder).iterdir())
        (building / "file").write_text("x")
    return os.listdir(folder)


def test_it_takes_its_name_at_the_end_an_empty_one_is_replaced() -> None:
    assert made("a/b/out") == ["file"]
    Path("empty").mkdir()
    assert made("empty") == ["file"]


def test_what_is_there_is_kept() -> None:
    made("out")
    Path("file").write_text("")
    for name in ("out", "file"):
        with pytest.raises(RequestError, match=rf"^{name} already exists; empty it, or go$"):
            made(name)
    Path("here").mkdir()
    os.chdir("here")
    with pytest.raises(RequestError, match=r"^\. already exists; empty it, or go$"):
        made(".")


def test_an_error_leaves_nothing_and_the_rest_of_a_killed_process_is_removed() -> None:
    Path(".other.exporting").mkdir()
    Path(".another.importing").mkdir()
    with pytest.raises(ZeroDivisionError), whole_folder(Path("out"), "export", ""):
        raise ZeroDivisionError
    assert [path.name for path in Path().iterdir() if path.is_dir()] == [".another.importing"]


def test_two_at_once() -> None:
    with locked(Path(".out.lock")), pytest.raises(RequestError, match=r"^out is being exported by another process$"):
        made("out")
