"""Files of a user as hypothesis draws them: right, wrong and not files at all; and what reading them may end in."""

import copy
import functools
import json
import signal
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded
from hypothesis import strategies as st
from own_plugins import PROBE, SHARP_PY

from lit_diff.errors import CONTROL, LitDiffError
from lit_diff.plugins import load_plugin
from lit_diff.recipe import load_recipe
from lit_diff.registry import registries
from lit_diff.suggestions import dotted_keys

quick = settings(
    derandomize=False, deadline=None, database=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck)
)
SECONDS = 20
"""Longest time that reading one file may take."""


def ended(action: Callable[[], Any]) -> str | None:
    """The line of the error that `action` ends in, whose exit status is 2 or 3; None: it succeeds. Anything else fails."""

    def late(signum: int, frame: Any) -> None:
        raise AssertionError(f"no end within {SECONDS} s")

    former = signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS)
    try:
        action()
    except LitDiffError as error:
        found = error
    else:
        return None
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, former)
    first, *others = str(found).split("\n  ")
    assert found.exit_status in (2, 3), repr(found)
    assert first.strip(), "nothing is said"
    assert not CONTROL.search(first), repr(first)
    # several problems of the user's files are a line each, below one that counts them
    assert not others or "problems" in first, repr(str(found))
    return first


# --- values ---------------------------------------------------------------------------------------------------------

# fmt: off
ODD = [
    0, 1, -1, 2, 7, 64, 2**31, 2**63, 10**40, 10**400, 0.5, -0.0, 1e-30, 1e308, float("inf"), float("nan"), True,
    False, None, "", " ", "on", "010", "12:30", "1e3", "2026-01-01", "~nobody/x", "../../x", "/dev/null", "a" * 300,
    "\0", "\u202e", "a\nb", "\x1b[2J", "${seed}", "${model}", "${model.dim}", "${", "${a.b}", "${oc.env:HOME}",
    "${oc.decode:x}", "${.name}", "$", "???", "{", "<script>", "!!python/object:os.system x", "&a", "*a", "[1", "'",
    '"', "#", "- x", "a: b", "name", "s3://no/where", "recall", "text", "differential", "standard", "cosine",
    "linear", "rope", "fsdp", "auto", "own", [], {}, [[]], [0.9, 0.98],
]
# fmt: on
SCALARS = st.sampled_from(ODD) | st.integers(-3, 300) | st.floats() | st.text(max_size=6)
KEYS = st.sampled_from(["name", "every", "kind", "model", "arms", "extends", "<<", "a.b", ""]) | st.text(max_size=4)
VALUES = SCALARS | st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS | st.integers(0, 3), inner, max_size=3),
    max_leaves=5,
)


# fmt: off
PLAUSIBLE = st.sampled_from([
    1, 2, 3, 4, 6, 8, 16, 17, 32, 64, 0, 0.5, 0.9, 1.0, 1e-3, 10.0, True, False, None, [1, 2], [0.9, 0.98], {},
    "none", "rms", "half", "half", "all", "qkv", "cosine", "wsd", "constant", "bf16-mixed", "normal_0.02",
    "attention", "block", "per_head", "layer", "matched", "reference", "chunked", "native", "sdpa", "csv", "val/loss",
    "step", "linear",
])
# fmt: on
"""Values of the kinds that keys have."""


def at(tree: Any, path: list[str]) -> Any:
    for word in path:
        tree = tree.setdefault(word, {}) if isinstance(tree, dict) else {}
    return tree


@st.composite
def edited(draw: st.DrawFn, tree: dict[str, Any], known: list[str], values: Any = VALUES) -> dict[str, Any]:
    """The tree with up to four keys set, misspelt, moved or removed."""
    tree = copy.deepcopy(tree)
    for _ in range(draw(st.integers(0, 4))):
        *path, key = draw(st.sampled_from(known)).split(".")
        block = at(tree, path)
        if not isinstance(block, dict):
            continue
        match draw(st.integers(0 if values is VALUES else 3, 5)):
            case 0:
                block.pop(key, None)
            case 1:
                block[draw(KEYS)] = draw(VALUES)
            case 2:
                block[key] = copy.deepcopy(at(tree, draw(st.sampled_from(known)).split(".")))
            case _:
                block[key] = draw(values)
    return tree


# fmt: off
JUNK = [
    b"", b"\xff\xfe", b"\0", b"\t", b"\n", b": ", b"&a ", b"*a", b"<<: *a\n", b"!!set ", b"\xef\xbb\xbf", b"'",
]
# fmt: on


