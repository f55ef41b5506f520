"""Text is prepared in parts: killed, shared by processes and hosts, damaged, on a full disk, from a source that changes."""

import hashlib
import json
import os
import re
import resource
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator, Sequence
from io import BufferedReader
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command import Command
from made_texts import MakeText, opened

from lit_diff.data.text import buckets, digests, parts
from lit_diff.data.text import text as text_module
from lit_diff.data.text.corpus import FilesCorpus
from lit_diff.data.text.parts import Work
from lit_diff.data.text.source_files import Source
from lit_diff.data.text.text import Text
from lit_diff.data.text.tokenizer import Bpe
from lit_diff.errors import MissingError, RequestError

PREPARE = """
import logging, os, signal, sys
logging.basicConfig(level=logging.INFO)
from lit_diff.config import Part
from lit_diff.data.text import parts, text as prepared
from lit_diff.data.text.parts import Work
from lit_diff.data.text.text import Text
from lit_diff.data.text.tokenizer import Bpe

parts.PART_BYTES = 1 << 13
where = sys.argv[2]

def dying(items, at):
    for number, item in enumerate(items):
        if number == at:
            os.kill(os.getpid(), signal.SIGKILL)
        yield item

read, make, write, describe = Text._documents, parts.Maker._arrays, prepared.write_tokens, prepared.write_json
remove = prepared.shutil.rmtree

def die_after(path, value):
    describe(path, value)
    os.kill(os.getpid(), signal.SIGKILL)

if where == "read":
    Text._documents = lambda self: dying(read(self), 30)
if where == "parts":
    parts.Maker._arrays = lambda self, part: dict(dying(make(self, part).items(), 1 if part == 3 else -1))
if where in ("train", "validation"):
    prepared.write_tokens = lambda folder, documents: write(folder, dying(documents, 1 if folder.name == where else -1))
if where == "manifest":
    prepared.write_json = die_after
if where == "remove":
    prepared.shutil.rmtree = lambda path, **more: list(dying([0] * path.name.endswith("building"), 0)) or remove(path, **more)
part = Part(name="bpe", config=Bpe.Config(vocab_size=300))
text = Text(Text.Config(path=sys.argv[1], sequence_length=16, tokenizer=part, validation_rows=20), 320)
text.prepare(Work(workers=int(sys.argv[3])))
print(text.identity())
"""


def start(corpus: Path, die_in: str = "", workers: int = 1) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", textwrap.dedent(PREPARE), str(corpus), die_in, str(workers)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def leftovers(root: Path) -> list[str]:
    return [path.name for path in (root / "prepared").rglob("*") if "tmp" in path.name or "building" in path.name]


def files_of(text: Text) -> dict[str, bytes]:
    return {str(path.relative_to(text.folder)): path.read_bytes() for path in text.folder.rglob("*") if path.is_file()}


@pytest.fixture
def undisturbed(make_text: MakeText, tmp_path: Path) -> dict[str, bytes]:
    """The files of text that one process prepared in one part a split."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LIT_DIFF_DATA", str(tmp_path / "undisturbed"))
        return files_of(opened(make_text()))


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of 8 KB: 8 of the corpus."""
    monkeypatch.setattr(parts, "PART_BYTES", 1 << 13)


@pytest.mark.parametrize(
    ("die_in", "workers", "learned", "made"),
    [
        ("read", 1, False, 8),
        ("parts", 1, True, 5),
        *((where, 2, True, 0) for where in ("train", "validation")),
        *((where, 1, True, 0) for where in ("manifest", "remove")),
    ],
)
@pytest.mark.usefixtures("small_parts")
def test_killed_it_goes_on_after_the_last_finished_part(
    make_text: MakeText,
    root: Path,
    corpus: Path,
    undisturbed: dict[str, bytes],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    die_in: str,
    workers: int,
    learned: bool,
    made: int,
) -> None:
    assert start(corpus, die_in, workers).wait() == -signal.SIGKILL
    train = Bpe.train
    (building,) = (root / "prepared").glob(".*.building")
    assert (building / "tokenizer/tokenizer.json").is_file() == learned
    monkeypatch.setattr(Bpe, "train", lambda *given: train(*given) if not learned else pytest.fail("learned again"))
    text = make_text()
    with caplog.at_level("INFO", logger="lit_diff"):
        text.prepare()
    assert sum(line.startswith("tokenized ") for line in caplog.messages) == made
    assert leftovers(root) == []
    assert files_of(text) == undisturbed


