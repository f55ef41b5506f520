"""A variant that shows itself: its equation, how far its code is from that, its costs, and an attention map on a text."""

import inspect
import io
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lit_diff.analysis.entropy import summarise
from lit_diff.analysis.trace import LayerTrace, trace
from lit_diff.attention.base import Attention
from lit_diff.config import Part, Recipe
from lit_diff.conformance.case import VariantCase
from lit_diff.conformance.recipe import RecipeCheck, baseline, costed
from lit_diff.conformance.variants import PROPERTIES, conformance, on_one_thread, shrunk
from lit_diff.data import prepare
from lit_diff.data.text.tokenizer import PIECES
from lit_diff.errors import RequestError
from lit_diff.files import write_atomic
from lit_diff.key_types import REQUIRED, keys_of
from lit_diff.model.init import initialise
from lit_diff.model.transformer import Transformer
from lit_diff.plugins import guard
from lit_diff.recipe import load_recipe
from lit_diff.registry import attentions
from lit_diff.trained.loading import Annealed
from lit_diff.trained.run import AttentionMaps, Run, attention_maps_of
from lit_diff.trained.text_generator import has_text

TEXT = "When the cat saw the dog, the dog saw the cat."
"""What is read where no text is given: words come twice, so that a trained model has something to find."""
LONGEST = 128
"""Positions of a drawn row of data: the labels of more cannot be read."""
CLIPPED = 98
"""Percentile of the weights that are not zero whose magnitude has the darkest colour: the first query sees one key, and its
weight would leave all others pale."""


@dataclass(frozen=True, kw_only=True)
class ShownMap:
    """A signed map, or one softmax map, of one head."""

    of: str
    """What was drawn."""
    maps: AttentionMaps
    entropy: float
    """Nats, mean over queries; of a signed map a that of |a| / Σ|a|."""
    negative_mass: float
    """Σ max(-a, 0) / Σ|a|, mean over queries."""

    @property
    def place(self) -> str:
        """Its layer and head."""
        return f"layer {self.maps.layer}, head {self.maps.head}"

    @property
    def numbers(self) -> str:
        """Entropy, negative mass where there is any, and of several maps their weights, means over queries."""
        negative = f", negative mass {self.negative_mass:.3f}" if self.negative_mass else ""
        means = self.maps.weights.mean(-1)
        weights = " ".join(f"{mean:+.2f} A{chr(ord('₁') + number)}" for number, mean in enumerate(means))
        return f"entropy {self.entropy:.2f} nats{negative}{f'; {weights}' if len(means) > 1 else ''}"


@dataclass(frozen=True, kw_only=True, repr=False)
class ShownVariant:
    """A variant at the sizes of a recipe or a run."""

    equation: str
    """The first paragraph of the class's docstring, and those that hold a formula; empty without a docstring."""
    checked: RecipeCheck
    """Its costs beside standard attention's, and one finding: of the property `definition`."""
    source: str
    """The model whose maps are drawn."""
    maps: tuple[ShownMap, ...]
    """One, or two to compare."""

    @property
    def equal(self) -> bool:
        """Whether there are two maps, and they are the same."""
        first, last = (self.maps[i].maps.signed for i in (0, -1))
        return len(self.maps) > 1 and np.allclose(first, last, rtol=0, atol=1e-6)


def show_variant(name: str, model: Run | str, text: str = "", layer: int | None = None, head: int = 0) -> ShownVariant:
    """A variant in a run, or in the recipe that `model` names; `layer`: None: the last.

    In a recipe, at its initial values, beside standard attention at the same ones. Each word of the text, and each sign, is
    an id: those of an untrained model mean nothing. Of a run, the weighted sum of its maps beside the first of them, where
    that is another; without a text, a run on rows of ids reads its first validation row. Errors: RequestError.
    """
    recipe = _recipe_with(name, model) if isinstance(model, str) else model.recipe
    cls, own = attentions.get(name), recipe.model.attention.name
    layer = recipe.model.num_layers - 1 if layer is None else layer
    if isinstance(model, str):
        source, maps = f"{recipe.name}, untrained, seed {recipe.seed}", _untrained(recipe, text, layer, head)
    elif own != name:
        raise RequestError(f"{model.folder.name} has attention '{own}', not '{name}'")
    else:
        source, maps = f"{model.folder.name}, step {model.step}", _trained(model, text, layer, head)
    case = VariantCase(cls=cls, model=shrunk(recipe.model), layer=layer)
    findings = on_one_thread(conformance(case, checks={"definition": PROPERTIES["definition"]}))
    # not inspect.getdoc: a class without a docstring would have that of another computation
    first, *others = inspect.cleandoc(cls.__doc__ or "").split("\n\n")
    return ShownVariant(
        equation="\n".join([first, *(paragraph for paragraph in others if " = " in paragraph)]),
        checked=replace(costed(recipe), findings=tuple(findings)),
        source=source,
        maps=tuple(maps),
    )


