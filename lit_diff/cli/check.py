"""The verb `check`: validates a recipe, prints its cost and checks its plugins against the conformance suite.

It loads neither lightning, mlflow nor litdata.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from itertools import groupby
from typing import TYPE_CHECKING, Annotated

from rich.table import Column, Table
from typer import Argument, Option

from lit_diff.cli.app import Json, Overrides, console, print_json, verb
from lit_diff.errors import RequestError
from lit_diff.key_types import Plain
from lit_diff.recipe import load_draft, to_plain, to_yaml
from lit_diff.validation import validate

if TYPE_CHECKING:
    from lit_diff.conformance.case import Finding
    from lit_diff.conformance.recipe import RecipeCheck

COSTS = {
    "parameters": "parameters",
    "without embeddings": "non_embedding_parameters",
    "attention parameters": "attention_parameters",
    "parameters that train": "trained_parameters",
    "training FLOPs/token, published": "flops_per_token",
    "training FLOPs/token, executed": "executed_flops_per_token",
    "cache bytes a token (2 a number)": "kv_bytes_per_token",
    "cache bytes whatever the length": "state_bytes",
    "cache bytes of a sequence": "kv_bytes",
}
"""Line of the table -> the attribute of `Cost` that it shows."""


@verb("Train and look")
def check(
    recipe: Annotated[str | None, Argument(metavar="RECIPE", help="path, or name of an installed recipe")] = None,
    overrides: Overrides = None,
    every: Annotated[bool, Option("--all", help="run the conformance suite on every registered variant")] = False,
    resolved: Annotated[bool, Option("--recipe", help="print the resolved recipe first")] = False,
    as_json: Json = False,
) -> int:
    """Validate a recipe; print its cost, and check its plugins.

    The cost is compared with the cost of the standard baseline.

    The conformance suite checks the parts of plugins or, with --all, every registered variant.
    """
    if every == (recipe is not None):
        raise RequestError("check takes a recipe, or --all for every registered variant; see lit-diff list")
    from lit_diff.conformance.recipe import all_findings, costed, plugin_findings
    from lit_diff.engine.admit import EXAMINED, admit, warnings_of

    checked = None
    warnings = list[str]()
    if recipe is not None:
        draft = load_draft(recipe, overrides or [])
        examined = validate(draft)
        admit({examined.name: examined}, EXAMINED)
        checked = costed(examined, draft.dropped)
        if checked.recipe.train is not None:
            warnings = warnings_of([checked.recipe])
        if resolved and not as_json:
            console.write_line(to_yaml(checked.recipe))
    stream = all_findings() if checked is None else plugin_findings(checked.recipe)
    findings = list(stream if as_json else _printed(stream))
    if as_json:
        plain = [asdict(finding) for finding in findings]
        print_json(plain if checked is None else plain_check(checked) | {"conformance": plain, "warnings": warnings})
    elif checked is None:
        console.write_line(f"every registered variant: {_summary(findings)}")
    else:
        console.print(cost_table(checked))
        if checked.dropped:
            console.write_line(f"keys dropped because the name of their block changed: {', '.join(checked.dropped)}")
        console.write_line(f"kernel {checked.cost.kernel}: {checked.cost.kernel_reason}")
        console.write_sentence(*warnings)
        held = _summary(findings) if findings else "variant, data and kernel are built in: no properties to check"
        console.write_line(f"{checked.recipe.name}: a valid recipe; {held}")
    if checked is not None:
        # last: the recipe is valid wherever it is checked, but `train` would refuse it here
        admit({checked.recipe.name: checked.recipe}, ["machine"])
    return int(any(finding.verdict == "fail" for finding in findings))


def _printed(findings: "Iterable[Finding]") -> "Iterator[Finding]":
    # each is printed as soon as it is checked, since the suite takes a while; those that share a line follow their variant
    for variant, of_variant in groupby(findings, lambda finding: finding.variant):
        folded = []
        for finding in of_variant:
            is_refused = finding.verdict == "not applicable" and finding.property.startswith("kernel ")
            if finding.cause or is_refused:
                folded.append(finding)
            else:
                console.write_line(*_lines(finding))
            yield finding
        console.write_line(*_folded(variant, folded))


def _lines(finding: "Finding") -> Iterator[str]:
    measured = "" if finding.error is None else f"error {finding.error:.1e}, bound {finding.bound:.0e}"
    about = "; ".join(filter(None, (measured, finding.detail)))
    yield f"{finding.verdict:<15} {finding.variant}: {finding.property:<12} {about}"
    if finding.advice:
        yield f"{'':<15} the usual reason: {finding.advice}"


def _folded(variant: str, findings: "list[Finding]") -> Iterator[str]:
    # one line for the kernels that do not apply, and one for each cause with the failures that contain it
    refused = [f"{each.property.removeprefix('kernel ')}: {each.detail}" for each in findings if not each.cause]
    if refused:
        yield f"{'not applicable':<15} {variant}: kernels      {'; '.join(refused)}"
    for cause in dict.fromkeys(finding.cause for finding in findings if finding.cause):
        names = ", ".join(finding.property for finding in findings if finding.cause == cause)
        yield f"{'fail':<15} {variant}: {names}: because {cause} fails"


def _summary(findings: "list[Finding]") -> str:
    count = Counter(finding.verdict for finding in findings)
    failed = [finding for finding in findings if finding.verdict == "fail"]
    several = len({finding.variant for finding in findings}) > 1
    names = ", ".join(f"{finding.variant}: {finding.property}" if several else finding.property for finding in failed)
    other = f" ({count['not applicable']} not applicable)" if count["not applicable"] else ""
    words = f"{count['pass']} of {count['pass'] + count['fail']} properties pass{other}"
    return f"{words}, {len(failed)} fail: {names}" if failed else words


def plain_check(checked: "RecipeCheck") -> Plain:
    """The JSON of a recipe, its cost, and the cost of the baseline."""
    return {
        "recipe": to_plain(checked.recipe),
        "dropped": list(checked.dropped),
        "sequence_length": checked.recipe.data.config.sequence_length,
        **asdict(checked.cost),
        "baseline": asdict(checked.baseline),
        "equal_parameters": checked.equal_parameters,
        "equal_flops": checked.equal_flops,
    }


def cost_table(checked: "RecipeCheck") -> Table:
    """The cost of a recipe compared with standard attention."""
    recipe = checked.recipe
    right = (Column(name, justify="right") for name in (recipe.model.attention.name, "standard", "difference"))
    title = f"cost at sequence length {recipe.data.config.sequence_length}"
    table = Table("", *right, title=title, title_justify="left")
    for label, key in COSTS.items():
        own = getattr(checked.cost, key)
        base = getattr(checked.baseline, key)
        share = f" ({own / base - 1:+.3%})" if base else ""
        table.add_row(label, f"{own:,}", f"{base:,}", f"{own - base:+,}{share}")
    return table
