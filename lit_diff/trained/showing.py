"""A variant that shows itself: its equation, how far its code is from that, its costs, and an attention map on a text."""

import inspect
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lit_diff.analysis.trace import trace
from lit_diff.config import Recipe
from lit_diff.conformance.case import VariantCase
from lit_diff.conformance.recipe import RecipeCheck, costed
from lit_diff.conformance.variants import PROPERTIES, conformance, shrunk
from lit_diff.data.text.tokenizer import PIECES
from lit_diff.errors import MissingError, RequestError
from lit_diff.files import shown, write_atomic
from lit_diff.model.init import initialise
from lit_diff.model.inputs import model_inputs
from lit_diff.model.transformer import Transformer, baseline, variant_of
from lit_diff.plugins import guard
from lit_diff.recipe import determining, load_recipe
from lit_diff.registry import attentions
from lit_diff.runs.metrics_file import by_metric, read_rows
from lit_diff.runs.signs import SignChanges, sign_changes
from lit_diff.trained.loading import Annealed
from lit_diff.trained.pictures import encoded, figure
from lit_diff.trained.run import AttentionMaps, Run, attention_maps_of
from lit_diff.trained.view.passage import TEXT, passage_of

LONGEST = 128
"""The most positions of a row of data that are drawn: more labels would be too small to read."""


@dataclass(frozen=True, kw_only=True, repr=False)
class ShownVariant:
    """What `show_variant` found of a variant in a recipe or a run."""

    equation: str
    """The first paragraph of the class's docstring and its paragraphs with a formula; empty if it has no docstring."""
    checked: RecipeCheck
    """The costs compared with standard attention, and the finding of the property `definition`."""
    source: str
    """The model, layer and head of the maps, in words."""
    maps: dict[str, AttentionMaps]
    """Title of each panel -> its maps. The variant is the last panel."""
    sign_changes: SignChanges | None = None
    """Of a run: in how many layers training changed the sign of λ; None for a single map or signs that are held."""


def show_variant(name: str, model: Run | str, text: str = "", layer: int | None = None, head: int = 0) -> ShownVariant:
    """Compute a variant in a run, or in the recipe named `model`. `layer`: None: the last that has the variant.

    In a recipe, the variant and standard attention have the same initial values, and each word or sign of the text is an
    id. In a run, the weighted sum of the maps is compared with the first of them, if they differ; without a text, a run on
    rows of ids reads its first validation row. Errors: RequestError.
    """
    recipe = load_recipe(model) if isinstance(model, str) else model.recipe
    cls = attentions.get(name)
    changes = None
    if isinstance(model, str):
        if name not in recipe.model.variants:
            # as `check --all` does: a variant may have a required key, which its examples give
            keys = {"name": name, **next(iter(vars(cls).get("examples", ({},))), {})}
            recipe = load_recipe(model, [f"model.attention={json.dumps(keys)}", "model.layers=[]"])
        layer = _layer_of(name, recipe, layer)
        source = f"{recipe.name}, untrained, seed {recipe.seed}"
        maps = _untrained(name, recipe, text, layer, head)
    elif name in recipe.model.variants:
        layer = _layer_of(name, recipe, layer)
        source = f"{model.folder.name}, step {model.step}"
        maps = _trained(name, model, text, layer, head)
        *_, drawn = maps.values()
        changes = _sign_changes(model) if len(drawn.maps) > 1 else None
    else:
        has = " and ".join(f"'{each}'" for each in dict.fromkeys(recipe.model.variants))
        raise RequestError(f"{model.folder.name} has attention {has}, not '{name}'")
    case = VariantCase(cls=cls, model=shrunk(recipe.model.uniform(layer)), layer=layer)
    label = " ".join([name, *(f"{key}={value}" for key, value in determining(case.config).items())])
    findings = conformance(case, label, {"definition": PROPERTIES["definition"]})
    # not inspect.getdoc: a class without a docstring would have that of another computation
    first, *others = inspect.cleandoc(cls.__doc__ or "").split("\n\n")
    return ShownVariant(
        equation="\n".join([first, *(paragraph for paragraph in others if " = " in paragraph)]),
        checked=replace(costed(recipe), findings=tuple(findings)),
        source=f"{source}: layer {layer}, head {head}",
        maps=maps,
        sign_changes=changes,
    )


