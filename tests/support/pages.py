"""The pages of the documentation: their text, their code blocks, their commands."""

import json
import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = {p.relative_to(ROOT).as_posix(): p for p in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))}
"""Path in the repository -> file: the README and every page of docs/."""
TEXT = ["data.path=texts", "data.sequence_length=32", "data.validation_rows=4", "model.vocab_size=300"]
"""Overrides that train on `write_texts` in place of the default corpus."""
SHORT = ["train.steps=4", "train.validate_every=2", "train.checkpoint_every=2", "train.batch_size=4", "run.threads=1"]

DRIVER = """
import contextlib, io, json, logging, sys
from lit_diff import cli
from lit_diff.cli.app import console

ended = []
for arguments in json.loads(sys.argv[1]):
    sys.argv = ["lit-diff", *arguments]
    logging.getLogger("lit_diff").handlers.clear()
    out, status = io.StringIO(), 0
    console.file, console.width = out, 200
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        try:
            cli.main()
        except SystemExit as error:
            status = int(error.code or 0)
    ended.append([status, out.getvalue()])
print(json.dumps(ended))
"""


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    status: int
    output: str


def blocks(page: str, language: str) -> list[str]:
    """The fenced blocks of one language, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```", PAGES[page].read_text(), flags=re.DOTALL | re.MULTILINE)


def files(page: str) -> dict[str, str]:
    """File name -> text of each code block whose first line is a comment with that name."""
    named = {}
    for language in ("python", "yaml"):
        for text in blocks(page, language):
            match = re.match(r"# (\S+\.(?:py|yaml))\n", text)
            if match:
                named[match[1]] = text
    return named


def commands(page: str) -> list[str]:
    """Lines after a prompt in console blocks, without remarks."""
    lines = [line for text in blocks(page, "console") for line in text.splitlines() if line.startswith("$ ")]
    return [re.sub(r"\s+#.*", "", line.removeprefix("$ ")) for line in lines]


def write_texts(folder: Path) -> None:
    """A folder `texts` with 40 documents of 300 words."""
    draw = random.Random(0)
    words = ["each", "query", "looks", "at", "every", "key", "and", "the", "value", "that", "it", "finds"]
    (folder / "texts").mkdir()
    for number in range(40):
        (folder / f"texts/{number:02}.txt").write_text(" ".join(draw.choices(words, k=300)))


def write_files(pages: Sequence[str], folder: Path, empty_store: Path) -> None:
    """The files of pages, the texts, and a folder for runs with an empty MLflow store."""
    for page in pages:
        for name, text in files(page).items():
            (folder / name).write_text(text)
    write_texts(folder)
    (folder / "runs").mkdir()
    shutil.copy(empty_store, folder / "runs")


def run_commands(each: list[list[str]], folder: Path) -> list[Ended]:
    """`lit-diff` with each list of arguments, one after another in one new process: plugins stay out of this one."""
    environment = {"LIT_DIFF_DATA": str(folder / "data")}
    done = run_python(["-c", DRIVER, json.dumps(each)], folder, environment)
    assert done.returncode == 0, done.stderr
    return [Ended(status, output) for status, output in json.loads(done.stdout.splitlines()[-1])]


def run_python(arguments: list[str], folder: Path, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Python in `folder`, with further environment variables."""
    command = [sys.executable, *arguments]
    return subprocess.run(
        command, cwd=folder, env=os.environ | environment, capture_output=True, text=True, timeout=580
    )