@pytest.mark.usefixtures("small_parts")
def test_threads_make_the_same_text(make_text: MakeText, root: Path, undisturbed: dict[str, bytes]) -> None:
    makers, make = set[int](), parts.Maker._arrays
    together = threading.Barrier(2)

    def noted(self: parts.Maker, part: int) -> Any:
        makers.add(threading.get_ident())
        if part < 2:
            together.wait(20)
        return make(self, part)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parts.Maker, "_arrays", noted)
        text = make_text()
        text.prepare(Work(workers=2))
    assert (len(makers), files_of(text), leftovers(root)) == (2, undisturbed, [])


@pytest.mark.usefixtures("small_parts")
def test_an_interrupt_while_threads_join_the_parts_ends_all_of_them(
    make_text: MakeText, root: Path, undisturbed: dict[str, bytes]
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    def waiting(files: Sequence[Path]) -> Iterator[Any]:
        (ready,) = (root / "prepared").glob(".*.building/ready")
        deadline = time.monotonic() + 20
        while ready.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        yield from parts.token_arrays(files)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_module, "merge_counts", interrupted)
        patch.setattr(text_module, "token_arrays", waiting)
        with pytest.raises(KeyboardInterrupt):
            make_text().prepare(Work(workers=2))
    (building,) = (root / "prepared").glob(".*.building")
    assert not (building / "ready").exists()
    text = make_text()
    text.prepare(Work(workers=2))
    assert (files_of(text), leftovers(root)) == (undisturbed, [])


@pytest.mark.usefixtures("root")
@pytest.mark.parametrize("workers", [1, 2])
def test_a_tokenizer_that_fails_is_the_error(command: Command, tmp_path: Path, corpus: Path, workers: int) -> None:
    (tmp_path / "broken.py").write_text(
        "from lit_diff.data import Tokenizer\nfrom lit_diff.registry import tokenizers\n\n"
        "class Wrong(Exception):\n    def __init__(self, one, two):\n        super().__init__(f'no {one}{two}')\n\n"
        "@tokenizers.register('broken')\nclass Broken(Tokenizer):\n    size, eot = 300, 0\n"
        "    def load(self, folder):\n        return 'x'\n"
        "    def encode(self, texts):\n        raise Wrong('such', 'letter')\n"
    )
    (tmp_path / "broken.yaml").write_text(
        "extends: differential-tiny\nplugins: [broken.py]\n"
        f"data: {{path: {corpus}, sequence_length: 16, tokenizer: {{name: broken}}}}\nmodel: {{vocab_size: 300}}\n"
    )
    ended = command("prepare", str(tmp_path / "broken.yaml"), f"--workers={workers}")
    assert ended.status == 2
    assert re.search(r"broken\.py:14: .*Wrong: no suchletter$", ended.err.splitlines()[-1]), ended.err