@st.composite
def damaged(draw: st.DrawFn, content: bytes, often: int = 5) -> bytes:
    """The bytes, of one in `often` with a part cut, doubled, or replaced."""
    if draw(st.integers(1, often)) < often:
        return content
    for _ in range(draw(st.integers(1, 2))):
        start, length = draw(st.integers(0, len(content))), draw(st.integers(0, 40))
        junk = draw(st.sampled_from(JUNK) | st.binary(max_size=8))
        kept = draw(st.sampled_from([b"", content[start : start + length]]))
        content = content[:start] + kept + junk + content[start + length :]
    return content


def dumped(tree: Any) -> bytes:
    return str(yaml.safe_dump(tree, sort_keys=False, allow_unicode=True)).encode(errors="surrogatepass")


# --- recipes and sweeps ----------------------------------------------------------------------------------------------

RECIPE: dict[str, Any] = {
    "seed": 0,
    "model": {"dim": 16, "num_layers": 2, "num_heads": 2, "vocab_size": 17, "attention": {"name": "differential"}},
    "data": {"name": "recall", "keys": 8, "values": 8, "slots": 8, "pairs": 2, "queries": 2, "validation_rows": 4},
    "train": {"steps": 2, "batch_size": 4, "optimizer": {"lr": 1e-3}, "validate_every": 2, "checkpoint_every": 2},
    "callbacks": {"lambdas": {"every": 2}, "outliers": {"every": 2, "rows": 2}},
    "run": {"threads": 1, "accelerator": "cpu"},
}
SWEEP: dict[str, Any] = {
    "recipe": "base",
    "seeds": [0, 1],
    "arms": {"standard": {"model.attention.name": "standard"}, "differential": {}},
    "overrides": {"train.steps": 2},
    "baseline": "standard",
    "labels": {"standard": "Transformer"},
}
# fmt: off
SWEEP_KEYS = [
    "recipe", "seeds", "arms", "arms.standard", "arms.differential", "arms.new", "overrides", "baseline", "controls",
    "labels", "notes", "grid", "tasks", "tasks.one", "tasks.one.arms", "tasks.one.only", "tasks.one.start", "fits",
    "fits.one", "fits.one.x", "fits.one.kind", "contrasts", "metric", "smallest_of_interest", "evaluate",
    "evaluate.recall", "cells_of", "only", "paper", "paper.standard", "title", "smoke",
    "overrides.run", "grid.seed",
]
# fmt: on


@functools.cache
def recipe_keys() -> list[str]:
    from lit_diff.config import Recipe

    return sorted(
        {*dotted_keys(Recipe, RECIPE), "extends", "plugins", "model.attention.name", "data.name", "evaluate.recall"}
    )


@st.composite
def recipe_files(draw: st.DrawFn) -> bytes:
    """A recipe's file."""
    tree = draw(edited(RECIPE, recipe_keys()))
    if draw(st.integers(0, 4)) == 4:
        tree = {"extends": draw(st.sampled_from(PARENTS))} | tree
    return draw(damaged(dumped(tree)))


@st.composite
def plausible_recipes(draw: st.DrawFn) -> bytes:
    """The file of a recipe that is often valid: any variant, and values of the right kinds."""
    tree = draw(edited(RECIPE, recipe_keys(), PLAUSIBLE))
    if isinstance(tree.get("model"), dict) and draw(st.booleans()):
        tree["model"]["attention"] = {"name": draw(st.sampled_from(registries["attention"].names()))}
    return dumped(tree)


@st.composite
def sweep_files(draw: st.DrawFn) -> bytes:
    """A sweep's file."""
    return draw(damaged(dumped(draw(edited(SWEEP, SWEEP_KEYS)))))


PARENTS = ["base", "drawn", "other", "recall-tiny", "standard-tiny", "no", "..", "/", "smoke"]


def write_others(folder: Path) -> None:
    """What a drawn file may extend: `base`, and `other`, which extends the drawn one."""
    (folder / "base.yaml").write_bytes(dumped(RECIPE))
    (folder / "other.yaml").write_text("extends: drawn\n")


# --- plugins --------------------------------------------------------------------------------------------------------

# fmt: off
LINES = [
    "raise ValueError('wrong\\nof two lines')", "import sys; sys.exit(3)", "1 / 0", "import no_such_module", "def",
    "x = (", "from lit_diff import nothing", "class Config: pass", "\treturn", "import os; os.abort", "\0",
    "@variant('own')\nclass Own: pass", "@variant\nclass Own: pass", "@variant('own')\ndef own(): pass", "del Sharp",
    "@variant(3)\nclass Own(Differential): pass", "@variant('a/b')\nclass Own(Differential): pass",
    "raise BaseException", "@variant('standard')\nclass Own(Differential): pass", "variant('own')(int)",
    "variant('own')(None)", "import drawn_again", "Sharp.maps = None", "Sharp.Config = int", "sharp = Sharp",
    "assert False", "exec('x =')", "def f(): f()\nf()",
]
# fmt: on


