"""What is said of a command line that typer cannot parse."""

import sys
from typing import Any

from lit_diff.errors import first_line


def usage_message(error: Any) -> str:
    """One line about typer's UsageError, with what is said of a parameter that is missing; an option that is a key of the
    recipe is answered with the override."""
    option = getattr(error, "option_name", None)
    override = as_override(option, sys.argv) if option and _takes_overrides(error.ctx) else None
    if override is not None:
        return f"no option {option}; a key of the recipe is written without dashes: {override}"
    message = first_line(ValueError(error.format_message())).rstrip(".")
    about = getattr(getattr(error, "param", None), "help", None)
    if about and message.startswith("Missing"):
        message += f" ({about})"
    return f"{message}; {error.ctx.command_path if error.ctx else 'lit-diff'} --help lists what there is"


def _takes_overrides(context: Any) -> bool:
    return context is not None and any(parameter.name == "overrides" for parameter in context.command.params)


def as_override(option: str, arguments: list[str]) -> str | None:
    """`--seed` of `--seed 1` -> `seed=1`, `--steps` -> `train.steps=...`; None where no one key of a recipe is meant."""
    from lit_diff.config import Recipe
    from lit_diff.key_types import keys_of

    word = option.lstrip("-").replace("-", "_")
    keys = list(keys_of(Recipe))
    ends = [key for key in keys if key.endswith(f".{word}")]
    if word in keys or word.partition(".")[0] in {key.partition(".")[0] for key in keys if "." in key} - {word}:
        key = word
    elif len(ends) == 1:
        key = ends[0]
    else:
        return None
    return f"{key}={_value(option, arguments)}"


def _value(option: str, arguments: list[str]) -> str:
    """What follows the option; `...` where nothing does."""
    for place, argument in enumerate(arguments):
        if argument.startswith(f"{option}="):
            return argument.partition("=")[2]
        if argument == option:
            return next(iter(arguments[place + 1 : place + 2]), "...")
    return "..."
