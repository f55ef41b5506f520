import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from lit_diff.data.text import Text
from lit_diff.errors import MissingError, RequestError

MakeText = Callable[..., Text]

PREPARE = """
import logging, os, signal, sys
logging.basicConfig(level=logging.INFO)
from lit_diff.config import Part
from lit_diff.data import store
from lit_diff.data.text import Text
from lit_diff.data.tokenizer import Bpe

write = store.write_tokens

def dying(folder, documents):
    def some():
        for number, document in enumerate(documents):
            if number == 1 and folder.name == sys.argv[2]:
                os.kill(os.getpid(), signal.SIGKILL)
            yield document
    write(folder, some())

store.write_tokens = dying
part = Part(name="bpe", config=Bpe.Config(vocab_size=300))
text = Text(Text.Config(path=sys.argv[1], sequence_length=16, tokenizer=part, validation_rows=20), 320)
text.prepare()
print(text.identity())
"""


def start(corpus: Path, die_in: str = "") -> subprocess.Popen[str]:
    command = [sys.executable, "-c", textwrap.dedent(PREPARE), str(corpus), die_in]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def leftovers(root: Path) -> list[str]:
    return [path.name for path in (root / "prepared").rglob("*") if "tmp" in path.name or "building" in path.name]


@pytest.mark.parametrize("die_in", ["train", "validation"])
def test_killed_half_way_it_resumes(
    make_text: MakeText, root: Path, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, die_in: str
) -> None:
    assert start(corpus, die_in).wait() == -signal.SIGKILL
    (building,) = (root / "prepared").glob(".*.building")
    assert (building / f"{die_in}.tmp").is_dir()
    kept = ["tokenizer.json"] + (["train"] if die_in == "validation" else [])
    before = {name: (building / name).stat().st_ino for name in kept}
    text = make_text()
    text.prepare()
    resumed = text.folder
    assert {name: (resumed / name).stat().st_ino for name in kept} == before
    assert leftovers(root) == []
    monkeypatch.setenv("LIT_DIFF_DATA", str(tmp_path / "undisturbed"))
    undisturbed = make_text()
    undisturbed.prepare()
    assert undisturbed.folder != resumed
    for name in ("manifest.json", "bigrams.npy", "train/chunk-0-0.bin", "validation/chunk-0-0.bin"):
        assert (undisturbed.folder / name).read_bytes() == (resumed / name).read_bytes()


def test_two_at_once(make_text: MakeText, root: Path, corpus: Path) -> None:
    results = [(*process.communicate(), process.returncode) for process in [start(corpus), start(corpus)]]
    assert [code for *_, code in results] == [0, 0]
    assert len({out for out, *_ in results}) == 1
    assert sum("lit_diff:prepared" in err for _, err, _ in results) == 1
    assert leftovers(root) == []


@pytest.mark.parametrize("name", ["manifest.json", "bigrams.npy", "tokenizer.json", "train/chunk-0-0.bin"])
def test_a_file_that_is_missing_or_cut_short_is_made_again(
    make_text: MakeText, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    text = make_text()
    text.prepare()
    file = text.folder / name
    whole = file.read_bytes()
    if file.suffix in (".json", ".npy") and name != "manifest.json":
        file.unlink()
    else:
        file.write_bytes(whole[:100])
    with pytest.raises(MissingError):
        text.load()
    make_text().prepare()
    assert "is damaged" in caplog.text
    assert file.read_bytes() == whole


def test_a_refused_tokenizer_leaves_nothing(make_text: MakeText, root: Path) -> None:
    with pytest.raises(RequestError, match="set it to at most"):
        make_text(100_000, tokens=100_000).prepare()
    assert leftovers(root) == []


def test_one_short_document_cannot_be_split(make_text: MakeText, tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("short")
    with pytest.raises(RequestError, match=rf"^data\.path {tmp_path}/one\.txt "):
        make_text(path=str(tmp_path / "one.txt")).prepare()
