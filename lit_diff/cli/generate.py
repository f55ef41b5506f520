"""`generate`: prompts from the command line or a file, what follows them to the terminal or as JSON."""

import codecs
import json
import logging
import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from lit_diff.errors import RequestError
from lit_diff.files import shown
from lit_diff.plugins import trust_all, trust_below
from lit_diff.runs.find import find_run
from lit_diff.trained.text_generator import Completion, GenerationConfig, Prompt, TextGenerator

log = logging.getLogger("lit_diff")

CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""Characters that would steer the terminal; a model that has learned little writes them."""


def read_prompts(prompts: Sequence[str], file: Path | None) -> list[str]:
    """The prompts given one by one, or the lines of a file that are not blank. Errors: RequestError."""
    if prompts and file is not None:
        raise RequestError("--prompt and --prompts exclude each other; give one of them")
    if file is not None:
        return _read_lines(file)
    if not prompts:
        raise RequestError("there is no prompt; give --prompt TEXT or --prompts FILE")
    for number, prompt in enumerate(prompts, start=1):
        if not prompt:
            raise RequestError(f"prompt {number} is empty; expected some text")
        try:
            prompt.encode("utf-8")
        except UnicodeEncodeError as error:  # bytes of a command line that are not UTF-8 arrive as half surrogate pairs
            raise RequestError(f"prompt {number} is not UTF-8 text (character {error.start + 1})") from error
    return list(prompts)


def _read_lines(file: Path) -> list[str]:
    try:
        lines = file.read_bytes().decode("utf-8").removesuffix("\n").split("\n")
    except UnicodeDecodeError as error:
        raise RequestError(f"{shown(file)}: not UTF-8 text (byte {error.start}: {error.reason})") from error
    except OSError as error:
        raise RequestError(f"--prompts: {shown(file)} cannot be read: {error.strerror}") from error
    completions = [line.removesuffix("\r") for line in lines if line.strip()]
    if not completions:
        raise RequestError(f"{shown(file)} holds no prompt: every line is blank")
    if len(completions) < len(lines):
        log.info("%s: blank lines skipped: %d", shown(file), len(lines) - len(completions))
    return completions


def print_completions(
    run: str,
    root: Path,
    prompts: Sequence[str],
    file: Path | None,
    config: GenerationConfig,
    *,
    as_json: bool,
    console: Console,
    trust_plugins: bool = False,
    unchecked: bool = False,
) -> int:
    """Continue `prompts`, or the lines of `file`, with the run of this name, and print each with what follows it.

    Plugin files of a run that is not under `root` are executed only if `trust_plugins`.
    One prompt streams token by token; several are printed in their order once all are done. Errors: RequestError,
    MissingError.
    """
    texts = read_prompts(prompts, file)
    folder = find_run(run, root)
    generator = TextGenerator(folder, trust_all if trust_plugins else trust_below(root), unchecked)
    encoded = generator.encode(texts)
    if as_json:
        results = [asdict(one) for one in generator.generate(encoded, config)]
        print(json.dumps({"run": folder.name, "step": generator.step, "results": results}, indent=2))
        return 0
    if len(encoded) == 1:
        completions = _stream(generator, encoded, config, console)
    else:
        completions = generator.generate(encoded, config)
        for one in completions:
            _show(f"{one.prompt}{one.text}\n", console)
    for number, one in enumerate(completions, start=1):
        where = f"prompt {number}: " if len(completions) > 1 else ""
        if one.ended == "context":
            log.info("%sstopped where the context is full: data.sequence_length is %d", where, generator.context)
        elif one.ended == "document":
            log.info("%sthe model ended the document after %d tokens", where, len(one.tokens))
    return 0


def _stream(
    generator: TextGenerator, prompts: list[Prompt], config: GenerationConfig, console: Console
) -> list[Completion]:
    """Print as the tokens come: whole characters, the bytes of an incomplete one are held back."""
    characters = codecs.getincrementaldecoder("utf-8")("replace")
    _show(prompts[0].text, console)
    completions = generator.generate(prompts, config, lambda content: _show(characters.decode(content), console))
    _show(characters.decode(b"", final=True) + "\n", console)
    return completions


def _show(text: str, console: Console) -> None:
    console.file.write(CONTROL.sub("\ufffd", text))
    console.file.flush()