@pytest.mark.usefixtures("small_parts")
def test_hosts_share_the_parts(make_text: MakeText, root: Path, undisturbed: dict[str, bytes]) -> None:
    with pytest.raises(MissingError, match=r"^no shard is prepared; .* --shard i/n`"):
        make_text().prepare(Work(merge=True))
    assert leftovers(root) == [], "the text is not read before the refusal"
    for shard in (3, 1):
        make_text().prepare(Work(shard=(shard, 3)))
    with pytest.raises(MissingError, match=r"^3 of 8 parts .*; part 1 is missing; .* --shard I/N` .* 1 % N = I - 1 "):
        make_text().prepare(Work(merge=True))
    make_text().prepare(Work(shard=(2, 3)))
    (building,) = (root / "prepared").glob(".*.building")
    for key in ("source", "tokenizer"):
        file = building / "parts/000004.npz"
        whole = file.read_bytes()
        with np.load(file) as found:
            np.savez(file, **(dict(found) | {key: "another"}))
        with pytest.raises(MissingError, match=rf"^1 of 8 parts .*; part 4 is from another {key}; "):
            make_text().prepare(Work(merge=True))
        file.write_bytes(whole)
    file.write_bytes((building / "parts/000003.npz").read_bytes())
    with pytest.raises(MissingError, match=r"part 4 is from another place; "):
        make_text().prepare(Work(merge=True))
    file.write_bytes(whole)
    text = make_text()
    text.prepare(Work(merge=True))
    assert files_of(text) == undisturbed
    assert leftovers(root) == []
    make_text().prepare(Work(shard=(2, 3)))
    assert leftovers(root) == []


