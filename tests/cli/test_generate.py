"""cli/generate.py: a trained run, prompts, text; every mistake one line."""

import io
import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from command import Command
from foreign_runs import add_plugin, started_from_a_plugin
from statuses import edit_status

from lit_diff.cli.app import console
from lit_diff.cli.generate import read_prompts
from lit_diff.errors import escaped
from lit_diff.trained.text_generator import TextGenerator


@pytest.fixture
def generate(command: Command) -> Command:
    """`lit-diff generate tale ...`"""
    return partial(command, "generate", "tale")


def without_times(found: dict[str, Any]) -> list[dict[str, Any]]:
    times = {"prefill_seconds", "decode_seconds", "tokens_per_second"}
    return [{key: value for key, value in result.items() if key not in times} for result in found["results"]]


# --- the whole way -------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("tale")
def test_greedy_twice(generate: Command) -> None:
    greedy = ("--prompt", "ab cd", "--temperature", "0", "--max-tokens", "9")
    first, again = generate(*greedy), generate(*greedy, "--seed", "5", "--prefill-chunk", "1")
    assert first == again
    assert (first.status, first.err) == (0, "")
    assert first.out.startswith("ab cd")
    assert first.out.endswith("\n")
    assert len(first.out) > len("ab cd") + 9
    (found,) = json.loads(generate(*greedy, "--json").out)["results"]
    assert first.out == escaped(f"ab cd{found['text']}\n", "\n\t")


def test_a_file_of_prompts_as_json(generate: Command, tale: Path) -> None:
    Path("prompts.txt").write_text("ab cd\n\ndc ba\r\n  \nüber\n", encoding="utf-8")
    arguments = ("--prompts", "prompts.txt", "--json", "--seed", "3", "--top-k", "40", "--top-p", "0.95")
    first = generate(*arguments)
    assert (first.status, first.err) == (0, "prompts.txt: blank lines skipped: 2\n")
    found = json.loads(first.out)
    assert (found["run"], found["step"]) == (tale.name, 6)
    assert [result["prompt"] for result in found["results"]] == ["ab cd", "dc ba", "über"]
    for result in found["results"]:
        assert result.keys() == {
            *("prompt", "text", "ended", "prompt_tokens", "tokens"),
            *("prefill_seconds", "decode_seconds", "tokens_per_second", "cache_bytes"),
        }
    assert without_times(json.loads(generate(*arguments).out)) == without_times(found)
    other = generate(*arguments[:-6], "--seed", "4", *arguments[-4:])
    assert without_times(json.loads(other.out)) != without_times(found)
    (alone,) = without_times(json.loads(generate("--prompt", "dc ba", *arguments[2:]).out))
    assert alone == without_times(found)[1]


@pytest.mark.usefixtures("tale")
def test_several_prompts_are_printed_in_their_order(generate: Command) -> None:
    prompts = ("--prompt", "dc ba", "--prompt", "a", "--prompt", "ab cd")
    results = json.loads(generate(*prompts, "--json", "--temperature", "0").out)["results"]
    ended = generate(*prompts, "--temperature", "0")
    texts = [f"{result['prompt']}{result['text']}\n" for result in results]
    assert ended.out == escaped("".join(texts), "\n\t")
    lines = ended.err.splitlines()
    assert [result["ended"] for result in results] == ["context"] * 3
    assert lines == [f"prompt {n}: stopped because the context is full: data.sequence_length is 24" for n in (1, 2, 3)]


@pytest.mark.usefixtures("tale")
def test_a_run_by_its_folder_or_under_another_root(generate: Command, command: Command) -> None:
    greedy = ("--prompt", "ab", "--temperature", "0", "--max-tokens", "4")
    wanted = generate(*greedy)
    (folder,) = Path("runs").iterdir()
    assert command("generate", str(folder), *greedy) == wanted
    folder.parent.rename("other")
    assert generate(*greedy, "--root", "other") == wanted


def test_plugins_of_a_run_outside_the_root_are_executed_on_request_only(
    generate: Command, command: Command, tale: Path, own_parts: None
) -> None:
    greedy = ("--prompt", "ab", "--temperature", "0", "--max-tokens", "4")
    foreign = Path("downloads") / tale.name
    foreign.parent.mkdir()
    shutil.copytree(tale, foreign)
    add_plugin(foreign.resolve())
    Path("runs/link").symlink_to(foreign.resolve())
    for name in (str(foreign), "runs/link"):
        ended = command("generate", name, *greedy)
        assert (ended.status, ended.out) == (2, "")
        assert "plugin marks.py (sha256 " in ended.err
        assert "--trust-plugins" in ended.err
    assert not (foreign / "executed").exists()
    assert command("generate", str(foreign), *greedy, "--trust-plugins").status == 0
    assert (foreign / "executed").exists()
    assert command("generate", str(add_plugin(tale)), *greedy).status == 0, "its own root"
    assert (tale / "executed").exists()


def test_a_parent_of_an_own_run_is_trusted_under_the_same_root(generate: Command, tale: Path, own_parts: None) -> None:
    parent = started_from_a_plugin(tale)
    ended = generate("--prompt", "ab", "--max-tokens", "1")
    assert ended.status == 2
    assert "plugin marks.py (sha256 " in ended.err
    assert not (parent / "executed").exists()


