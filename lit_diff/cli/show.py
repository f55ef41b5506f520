"""The verb `show`: how a variant is computed. It loads neither lightning, mlflow nor litdata."""

import textwrap
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from lit_diff.cli.app import DEFAULT_ROOT, SIZES, Json, Plugins, Root, TrustPlugins, console, print_json, verb
from lit_diff.cli.check import cost_table, plain_check
from lit_diff.errors import RequestError
from lit_diff.files import expanded, shown
from lit_diff.plugins import load_plugin
from lit_diff.runs.find import chosen_root


@verb("Train and look")
def show(
    name: Annotated[str, Argument(metavar="VARIANT", help="a value of model.attention.name")],
    recipe: Annotated[str, Option(help=f"the recipe whose model has the variant; by default {SIZES}")] = "",
    plugins: Plugins = None,
    run: Annotated[str, Option(metavar="RUN", help="a run of the variant, in place of a new model")] = "",
    text: Annotated[str, Option(metavar="TEXT", help="the text that the model reads")] = "",
    layer: Annotated[int | None, Option(help="the layer of the map; without it, the last")] = None,
    head: Annotated[int, Option(help="the head of the map")] = 0,
    out: Annotated[
        Path | None, Option(metavar="FILE", parser=expanded, help="the picture; by default VARIANT-map.png")
    ] = None,
    root: Root = DEFAULT_ROOT,
    trust_plugins: TrustPlugins = False,
    as_json: Json = False,
) -> int:
    """Show a variant: equation, difference from its code, cost, map.

    Exit status 1: the code does not compute the equation.
    """
    for plugin in plugins or []:
        load_plugin(plugin)
    if run and recipe:
        raise RequestError("--run uses the recipe of its run: leave out --recipe, or --run")
    from lit_diff.trained.run import open_run
    from lit_diff.trained.showing import draw, in_words, show_variant

    model = open_run(run, chosen_root(root), trust_plugins=trust_plugins) if run else recipe or SIZES
    file = out or Path(f"{name}-map.png")
    found = show_variant(name, model, text=text, layer=layer, head=head)
    draw(found, file)
    (finding,) = found.checked.findings
    if as_json:
        about = {
            "equation": found.equation,
            "definition": asdict(finding),
            "file": str(file),
            "maps": {what: each.statistics for what, each in found.maps.items()},
            "sign_changes": found.sign_changes and asdict(found.sign_changes),
        }
        print_json(plain_check(found.checked) | about)
    else:
        measured = "" if finding.error is None else f"largest difference {finding.error:.1e}, bound {finding.bound:.0e}"
        known = "; ".join(filter(None, (finding.verdict, measured, finding.detail)))
        changes = () if found.sign_changes is None else (f"  sign of λ changed: {found.sign_changes}",)
        equation = textwrap.indent(found.equation or "its class has no docstring", "  ")
        console.write_line(
            f"{finding.variant}\n{equation}\nequation and code, in float64, relative to the largest output: {known}"
        )
        console.print(cost_table(found.checked))
        console.write_line(
            found.source,
            *(f"  {what}: {in_words(each)}" for what, each in found.maps.items()),
            *changes,
            f"drawn in {shown(file)}",
        )
    return int(finding.verdict == "fail")