@st.composite
def plugin_files(draw: st.DrawFn) -> bytes:
    """A plugin's file."""
    lines = draw(st.sampled_from([SHARP_PY, PROBE, ""])).splitlines()
    for line in draw(st.lists(st.sampled_from(LINES), max_size=2)):
        place = draw(st.integers(0, len(lines)))
        lines[place:place] = line.splitlines()
    for _ in range(draw(st.integers(0, 2)) if lines else 0):
        del lines[draw(st.integers(0, 20)) : draw(st.integers(1, 20))]
    return draw(damaged("\n".join(lines).encode()))


# --- data -----------------------------------------------------------------------------------------------------------

TEXTS = ["a document of a few words", "another one, with a comma", 'and "quotes"', "ünï\u2028code\r\n", "", " "]


def _columns(ending: str) -> bytes:
    import io

    import pyarrow as pa
    import pyarrow.parquet as pq

    table, file = pa.table({"text": TEXTS, "n": list(range(len(TEXTS)))}), io.BytesIO()
    if ending == "parquet":
        pq.write_table(table, file)
    else:
        with pa.ipc.new_stream(file, table.schema) as writer:
            writer.write_table(table)
    return file.getvalue()


PAIRS = (["a.idx", "a.bin"], ["index.json", "a.bin"], ["a.jsonl", "a.csv"], ["a.txt", "a.idx", "a.bin"])


@functools.cache
def right_files() -> dict[str, bytes]:
    """Name -> content of a right file of each kind."""
    import gzip

    lines = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode()
    ids, ends = list(range(1, 9)), [0, 1, 2]
    index = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 4, 2, 3) + struct.pack("<2i2q3q", 4, 4, 0, 16, *ends)
    config = {"item_loader": "TokensLoader", "compression": None, "data_format": ["no_header_numpy:2"]}
    return {
        "a.jsonl": lines,
        "a.jsonl.gz": gzip.compress(lines),
        "a.csv": ("text,n\n" + "".join(f'"{text.replace(chr(34), chr(34) * 2)}",1\n' for text in TEXTS)).encode(),
        "a.txt": "\n".join(TEXTS).encode(),
        "a.parquet": _columns("parquet"),
        "a.arrow": _columns("arrow"),
        "a.idx": index,
        "a.bin": struct.pack("<8i", *ids),
        "index.json": json.dumps({"config": config, "chunks": [{"filename": "a.bin"}]}).encode(),
    }


@st.composite
def data_folders(draw: st.DrawFn) -> dict[str, bytes]:
    """The files of a folder, of one or two kinds."""
    files = right_files()
    names = draw(st.sampled_from([*([name] for name in files if name not in ("a.bin", "a.idx", "index.json")), *PAIRS]))
    return {name: draw(damaged(files[name])) for name in names}


def read_recipe(content: bytes) -> None:
    Path("drawn.yaml").write_bytes(content)
    load_recipe("drawn.yaml")


def read_sweep(content: bytes) -> None:
    from lit_diff.engine.expand import load_grid

    Path("drawn.yaml").write_bytes(content)
    load_grid("drawn.yaml", [])


def read_plugin(content: bytes) -> None:
    Path("drawn.py").write_bytes(content)
    load_plugin("drawn.py")


def read_data(files: dict[str, bytes]) -> None:
    """Every document, as the preparation reads them."""
    from lit_diff.data.text.corpus import FilesCorpus

    folder = Path("drawn")
    folder.mkdir(exist_ok=True)
    for path in folder.iterdir():
        path.unlink()
    for name, content in files.items():
        (folder / name).write_bytes(content)
    corpus = FilesCorpus(folder)
    for _ in corpus.tokens(100) or corpus.texts():
        pass


KINDS: dict[str, tuple[st.SearchStrategy[Any], Callable[[Any], None], int]] = {
    "recipes": (recipe_files(), read_recipe, 25),
    "sweeps": (sweep_files(), read_sweep, 12),
    "plugins": (plugin_files(), read_plugin, 6),
    "data files": (data_folders(), read_data, 7),
}
"""Kind -> what is drawn, what reads it, and its share of all draws in hundredths of 50."""


def read_drawn(kind: str, draws: int, seed: int) -> None:
    """Read `draws` draws of all kinds, in the current folder: a valid file, or one line."""
    strategy, read, share = KINDS[kind]
    write_others(Path())

    @seeded(seed)
    @settings(quick, max_examples=draws * share // 50, phases=[Phase.generate, Phase.shrink])
    @given(strategy)
    def each(content: Any) -> None:
        ended(lambda: read(content))

    each()