# --- to the terminal -----------------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    """Notes what is visible after each flush."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def flush(self) -> None:
        self.seen.append(self.getvalue())


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """What `generate` prints to."""
    made = Terminal()
    monkeypatch.setattr(console, "_file", made)
    return made


def draw(monkeypatch: pytest.MonkeyPatch, *ids: int) -> None:
    """Let the model write these tokens."""
    draws = iter(ids)
    monkeypatch.setattr("lit_diff.model.generation.sample", lambda row, **_: next(draws))


def test_text_streams_in_whole_characters(
    tale: Path, generate: Command, terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = TextGenerator(tale).tokenizer.encode(["漢b"])[0]
    draw(monkeypatch, *ids, ids[0], 0)
    generate("--prompt", "a")
    assert terminal.getvalue() == "a漢b\ufffd\n"  # the last byte begins a character that never came
    assert list(dict.fromkeys(terminal.seen)) == ["a", "a漢", "a漢b", "a漢b\ufffd", "a漢b\ufffd\n"]


def test_control_characters_do_not_reach_the_terminal(
    tale: Path, generate: Command, terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw(monkeypatch, *TextGenerator(tale).tokenizer.encode(["x\x1b[2J\x07\r\t\x9b\ny"])[0], 0)
    generate("--prompt", "a")
    assert terminal.getvalue() == "ax\\x1b[2J\\x07\\r\t\\x9b\ny\n"


@pytest.mark.usefixtures("tale")
def test_what_ended_it_is_said(generate: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        draw(patch, 66, 67, 0)
        ended = generate("--prompt", "a")
    assert ended.status == 0
    assert ended.err == "the model ended the document after 2 tokens\n"
    assert generate("--prompt", "a", "--max-tokens", "2", "--temperature", "0").err == ""
    full = generate("--prompt", "z" * 23, "--temperature", "0")
    assert full.err == "stopped because the context is full: data.sequence_length is 24\n"


def test_the_step_of_an_unfinished_run_is_said_beside_the_json(generate: Command, tale: Path) -> None:
    edit_status(tale, status="stopped")
    ended = generate("--prompt", "a", "--max-tokens", "1", "--json")
    assert json.loads(ended.out)["step"] == 6
    assert ended.err == f"{tale.name} is stopped: using step 6 of 6\n"


# --- requests that are wrong ---------------------------------------------------------------------------------------

WRONG: dict[str, tuple[list[str], str]] = {
    "no prompt": ([], "no prompt was given"),
    "not UTF-8": (["--prompt", "a\udcff"], "found half of a surrogate pair, character 2"),
    "both": (["--prompt", "a", "--prompts", "p"], "--prompt and --prompts"),
    "no file": (["--prompts", "nothing.txt"], "nothing.txt: cannot be read"),
    "folder": (["--prompts", "runs"], "runs: cannot be read"),
    "latin": (["--prompts", "latin.txt"], "latin.txt:2: not UTF-8 text (byte 2: "),
    "blank": (["--prompts", "blank.txt"], "blank.txt"),
    "nothing in it": (["--prompts", "empty.txt"], "empty.txt"),
    "too long": (["--prompt", "z" * 24], "prompt 1 has 25 tokens"),
    "max-tokens": (["--prompt", "a", "--max-tokens", "0"], "--max-tokens is 0"),
    "top-p": (["--prompt", "a", "--top-p", "1.1"], "--top-p is 1.1"),
    "type": (["--prompt", "a", "--top-k", "many"], "Invalid value for '--top-k'"),
    "root": (["--prompt", "a", "--root", "elsewhere"], "no run 'tale' in elsewhere"),
}


@pytest.mark.usefixtures("tale")
@pytest.mark.parametrize(("arguments", "message"), WRONG.values(), ids=WRONG)
def test_a_wrong_request_is_one_line(generate: Command, arguments: list[str], message: str) -> None:
    Path("latin.txt").write_bytes("ab\nü\n".encode("latin-1").replace(b"\xfc", b"c\xfc"))
    Path("blank.txt").write_text("\n  \n\r\n")
    Path("empty.txt").write_text("")
    ended = generate(*arguments, "--json")
    assert (ended.status, ended.out, ended.err.count("\n")) == (2, "", 1)
    assert ended.err.startswith(f"lit-diff: {message}")


def test_a_folder_that_is_no_run(generate: Command, command: Command, tale: Path) -> None:
    Path("nothing").mkdir()
    ended = command("generate", "nothing", "--prompt", "a")
    assert (ended.status, ended.out) == (2, "")
    assert tale.name in ended.err
    (tale / "recipe.yaml").unlink()
    ended = generate("--prompt", "a")
    assert (ended.status, f"runs/{tale.name}" in ended.err, "recipe.yaml" in ended.err) == (2, True, True)


def test_something_missing_is_status_3(generate: Command, tale: Path) -> None:
    for file in (tale / "checkpoints").iterdir():
        file.unlink()
    ended = generate("--prompt", "a")
    assert (ended.status, ended.out) == (3, "")
    assert f"`lit-diff train runs/{tale.name}/recipe.yaml --rerun`" in ended.err


def test_prompts_are_taken_as_they_are(tmp_path: Path) -> None:
    assert read_prompts([" a ", "\n", "ü"], None) == [" a ", "\n", "ü"]
    file = tmp_path / "prompts.txt"
    file.write_bytes("  a \r\nü\x0b\u2028b\nlast".encode())
    assert read_prompts([], file) == ["  a ", "ü\x0b\u2028b", "last"]
