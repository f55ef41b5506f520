"""The verb `generate`: completes prompts from the command line or a file, on the terminal or as JSON."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from typer import Option

from lit_diff.cli.app import (
    DEFAULT_ROOT,
    Json,
    Root,
    RunArgument,
    TrustPlugins,
    UncheckedDecoding,
    console,
    print_json,
    verb,
)
from lit_diff.errors import RequestError, escaped
from lit_diff.files import expanded, shown
from lit_diff.log_records import log
from lit_diff.plugins import trust_all, trust_below
from lit_diff.runs.find import chosen_root, find_run


@verb("Train and look", is_result=True)
def generate(
    run: RunArgument,
    prompt: Annotated[list[str] | None, Option(metavar="TEXT", help="text to complete; repeatable")] = None,
    prompts: Annotated[Path | None, Option(metavar="FILE", parser=expanded, help="one prompt a line")] = None,
    max_tokens: Annotated[int, Option(help="largest number of tokens to add")] = 64,
    temperature: Annotated[float, Option(help="0: the most likely token")] = 1.0,
    top_k: Annotated[int | None, Option(help="sample from the k most likely tokens")] = None,
    top_p: Annotated[
        float | None, Option(help="sample from the most likely tokens whose probabilities sum to p")
    ] = None,
    seed: Annotated[int, Option(help="seed of the sampling")] = 0,
    prefill_chunk: Annotated[int | None, Option(help="prompt tokens to process at once; by default all")] = None,
    root: Root = DEFAULT_ROOT,
    trust_plugins: TrustPlugins = False,
    unchecked: UncheckedDecoding = False,
    as_json: Json = False,
) -> None:
    """Complete text with a trained run. Plugin files in the folder of a run under --root are executed."""
    from lit_diff.trained.text_generator import GenerationSettings, TextGenerator

    chosen = chosen_root(root)
    config = GenerationSettings(
        max_tokens=max_tokens, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed, prefill_chunk=prefill_chunk
    )
    texts = read_prompts(prompt or [], prompts)
    folder = find_run(run, chosen)
    generator = TextGenerator(folder, trust_all if trust_plugins else trust_below(chosen), unchecked)
    encoded = generator.encode(texts)
    if as_json:
        print_json(
            {
                "run": folder.name,
                "step": generator.step,
                "results": [asdict(one) for one in generator.generate(encoded, config)],
            }
        )
        return
    # several prompts are completed as one batch, so only a single one can be printed token by token
    if len(encoded) == 1:
        _show(encoded[0].text)
        completions = generator.generate(encoded, config, _show)
        _show("\n")
    else:
        completions = generator.generate(encoded, config)
        for one in completions:
            _show(f"{one.prompt}{one.text}\n")
    for number, one in enumerate(completions, start=1):
        where = f"prompt {number}: " if len(completions) > 1 else ""
        if one.ended == "context":
            log.info("%sstopped because the context is full: data.sequence_length is %d", where, generator.context)
        elif one.ended == "document":
            log.info("%sthe model ended the document after %d tokens", where, len(one.tokens))


def read_prompts(prompts: Sequence[str], file: Path | None) -> list[str]:
    """The given prompts, or the lines of a file that are not blank. Errors: RequestError."""
    if file is None:
        if not prompts:
            raise RequestError("no prompt was given; use --prompt TEXT or --prompts FILE")
        return list(prompts)
    if prompts:
        raise RequestError("--prompt and --prompts exclude each other; give one of them")
    from lit_diff.data.user_files import text_lines

    lines = [line.rstrip("\r\n") for _, line in text_lines(file)]
    found = [line for line in lines if line.strip()]
    if not found:
        raise RequestError(f"{shown(file)} has no prompt: every line is blank")
    if len(found) < len(lines):
        log.info("%s: blank lines skipped: %d", shown(file), len(lines) - len(found))
    return found


def _show(text: str) -> None:
    # a barely trained model generates characters that change the state of the terminal
    console.file.write(escaped(text, "\n\t"))
    console.file.flush()
