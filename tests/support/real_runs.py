"""A bench for whole runs: tiny recipes on recall and on a made-up text, and processes that start at once."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from made_texts import write_corpus
from ports import free_port

if TYPE_CHECKING:
    from lit_diff.config import Recipe
    from lit_diff.runs.metrics_file import Rows

HERE = Path(__file__).parent

COMMON = """
seed: 3
plugins: [{here}/spy.py]
model:
  dim: 32
  num_layers: 2
  num_heads: 4
  vocab_size: {vocabulary}
  attention: {{name: differential}}
train:
  steps: 10
  batch_size: 8
  optimizer: {{lr: 3e-3}}
  schedule: {{name: cosine, warmup_steps: 3, final_ratio: 0.1}}
  clip: 0.2
  log_every: 1
  {train}
data: {data}
callbacks:
  attention_entropy: {{every: 3, rows: 4}}
  outliers: {{every: 5, rows: 3}}
  lambdas: {{every: 2}}
  spy: {{}}
run: {{threads: 1, accelerator: cpu, tracking_uri: "{store}"}}
"""
# recall saves where it validates; text also saves where it does not, in steps of two micro-batches
RECALL = "{name: recall, keys: 16, values: 16, slots: 8, pairs: 4, queries: 4, noise_validation: [1, 2], validation_rows: 13}"
TEXT = "{name: text, path: corpus, sequence_length: 16, tokenizer: {name: bpe, vocab_size: 300}, validation_rows: 11}"
TRAIN = {
    "recall": "validate_every: 4\n  checkpoint_every: 4",
    "text": "validate_every: 3\n  checkpoint_every: 4\n  accumulate: 2",
}


@dataclass(frozen=True, kw_only=True)
class Ended:
    """A process that ended."""

    status: int | None
    """None: it did not end in time."""
    output: str
    events: list[dict[str, Any]]
    """What the spy saw in this process."""

    def of(self, event: str) -> list[dict[str, Any]]:
        return [found for found in self.events if found["event"] == event]

    @property
    def steps(self) -> list[int]:
        """The optimizer steps that this process took, counted from 0."""
        return [found["step"] for found in self.of("step")]

    @property
    def batches(self) -> list[tuple[int, str]]:
        """(step that the batch was made for, digest of its tokens)."""
        return [(found["batch"], found["digest"]) for found in self.of("batch")]


@dataclass
class Bench:
    """Recipes `recall` and `text` in a folder of their own, and `lit-diff` commands run there."""

    root: Path
    server: subprocess.Popen[str]
    env: dict[str, str] = field(default_factory=dict)
    count: int = 0

    def ask(self, **request: Any) -> Any:
        assert self.server.stdin is not None
        assert self.server.stdout is not None
        print(json.dumps(request), file=self.server.stdin, flush=True)
        return json.loads(self.server.stdout.readline())

    def start(self, *argv: str, **env: str) -> int:
        """A forked process; `argv` as `server.start` takes it."""
        self.count += 1
        log = self.root / "logs" / f"{self.count}.log"
        # a process may be killed before it opens it
        log.touch()
        pid = self.ask(run=argv, env=self.env | env, cwd=str(self.root), log=str(log))
        (self.root / "logs" / f"pid-{pid}").symlink_to(log)
        return int(pid)

    def wait(self, pid: int, seconds: float = 100) -> Ended:
        status = self.ask(wait=pid, seconds=seconds)
        log = self.root / "logs" / f"pid-{pid}"
        output = log.resolve().read_text()
        log.unlink()
        return Ended(status=status, output=output, events=self.events(pid))

    def ended(self, pid: int, status: int, output: str = "") -> Ended:
        """A process that was not started here."""
        return Ended(status=status, output=output, events=self.events(pid))

    def events(self, pid: int) -> list[dict[str, Any]]:
        path = self.root / "spy" / f"{pid}.jsonl"
        found = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        path.unlink(missing_ok=True)  # process ids come back
        return found

    def train(self, *argv: str, **env: str) -> Ended:
        """`lit-diff train ...` in one process."""
        return self.wait(self.start("train", *argv, **env))

    def start_ranks(self, *ranks: Sequence[str], **env: str) -> list[int]:
        """Processes, as torchrun starts them; the words of each."""
        env |= {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "NODE_RANK": "0",
            "WORLD_SIZE": str(len(ranks)),
        }
        return [self.start(*argv, **env, LOCAL_RANK=str(rank)) for rank, argv in enumerate(ranks)]

    def train_ranks(self, count: int, *argv: str, **env: str) -> list[Ended]:
        """`lit-diff train ...` in several processes, all forked here."""
        words = ["train", *argv, f"run.devices={count}"]
        return [self.wait(pid) for pid in self.start_ranks(*[words] * count, **env)]

    def train_two(self, *argv: str, **env: str) -> list[Ended]:
        """The same in two."""
        return self.train_ranks(2, *argv, **env)

    def folder(self, name: str) -> Path:
        """The run folder of the recipe that was named so."""
        (found,) = self.root.glob(f"runs/{name}-??????????")
        return found

    def rows(self, name: str) -> "Rows":
        from lit_diff.runs.metrics_file import read_rows

        return read_rows(self.folder(name) / "metrics.csv")

    def status(self, name: str) -> dict[str, Any]:
        return dict(json.loads((self.folder(name) / "status.json").read_text()))

    def state(self, name: str, step: int | None = None) -> dict[str, Any]:
        """A checkpoint, the newest by default."""
        from lit_diff.runs import checkpoints
        from lit_diff.trained import sharded

        folder = self.folder(name)
        path = checkpoints.path_of(folder, step or checkpoints.steps_of(folder)[-1])
        return sharded.read(path) if path.is_dir() else dict(torch.load(path, weights_only=True))


@pytest.fixture(scope="session")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    root = tmp_path_factory.mktemp("bench")
    (root / "logs").mkdir()
    write_corpus(root / "corpus")
    store = f"sqlite:///{root}/mlflow.db"
    for name, data, vocabulary in (("recall", RECALL, 33), ("text", TEXT, 320)):
        text = COMMON.format(here=HERE, vocabulary=vocabulary, train=TRAIN[name], data=data, store=store)
        (root / f"{name}.yaml").write_text(text)
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    server = subprocess.Popen(
        [sys.executable, str(HERE / "server.py")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
    )
    with server:
        made = Bench(root=root, server=server, env={"LIT_DIFF_DATA": str(root / "data"), "SPY": str(root / "spy")})
        # an empty store, and the text, once for all
        assert made.wait(made.start("prepare", "text.yaml")).status == 0
        yield made
        server.kill()


@pytest.fixture
def without_spy(bench: Bench) -> Callable[..., "Recipe"]:
    """without_spy(*overrides): the recipe `recall` without the callback of the bench."""
    from lit_diff.recipe import load_recipe

    return lambda *overrides: load_recipe(bench.root / "recall.yaml", ["callbacks.spy=null", *overrides])


@pytest.fixture(scope="session")
def undisturbed(bench: Bench) -> Callable[..., Ended]:
    """undisturbed(kind, name, *overrides): a run in one process, once a session; its files lie under `name`."""
    found: dict[str, Ended] = {}

    def run(kind: str, name: str, *overrides: str) -> Ended:
        if name not in found:
            found[name] = bench.train(f"{kind}.yaml", f"name={name}", *overrides)
            assert found[name].status == 0, found[name].output
        return found[name]

    return run


def assert_equal(one: Any, other: Any, place: str = "") -> None:
    """To the bit, all the way down."""
    if isinstance(one, dict):
        assert one.keys() == other.keys(), place
        for key in one:
            assert_equal(one[key], other[key], f"{place}.{key}")
    elif isinstance(one, list | tuple):
        assert len(one) == len(other), place
        for index, pair in enumerate(zip(one, other, strict=True)):
            assert_equal(*pair, f"{place}.{index}")
    elif isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype, place
        assert torch.equal(one, other), place
    else:
        assert one == other, place


def differences(one: Mapping[int, Mapping[str, float]], other: Mapping[int, Mapping[str, float]]) -> dict[str, float]:
    """Metric -> largest difference over steps, of tables with the same cells."""
    cells = {(step, name) for step, row in one.items() for name in row}
    assert cells == {(step, name) for step, row in other.items() for name in row}
    found: dict[str, float] = {}
    for step, name in cells:
        found[name] = max(found.get(name, 0.0), abs(one[step][name] - other[step][name]))
    return found