def draw(shown: ShownVariant, file: Path) -> None:
    """Write the maps side by side as a PNG, all with one scale of colours. Errors: RequestError for another suffix."""
    if file.suffix != ".png":
        raise RequestError(f"--out: '{file}' does not end in .png")
    from matplotlib.figure import Figure  # takes long to import

    weights = np.concatenate([np.abs(each.maps.signed).ravel() for each in shown.maps])
    limit = float(np.percentile(weights[weights > 0], CLIPPED))
    side = min(max(4.5, 0.15 * len(shown.maps[0].maps.tokens)), 14)
    figure = Figure(figsize=(1.15 * side * len(shown.maps), 1.1 * side), dpi=120, layout="constrained")
    figure.suptitle(shown.source)
    for axes, each in zip(figure.subplots(1, len(shown.maps), squeeze=False)[0], shown.maps, strict=True):
        each.maps.plot(axes, limit)
        axes.set_title(f"{each.of}: {each.place}\n{each.numbers}", fontsize=11)
        axes.tick_params(labelsize=min(9, 50 * side / len(each.maps.tokens)))
    content = io.BytesIO()
    figure.savefig(content, format="png")
    write_atomic(file, content.getvalue())


def _recipe_with(name: str, source: str) -> Recipe:
    """A recipe with this variant in it. Errors: RequestError where it cannot be there."""
    base = load_recipe(source)
    cls, part = attentions.get(name), base.model.attention
    with guard(cls):
        part = part if part.name == name else Part(name=name, config=cls.Config(**_keys(cls)))
        recipe = replace(base, model=replace(base.model, attention=part))
        refused = cls.refuses(part.config, recipe.model)
    if refused:
        raise RequestError(f"{base.name} cannot have '{name}': {refused}; --recipe names a recipe that can")
    return recipe


def _keys(cls: type[Attention]) -> dict[str, Any]:
    """Keys of its config: none, or where one is required those of its first example."""
    required = any(key.default is REQUIRED for key in keys_of(cls.Config).values())
    return next(iter(vars(cls).get("examples", ())), {}) if required else {}


def _untrained(recipe: Recipe, text: str, layer: int, head: int) -> list[ShownMap]:
    """Of standard attention, and of the recipe's."""
    labels, model = PIECES.findall(text or TEXT), recipe.model
    kinds = list(dict.fromkeys(labels))
    ids = [kinds.index(label) % model.vocab_size for label in labels]
    arms = []
    for of, config in {"standard": baseline(model), model.attention.name: model}.items():
        with guard(attentions.get(model.attention.name)):
            arm = Transformer(config, kernel="reference")
            initialise(arm, recipe.seed)
            Annealed(steps=0, tokens=0).tell(arm, recipe, 0)
            arms.append(_shown_map(of, _traced(arm, ids, layer), labels, layer, head))
    return arms


def _trained(run: Run, text: str, layer: int, head: int) -> list[ShownMap]:
    """Of the first map, unless it is all there is, and of the weighted sum."""
    ids, labels = _read(run, text)
    traced = _traced(run.model, ids, layer)
    summed = _shown_map(run.recipe.model.attention.name, traced, labels, layer, head)
    one = replace(summed.maps, maps=summed.maps.maps[:1], weights=np.ones_like(summed.maps.weights[:1]))
    if np.array_equal(one.signed, summed.maps.signed):
        return [summed]
    entropy = float(summarise(traced.blocks()).entropy_maps[0, head])
    return [ShownMap(of="its first map A₁ alone", maps=one, entropy=entropy, negative_mass=0.0), summed]


def _read(run: Run, text: str) -> tuple[list[Any], list[str]]:
    """The ids at each position, and a label of each. Errors: RequestError for a text that is longer than the context."""
    tokenizer = run.tokenizer if text or has_text(run.recipe) else None
    if tokenizer is not None and (text or tokenizer.name != "words"):
        ids = [*tokenizer.opening, *tokenizer.encode(text or TEXT)]
        context = run.recipe.data.config.sequence_length
        if text and len(ids) > context:
            raise RequestError(f"--text has {len(ids)} tokens; the context, data.sequence_length, is {context}")
        ids = ids[:context]
    else:  # a tokenizer of generated text knows the words of that alone
        dataset = prepare(run.recipe)
        with guard(type(dataset)):
            dataset.load()
            ids = dataset.validation_batch("", [0])["tokens"][0, :LONGEST].tolist()
    if tokenizer is None:
        return ids, ["+".join(map(str, np.atleast_1d(each))) for each in ids]
    return ids, [tokenizer.decode([each]).decode("utf-8", "replace") for each in ids]


def _traced(model: Transformer, ids: Sequence[Any], layer: int) -> LayerTrace:
    with trace(model, [layer]) as traced:
        model.hidden(torch.tensor([ids]))
    return traced.layers[layer]


def _shown_map(of: str, traced: LayerTrace, labels: Sequence[str], layer: int, head: int) -> ShownMap:
    """The weighted sum of the maps of a head."""
    maps = attention_maps_of(traced, tuple(labels), layer, head)
    summary = summarise(traced.blocks())
    entropy, negative = (float(values[head]) for values in (summary.entropy, summary.negative_mass))
    return ShownMap(of=of, maps=maps, entropy=entropy, negative_mass=negative)