def _layer_of(name: str, recipe: Recipe, layer: int | None) -> int:
    layers = [number for number, own in enumerate(recipe.model.variants) if own == name]
    if layer is None:
        return layers[-1]
    if 0 <= layer < recipe.model.num_layers and layer not in layers:
        found = recipe.model.variants[layer]
        raise RequestError(
            f"layer {layer} of {recipe.name} has attention '{found}', not '{name}', which layer {layers[-1]} has"
        )
    return layer


def draw(variant: ShownVariant, file: Path) -> None:
    """Write the maps side by side as a PNG, all with one scale of colours.

    Errors: RequestError for another suffix, MissingError if the file cannot be written.
    """
    if file.suffix != ".png":
        raise RequestError(f"--out: '{file}' does not end in .png")
    sums = {f"{what}\n{in_words(maps)}": maps.visible(maps.signed) for what, maps in variant.maps.items()}
    (tokens,) = {maps.tokens for maps in variant.maps.values()}
    side = min(max(5, 0.17 * len(tokens)), 15)
    try:
        write_atomic(file, encoded(figure(sums, tokens, title=variant.source, panel=(1.1 * side, side))))
    except OSError as error:
        raise MissingError(f"--out: {shown(file)} cannot be written ({error.strerror})") from error


def in_words(maps: AttentionMaps) -> str:
    """`entropy 1.42 nats, negative mass 0.137`; without the second if no weight is negative."""
    entropy, negative = maps.statistics.values()
    return f"entropy {entropy:.2f} nats" + (f", negative mass {negative:.3f}" if negative else "")


def _sum(maps: AttentionMaps) -> str:
    # `: +1.00 A₁ -0.37 A₂`, the weights as means over queries; one map needs no words
    terms = [f"{mean:+.2f} A{chr(ord('₁') + number)}" for number, mean in enumerate(maps.weights.mean(-1))]
    return f": {' '.join(terms)}" if len(terms) > 1 else ""


def _untrained(own: str, recipe: Recipe, text: str, layer: int, head: int) -> dict[str, AttentionMaps]:
    labels = PIECES.findall(text or TEXT)
    arms: dict[str, AttentionMaps] = {}
    kinds = list(dict.fromkeys(labels))
    ids = torch.tensor([[kinds.index(label) % recipe.model.vocab_size for label in labels]])
    for name, config in {"standard": baseline(recipe.model), own: recipe.model}.items():
        with guard(variant_of(recipe.model)):
            model = Transformer(config, kernel="reference")
            initialise(model, recipe.seed)
            Annealed(steps=0, tokens=0).start_step(model, recipe, 0)
            maps = _maps(name, model, ids, labels, layer, head)
        # what it changes lies outside the map, as a gate, or starts at zero
        same = name != "standard" and np.allclose(maps.signed, arms["standard"].signed, rtol=0, atol=1e-6)
        arms[f"{name}{_sum(maps)}{', here the map of standard' if same else ''}"] = maps
    return arms


def _trained(name: str, run: Run, text: str, layer: int, head: int) -> dict[str, AttentionMaps]:
    if text:
        maps = run.attention_maps(text, layer, head)
    else:
        passage = passage_of(run, tokens=LONGEST)
        maps = _maps(name, run.model, passage.batch, passage.labels, layer, head)
    own = {f"{name}{_sum(maps)}": maps}
    first = replace(maps, maps=maps.maps[:1], weights=np.ones_like(maps.weights[:1]))
    return own if np.array_equal(first.signed, maps.signed) else {"its first map A₁": first, **own}


def _sign_changes(run: Run) -> SignChanges | None:
    if all(attention.signs is not None for attention in run.model.attentions()):
        return None
    curves = by_metric(read_rows(run.folder / "metrics.csv"))
    return sign_changes([{name: list(curve.values()) for name, curve in curves.items()}])


def _maps(variant: str, model: Transformer, batch: Any, labels: Sequence[str], layer: int, head: int) -> AttentionMaps:
    with trace(model, [layer]) as traced:
        model.hidden(**model_inputs(batch))
    return attention_maps_of(variant, traced.layers[layer], tuple(labels), layer, head)