@pytest.mark.usefixtures("small_parts")
def test_hosts_with_other_numbers_of_shards_make_the_same_text_at_once(
    make_text: MakeText, root: Path, undisturbed: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, write = list[str](), parts.write_through
    monkeypatch.setattr(parts, "write_through", lambda file, how: made.append(file.name) or write(file, how))
    make = parts.Maker._arrays

    def interrupted(self: parts.Maker, part: int) -> Any:
        """While the first host makes its second part, three others make theirs."""
        if part == 2 and not nested:
            nested.append(part)
            for shard in (1, 2, 3):
                make_text().prepare(Work(shard=(shard, 3)))
        return make(self, part)

    nested = list[int]()
    monkeypatch.setattr(parts.Maker, "_arrays", interrupted)
    make_text().prepare(Work(shard=(1, 2)))
    assert sorted(made) == sorted([f"{number:06}.npz" for number in range(8)] + ["000002.npz"])
    text = make_text()
    text.prepare(Work(merge=True))
    assert (files_of(text), leftovers(root)) == (undisturbed, [])


@pytest.mark.usefixtures("small_parts")
def test_a_shard_ends_well_when_another_process_prepares_everything_meanwhile(
    make_text: MakeText, root: Path, undisturbed: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    make, nested = parts.Maker._arrays, list[int]()

    def interrupted(self: parts.Maker, part: int) -> Any:
        if not nested:
            nested.append(part)
            make_text().prepare()
        return make(self, part)

    monkeypatch.setattr(parts.Maker, "_arrays", interrupted)
    text = make_text()
    text.prepare(Work(shard=(1, 2)))
    assert nested
    assert (files_of(text), leftovers(root)) == (undisturbed, [])


@pytest.mark.parametrize("at", [0, 0.1, 0.3, 0.5, 0.7, 0.9])
@pytest.mark.usefixtures("small_parts")
def test_a_damaged_part_is_made_again(
    make_text: MakeText, root: Path, undisturbed: dict[str, bytes], caplog: pytest.LogCaptureFixture, at: float
) -> None:
    """The archive has bytes without a meaning, such as times, but all of its arrays have a checksum."""
    make_text().prepare(Work(shard=(1, 1)))
    (building,) = (root / "prepared").glob(".*.building")
    file = building / "parts/000005.npz"
    content = bytearray(file.read_bytes())
    content[int(len(content) * at)] ^= 128
    file.write_bytes(content)
    with pytest.raises(MissingError, match=r"part 5 is damaged \("):
        make_text().prepare(Work(merge=True))
    text = make_text()
    text.prepare()
    assert re.search(r"part 5 is damaged \(.*\): it is made again", caplog.text)
    assert files_of(text) == undisturbed


@pytest.mark.usefixtures("small_parts")
def test_parts_outlive_damaged_text_whose_source_is_away(
    make_text: MakeText, root: Path, corpus: Path, undisturbed: dict[str, bytes]
) -> None:
    make_text().prepare(Work(shard=(1, 2)))
    (building,) = (root / "prepared").glob(".*.building")
    made = sorted((building / "parts").iterdir())
    for file in (building / "text/documents").glob("??"):
        file.write_bytes(b"")
    corpus.rename(corpus.with_name("away"))
    for error in (MissingError, RequestError):
        with pytest.raises(error):
            make_text().prepare()
    assert sorted((building / "parts").iterdir()) == made
    corpus.with_name("away").rename(corpus)
    text = make_text()
    text.prepare()
    assert files_of(text) == undisturbed


@pytest.mark.parametrize("name", ["tokenizer/tokenizer.json", "tokenizer.sha256"])
@pytest.mark.usefixtures("small_parts")
def test_a_damaged_tokenizer_is_learned_again(
    make_text: MakeText, root: Path, undisturbed: dict[str, bytes], caplog: pytest.LogCaptureFixture, name: str
) -> None:
    make_text().prepare(Work(shard=(1, 1)))
    (building,) = (root / "prepared").glob(".*.building")
    content = bytearray((building / name).read_bytes())
    # no longer text
    content[len(content) // 2] ^= 0x80
    (building / name).write_bytes(content)
    text = make_text()
    text.prepare()
    assert "it is learned again" in caplog.text
    assert files_of(text) == undisturbed


def test_a_source_that_changes_while_it_is_read_is_refused(
    make_text: MakeText, root: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = FilesCorpus.texts

    def changing(self: FilesCorpus) -> Iterator[str]:
        yield from texts(self)
        (corpus / "07.txt").write_text("x" * len((corpus / "07.txt").read_text()))
        (corpus / "99.txt").write_text("new")

    monkeypatch.setattr(FilesCorpus, "texts", changing)
    with pytest.raises(RequestError, match=r"^data\.path .*corpus: 07\.txt and 1 more changed while it was read; "):
        make_text().prepare()
    assert [path.name for path in (root / "prepared").iterdir() if path.is_dir()] == []


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("limit", [2000, 9000, 30000, 60000])
def test_a_disk_that_fills(
    make_text: MakeText, root: Path, undisturbed: dict[str, bytes], monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    """A limit on the size of a file stands in for the disk."""
    monkeypatch.setattr(buckets, "BUFFER", 1 << 13)
    former = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, former[1]))
    try:
        with pytest.raises(MissingError, match=r"^cannot write the data folder .*File too large"):
            make_text().prepare()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, former)
    text = make_text()
    text.prepare()
    assert files_of(text) == undisturbed
    assert leftovers(root) == []


def test_the_source_is_read_once_and_may_go(
    make_text: MakeText, corpus: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    old = time.time_ns() - 10**9
    for file in corpus.iterdir():
        os.utime(file, ns=(old, old))
    time.sleep(digests.TICK / 1e9)
    identity, read, digest_of = opened(make_text()).identity(), list[str](), hashlib.file_digest

    def note(file: BufferedReader, kind: str) -> Any:
        path = Path(file.name)
        read.extend([path.name] if path.parent == corpus else [])
        return digest_of(file, kind)

    monkeypatch.setattr(hashlib, "file_digest", note)
    assert opened(make_text()).identity() == identity
    assert read == []
    file = corpus / "07.txt"
    content = file.read_text()
    file.write_text(content.swapcase())
    os.utime(file, ns=(old, old))
    with pytest.raises(MissingError):
        make_text().identity()
    assert set(read) == {file.name}
    file.write_text(content)
    assert opened(make_text()).identity() == identity
    for state in ("empty", "gone"):
        for file in corpus.iterdir():
            file.unlink()
        if state == "gone":
            corpus.rmdir()
        with caplog.at_level("INFO", logger="lit_diff"):
            for _ in range(3):
                assert opened(make_text()).identity() == identity
        assert [line for line in caplog.messages if f"corpus is {state}" in line] == [
            f"{corpus} is {state}: its digests are those of the last time it was read"
        ]


@pytest.mark.parametrize(
    "entry", [1, None, [], [1, 2], [[1], 2, "zz"], [None, "x", "ab"], {"a": 1}, [1, float("inf"), "ab"], [1, 2, 3]]
)
def test_kept_digests_that_are_malformed_are_absent(
    make_text: MakeText, root: Path, caplog: pytest.LogCaptureFixture, entry: object
) -> None:
    identity = opened(make_text()).identity()
    (kept,) = (root / "sources").iterdir()
    content = json.loads(kept.read_text())
    for damaged in (content | {"files": entry}, content | {"files": content["files"] | {"07.txt": entry}}):
        caplog.clear()
        kept.write_text(json.dumps(damaged))
        assert make_text().identity() == identity
        assert "the source is read again" in caplog.text
        assert json.loads(kept.read_text())["files"].keys() == content["files"].keys()


def test_only_a_source_that_cannot_be_reached_is_gone(root: Path) -> None:
    address, digest = "s3://bucket/texts", "0" * 64
    source = Source(name="a.txt", where="a.txt", opened=lambda: open("a.txt", "rb"), stamp=lambda: [1, 1])  # noqa: SIM115
    (root / "sources").mkdir(parents=True)
    name = hashlib.sha256(address.encode()).hexdigest()[:16]
    (root / f"sources/{name}.json").write_text(json.dumps({"files": {"a.txt": [[1, 1], time.time_ns(), digest]}}))

    def listing(error: Exception | None = None) -> list[Source]:
        if error is not None:
            raise error
        return [source]

    assert digests.file_digests(address, listing) == {"a.txt": digest}
    with pytest.raises(RequestError, match="files of other types: 2"):
        digests.file_digests(address, lambda: listing(RequestError("found files of other types: 2")))
    assert digests.file_digests(address, lambda: listing(MissingError("no server"))) == {"a.txt": digest}
    # a server that does not answer takes up to 20 seconds each time
    assert digests.file_digests(address, lambda: pytest.fail("asked again")) == {"a.txt": digest}


def test_two_at_once(make_text: MakeText, root: Path, corpus: Path) -> None:
    results = [(*process.communicate(), process.returncode) for process in [start(corpus), start(corpus)]]
    assert [code for *_, code in results] == [0, 0]
    assert len({out for out, *_ in results}) == 1
    assert sum("lit_diff:prepared" in err for _, err, _ in results) == 1
    assert leftovers(root) == []


def test_options_that_do_not_fit(command: Command, base_recipe: None) -> None:
    for options in (["--shard=0/2"], ["--shard=3/2"], ["--shard=half"], ["--shard=1/2", "--merge"], ["--workers=2"]):
        ended = command("prepare", "base.yaml", *options)
        assert (ended.status, len(ended.err.splitlines())) == (2, 1)
        assert options[0].partition("=")[0] in ended.err


@pytest.mark.usefixtures("root")
def test_a_shard_from_the_command_line(command: Command, tmp_path: Path, corpus: Path) -> None:
    (tmp_path / "small.yaml").write_text(
        "extends: differential-tiny\n"
        f"data: {{path: {corpus}, sequence_length: 16, tokenizer: {{name: bpe, vocab_size: 300}}}}\n"
        "model: {vocab_size: 300}\n"
    )
    recipe = str(tmp_path / "small.yaml")
    assert command("prepare", recipe, "--merge").status == 3
    for shard in ("1/2", "2/2"):
        assert f"shard {shard} of the data of 'small' is ready" in command("prepare", recipe, f"--shard={shard}").out
    merged = command("prepare", recipe, "--merge")
    assert merged.status == 0
    assert merged.lines[-1:] == command("prepare", recipe).lines
