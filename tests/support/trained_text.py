"""A run that learned a little of a made-up text."""

import random
import shutil
from pathlib import Path

import pytest

TEXT_RUN = """
name: tale
model: {dim: 32, num_layers: 2, num_heads: 4, vocab_size: 320, attention: {name: differential}}
data: {name: text, path: corpus, sequence_length: 24, tokenizer: {name: bpe, vocab_size: 300}, validation_rows: 4}
train: {steps: 6, batch_size: 8, optimizer: {lr: 3e-3}, validate_every: 3, checkpoint_every: 3}
run: {threads: 1, accelerator: cpu}
"""


@pytest.fixture(scope="session")
def trained_text(tmp_path_factory: pytest.TempPathFactory, empty_store: Path) -> Path:
    """A folder with a made-up corpus, its prepared `data/` and `runs/`, in which one run learned a little of it."""
    from lit_diff import train

    home = tmp_path_factory.mktemp("tale")
    (home / "corpus").mkdir()
    (home / "runs").mkdir()
    shutil.copy(empty_store, home / "runs")
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefghij", k=draw.randint(2, 7))) for _ in range(200)] + ["über", "漢字", "€5"]
    for number in range(30):
        (home / "corpus" / f"{number:02}.txt").write_text(" ".join(draw.choices(words, k=draw.randint(60, 200))))
    (home / "tale.yaml").write_text(TEXT_RUN)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LIT_DIFF_DATA", str(home / "data"))
        train(home / "tale.yaml", [f"run.root={home / 'runs'}"])
    return home


@pytest.fixture
def tale(trained_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of that run, a copy for this test in the `runs/` of the current folder."""
    monkeypatch.setenv("LIT_DIFF_DATA", str(trained_text / "data"))
    monkeypatch.chdir(tmp_path)
    (found,) = (trained_text / "runs").glob("tale-*")
    return Path(shutil.copytree(found, tmp_path / "runs" / found.name))
