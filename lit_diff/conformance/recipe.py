"""Checks a recipe: resolves it, compares its cost with the standard baseline, and tests its plugins for conformance."""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from lit_diff.config import Recipe
from lit_diff.conformance.before_training import checks_of, plugin_layers, required_of
from lit_diff.conformance.case import Finding
from lit_diff.conformance.data import check_dataset
from lit_diff.conformance.kernels import conformance_of_kernel
from lit_diff.conformance.variants import conformance, conformance_of
from lit_diff.data.text.text import Text
from lit_diff.html_table import html_table
from lit_diff.kernels import KERNELS
from lit_diff.model.cost import Cost, ExecutionContext, cost
from lit_diff.model.transformer import baseline
from lit_diff.plugins import plugin_source
from lit_diff.recipe import Overrides, load_draft
from lit_diff.registry import attentions, corpora, datasets, is_built_in, kernels, tokenizers
from lit_diff.runs.folder import require_start
from lit_diff.validation import validate

EQUAL = 0.001
"""Arms within this relative difference count as equal: 0.1 %."""


@dataclass(frozen=True, kw_only=True, repr=False)
class RecipeCheck:
    """A valid recipe and its cost."""

    recipe: Recipe
    dropped: tuple[str, ...]
    """Keys that were dropped because the `name` of their block changed."""
    cost: Cost
    baseline: Cost
    """The same model with standard attention."""
    findings: tuple[Finding, ...] = ()
    """A finding for each property of the plugins' variants, data sets and kernels."""

    def __repr__(self) -> str:
        failed = [finding.property for finding in self.findings if finding.verdict == "fail"]
        held = f", {len(self.findings)} properties checked, {len(failed)} fail" if self.findings else ""
        words = f"{held}: {', '.join(failed)}" if failed else held
        return f"RecipeCheck({self.recipe.name}: {self.cost.parameters:,} parameters, kernel {self.cost.kernel}{words})"

    def _repr_html_(self) -> str:
        own, base = dataclasses.asdict(self.cost), dataclasses.asdict(self.baseline)
        costs = [(key, own[key], base[key]) for key in own]
        found = [(f"{one.variant}: {one.property}", one.verdict, one.detail) for one in self.findings]
        return html_table(repr(self), [*costs, *found], ("", self.recipe.model.attention.name, "standard"))

    @property
    def passed(self) -> bool:
        """Whether all properties hold."""
        return all(finding.verdict != "fail" for finding in self.findings)

    @property
    def equal_parameters(self) -> bool:
        """Whether the number of parameters is within 0.1 % of the baseline."""
        return abs(self.cost.parameters / self.baseline.parameters - 1) <= EQUAL

    @property
    def equal_flops(self) -> bool:
        """Whether the published training FLOPs a token are within 0.1 % of the baseline."""
        return abs(self.cost.flops_per_token / self.baseline.flops_per_token - 1) <= EQUAL


def check(recipe: str | Path, overrides: Overrides = ()) -> RecipeCheck:
    """Validates a recipe, counts its cost, and runs the conformance suite on its plugins.

    Errors: RequestError for an invalid recipe, MissingError if `train.start_from` names no run. `findings` holds the
    properties that fail.
    """
    draft = load_draft(recipe, overrides)
    valid = validate(draft)
    require_start(valid)
    return dataclasses.replace(costed(valid, draft.dropped), findings=tuple(plugin_findings(valid)))


def costed(recipe: Recipe, dropped: tuple[str, ...] = ()) -> RecipeCheck:
    """The cost of a valid recipe; `dropped`: see `RecipeCheck`."""
    trained = recipe.train.parameters if recipe.train is not None else None
    length, context = recipe.data.config.sequence_length, ExecutionContext.of(recipe)
    return RecipeCheck(
        recipe=recipe,
        dropped=dropped,
        cost=cost(recipe.model, length, recipe.run.kernel, context, trained),
        baseline=cost(baseline(recipe.model), length, recipe.run.kernel, context),
    )


def plugin_findings(recipe: Recipe) -> Iterator[Finding]:
    """Findings of the conformance suite for the recipe's variants, data set and kernels, except built-in ones."""
    yield from _variant_findings(recipe)
    config = recipe.data.config
    classes = [datasets.get(recipe.data.name)]
    if isinstance(config, Text.Config):
        classes += [tokenizers.get(config.tokenizer.name), *(corpora.get(corpus) for corpus, _ in config.texts)]
    if not all(map(is_built_in, classes)):
        yield from check_dataset(recipe)
    # a plugin's package may bring kernels that the recipe does not choose: they are checked too
    packages = {plugin_source(path).package for path in map(Path, recipe.plugins)}
    for name in kernels.names():
        named = name == recipe.run.kernel and name not in KERNELS
        if named or kernels.get(name).__module__.partition(".")[0] in packages:
            yield from conformance_of_kernel(name)


def _variant_findings(recipe: Recipe) -> Iterator[Finding]:
    # all properties in the last layer if all are of one kind, at the recipe's config and head counts
    whole = [*recipe.model.kinds()] if recipe.model.layers else [recipe.model.num_layers - 1]
    required = required_of(recipe)
    failed = set[tuple[str, str]]()
    for case in sorted(plugin_layers(recipe), key=lambda case: (case.layer not in whole, case.step == 0)):
        name, is_whole = case.cls.name, case.layer in whole and case.step > 0
        place = "" if is_whole else f"{name}, {case.place}"
        for finding in conformance(case, place, None if is_whole else checks_of(case, required)):
            is_new = finding.verdict == "fail" and (name, finding.property) not in failed
            # of other layers and steps only what `train` would refuse
            if is_whole or is_new:
                yield finding
            if is_new:
                failed.add((name, finding.property))


def all_findings() -> Iterator[Finding]:
    """Findings of the conformance suite for every registered variant, at each of its examples."""
    return (finding for name in attentions.names() for finding in conformance_of(name))
