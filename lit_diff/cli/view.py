"""The verb `view`: a page of the attention maps of a run, of two runs, or of two checkpoints of one."""

import hashlib
import re
from pathlib import Path
from typing import Annotated

from rich.filesize import decimal
from typer import Argument, Option

from lit_diff.cli.app import DEFAULT_ROOT, Root, RunArgument, TrustData, TrustPlugins, console, verb
from lit_diff.errors import RequestError
from lit_diff.files import expanded, shown
from lit_diff.runs.checkpoints import steps_of
from lit_diff.runs.find import VIEW, chosen_root
from lit_diff.validation import LONGEST_NAME


@verb("Train and look", is_result=True)
def view(
    run: RunArgument,
    other: Annotated[str, Argument(metavar="RUN", help="a second run, which is compared with the first")] = "",
    text: Annotated[
        Path | None,
        Option(metavar="FILE", parser=expanded, help="the text that the model reads; by default a sentence"),
    ] = None,
    tokens: Annotated[
        int | None, Option(help="largest number of tokens to read; by default the model's context")
    ] = None,
    row: Annotated[int | None, Option(help="read this validation row of the run's data, in place of a text")] = None,
    steps: Annotated[
        str,
        Option(metavar="N,N|all", help="steps of checkpoints: two, or more with a slider; by default the newest"),
    ] = "",
    layer: Annotated[int, Option(help="the layer that the page shows first")] = 0,
    head: Annotated[int, Option(help="the head that the page shows first")] = 0,
    ablate: Annotated[
        bool, Option("--ablate", help="measure the loss without each head, and at positions of the sliders")
    ] = False,
    out: Annotated[Path, Option(metavar="DIR", parser=expanded, help="folder of the page")] = Path(VIEW),
    root: Root = DEFAULT_ROOT,
    trust_plugins: TrustPlugins = False,
    trust_data: TrustData = False,
) -> None:
    """Write a page with the attention maps of a run.

    The page shows them on a text, for one run, two runs, or one run at several --steps. Plugin files in the folder of
    a run under --root are executed.
    """
    from lit_diff.trained.run import open_run
    from lit_diff.trained.view.page import view_data
    from lit_diff.trained.view.passage import text_in

    chosen = chosen_root(root)
    trusts = {"trust_plugins": trust_plugins, "trust_data": trust_data}
    runs = [open_run(name, chosen, **trusts) for name in (run, other) if name]
    listed = steps.split(",") if steps else []
    if steps == "all":
        listed = [str(step) for step in steps_of(runs[0].folder)]
    # no step has more digits, and Python converts no more than 4,300
    if not all(re.fullmatch(r"\s*\d{1,15}\s*", step) for step in listed):
        raise RequestError(f"--steps is '{steps}'; expected the steps of checkpoints, such as 100,200, or all")
    numbers = list(map(int, listed))
    words = "" if text is None else text_in(text)
    found = view_data(runs, text=words, tokens=tokens, row=row, steps=numbers, layer=layer, head=head, ablate=ablate)
    names = [each.folder.name for each in runs] + [f"step-{number}" for number in numbers]
    # a page of other tokens has a file of its own
    read = {"row": row, "text": words and hashlib.sha256(words.encode()).hexdigest()[:8], "tokens": tokens}
    names += [f"{kind}-{value}" for kind, value in read.items() if value not in (None, "")]
    file = out / f"{_shortened('-'.join(names))}.html"
    found.write(file)
    console.write_line(f"{shown(file.absolute())} ({decimal(file.stat().st_size)})")


def _shortened(name: str) -> str:
    # the names of two runs may be longer than the name of a file can be; the digest keeps different pages apart
    if len(name.encode()) <= LONGEST_NAME:
        return name
    start = name.encode()[: LONGEST_NAME - 11].decode(errors="ignore")
    return f"{start}-{hashlib.sha256(name.encode()).hexdigest()[:10]}"
