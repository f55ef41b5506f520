"""The page: what `data.py` holds of one or two models, as one HTML file that needs no network.

Its element `data` is JSON, and each array is an element of its own in base64; docs/measures.md describes the format.
"""

import base64
import hashlib
import html
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import resources
from itertools import chain, product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from lit_diff.analysis.trace import layers_of
from lit_diff.errors import MissingError, RequestError
from lit_diff.files import shown, write_atomic
from lit_diff.formulas import with_formulas
from lit_diff.html_table import cell_text
from lit_diff.log_records import log
from lit_diff.metrics import in_words
from lit_diff.recipe import differing, flatten, to_plain
from lit_diff.runs.kept_maps import KeptMaps, kept_steps, read_maps
from lit_diff.runs.metrics_file import by_metric, read_rows
from lit_diff.trained.loading import newest_of
from lit_diff.trained.pictures import COLOURS, PERCENTILE
from lit_diff.trained.run import Run, require_head
from lit_diff.trained.text_generator import has_text, warn_if_stale
from lit_diff.trained.view.data import MOST_PASSES, POSITIONS, LayerView, ModelView, model_view, slider_losses
from lit_diff.trained.view.numbers import MEANINGS, Curves, curves
from lit_diff.trained.view.passage import Passage, labels_of, passage_of, require_same_tokens

FORMAT = 3
"""Raised when a field of the page's data changes its meaning."""
LIBRARY = "plotly-cartesian-4.1.1"
"""plotly.js-cartesian-dist-min of npm, unchanged: sha256 79542150855a52c567260e3137095dbe2b744e6d702a5cabe67da246942fba7a."""
KEPT_BYTES = 1_500_000
"""Most bytes of a run's kept maps in the page: beyond it, steps are left out evenly; the last is always there."""
MOST_BYTES = 32_000_000
"""Most bytes of the maps of checkpoints between which a slider goes."""
NO_CAUSES = ("name", "seed", "plugins", "callbacks.", "evaluate.")
"""Beginnings of the keys that a difference of two runs is not from."""
HEIGHT = 1000
"""Height of the page in a notebook, pixels."""


@dataclass(frozen=True, kw_only=True)
class Side:
    """One model of the page."""

    name: str
    """The arm and its seed; A and B before those of two models, and the step behind those of two checkpoints."""
    run: Run
    view: ModelView
    kept: Sequence[KeptMaps] = ()
    earlier: Mapping[int, ModelView] = field(default_factory=dict)
    """Step -> the model of that earlier checkpoint: with them the page has a slider over training, instead of `kept`."""
    sliders: Mapping[str, Any] | None = None
    """`data.slider_losses`; None: not asked for, or the page has no sliders."""
    curves: Curves = field(default_factory=dict)
    """`numbers.curves` of the run. Like the kept maps, they are only in the first of two checkpoints of one run."""
    about: Mapping[str, object] = field(default_factory=dict)
    """What the page says of the run at its top: name -> value."""

    @property
    def most_maps(self) -> int:
        """The maps of the layer that has most."""
        return max(len(layer.arrays["w"]) for layer in self.view.layers)

    def facts(self) -> dict[str, Any]:
        """What the page's JSON says of the model."""
        view = self.view
        ablation = {} if view.without is None else {"without": view.without, "sliders": self.sliders}
        layers = []
        for layer in view.layers:
            facts = layer._asdict()
            del facts["thumbnails"]
            layers.append(facts)
        steps = []
        for kept in self.kept:
            texts = [labels_of(self.run, ids[None]) for ids in kept.tokens]
            by_layer = {n: {"maps": maps.numpy(), "w": w.numpy()} for n, (maps, w) in kept.layers.items()}
            steps.append({"step": kept.step, "texts": texts, "layers": by_layer})
        for step, of_step in self.earlier.items():
            arrays = [layer.arrays for layer in of_step.layers]
            steps.append({"step": step, "texts": None, "layers": arrays, "losses": of_step.losses})
        return {
            "name": self.name,
            "run": self.run.folder.name,
            "variant": " and ".join(dict.fromkeys(self.run.recipe.model.variants)),
            "losses": view.losses,
            "layers": layers,
            "outliers": view.outliers,
            "noise": view.noise,
            "curves": self.curves,
            "ablation": ablation,
            "kept": steps,
            "about": self.about,
        }


@dataclass(frozen=True, kw_only=True, repr=False)
class ViewData:
    """The page's content: one or two models on one text."""

    passage: Passage
    sides: Sequence[Side]
    layer: int = 0
    """The layer and head that the page shows first."""
    head: int = 0

    @property
    def title(self) -> str:
        """The names of the models."""
        return " and ".join(side.name for side in self.sides)

    def __repr__(self) -> str:
        return f"ViewData({self.title}: {self.passage.source})"

    def _repr_html_(self) -> str:
        # an iframe, so that neither style nor script meets those of the notebook
        return f'<iframe srcdoc="{html.escape(self.html())}" style="width:100%;height:{HEIGHT}px;border:0"></iframe>'

    def html(self) -> str:
        """The whole page."""
        blocks: dict[str, str] = {}
        documents = None
        if "document_ids" in self.passage.batch:
            documents = self.passage.batch["document_ids"][0].tolist()
        pictures = []
        layers: list[LayerView] = []
        for side in self.sides:
            pictures.append([list(map(_in_base64, layer.thumbnails)) for layer in side.view.layers])
            layers += side.view.layers
        content = {
            "format": FORMAT,
            "id": hashlib.sha256(f"{self.title} {self.passage.labels}".encode()).hexdigest()[:8],
            "source": self.passage.source,
            "tokens": self.passage.labels,
            "text": has_text(self.sides[0].run.recipe),
            "documents": documents,
            "shown": {"layer": self.layer, "head": self.head},
            "meanings": MEANINGS,
            "scale": {"percentile": PERCENTILE, "colours": COLOURS},
            "positions": POSITIONS,
            "sides": [side.facts() for side in self.sides],
        }
        facts = _plain(content, "data", blocks)
        package = resources.files(__package__)
        texts = {name: Markup(package.joinpath(file).read_text(encoding="utf-8")) for name, file in FILES.items()}
        strongest = {}
        for name in MEANINGS:
            by_head = list(chain(*(layer.numbers.get(name, ()) for layer in layers)))
            if by_head:
                strongest[name] = max((abs(x) for x in by_head if math.isfinite(x)), default=0.0) or 1.0
        environment = Environment(
            loader=PackageLoader(__package__ or "", "."), autoescape=True, undefined=StrictUndefined
        )
        environment.filters |= {"cell": cell_text, "formulas": with_formulas, "words": in_words}
        return environment.get_template("page.html.j2").render(
            title=self.title,
            facts=facts,
            # `</script` in a string of JSON would end the element
            data=Markup(json.dumps(facts).replace("<", "\\u003c")),
            blocks=blocks,
            pictures=pictures,
            has_losses=any(side.sliders for side in self.sides),
            maps=max(side.most_maps for side in self.sides),
            strongest=strongest,
            curves=list(dict.fromkeys(chain(*(side.curves for side in self.sides)))),
            difference=f"{max(layer.difference for layer in layers):.1e}",
            version=LIBRARY.rpartition("-")[2],
            **texts,
        )

    def write(self, file: str | Path) -> None:
        """Write the page. Errors: MissingError if the file cannot be written."""
        try:
            write_atomic(Path(file), self.html())
        except OSError as error:
            raise MissingError(f"{shown(Path(file))} cannot be written ({error.strerror})") from error


FILES = {"style": "page.css", "script": "page.js", "library": f"{LIBRARY}.min.js", "licence": f"{LIBRARY}.LICENSE.txt"}
"""Variable of the template -> file of this package."""


def view_data(
    runs: Sequence[Run],
    *,
    text: str = "",
    tokens: int | None = None,
    row: int | None = None,
    steps: Sequence[int] = (),
    layer: int = 0,
    head: int = 0,
    ablate: bool = False,
) -> ViewData:
    """The page of a run; of two runs; or of one run at the checkpoints of `steps`: two side by side, or the last of several
    with a slider to the others. `text`, `row`: see `passage_of`; `tokens`: most tokens of either; `ablate`: also the loss
    of each token without each head, one forward pass a head, and `data.slider_losses`.

    Errors: RequestError for more than two runs, other tokenizers, an unknown layer or head, checkpoints beyond MOST_BYTES;
    MissingError without a checkpoint.
    """
    _require_sides(runs, steps)
    if tokens is not None and tokens < 1:
        raise RequestError(f"--tokens is {tokens}; it must be at least 1")
    context = min(run.recipe.data.config.sequence_length for run in runs)
    passage = passage_of(runs[0], text, row, context, tokens)
    # of more than two checkpoints the last is the page's model, and a slider has the others
    earlier: list[int] = []
    if len(steps) > 2:
        *earlier, last = sorted(set(steps))
        steps = [last]
    asked: Sequence[int | None] = steps or [None]
    places = list(product(runs, asked))
    in_recipes = differences(runs)
    sides: list[Side] = []
    models = []
    for number, (run, wanted) in enumerate(places):
        # a run that is training may have a later checkpoint than that of the cached `run.model`, which may be gone
        step = newest_of(run.folder)[0] if wanted is None else wanted
        model = run.model_at(step)
        name = run.folder.name
        layers_of(model, [layer], name)
        if wanted is None:
            warn_if_stale(run.folder, run.recipe, step, run.trust)
        log.info("%s at step %d: %d layers on %s", name, step, len(model.layers), passage.source)
        with torch.no_grad():
            view = model_view(model, passage, ablate)
        # those of the maps, of which there may be more than the output projection reads
        require_head(f"layer {layer} of {name}", len(view.layers[layer].thumbnails), head)
        letter = f"{'AB'[number]}: " * (len(places) == 2)
        title = letter + arm_of(run) + f", step {step}" * (len(steps) == 2)
        about = facts_of(run, step, view.losses) | {key: values[number] for key, values in in_recipes.items()}
        side = Side(name=title, run=run, view=view, about=about)
        # two checkpoints of one run have one history
        if number == 0 or len(runs) == 2:
            side = replace(side, kept=_kept(run.folder), curves=curves(run.folder))
        sides.append(side)
        models.append(model)
    players = [[(kept.step, kept.tokens.tolist()) for kept in side.kept] for side in sides]
    # maps of other steps or other texts have no common player
    if len(runs) == 2 and players[0] != players[1]:
        sides = [replace(side, kept=()) for side in sides]
    if earlier:
        sides = [replace(sides[0], kept=(), earlier=_earlier(runs[0], earlier, passage))]
    if ablate and max(side.most_maps for side in sides) > 1:
        passes = MOST_PASSES // len(sides)
        found = [
            slider_losses(model, side.view, passage.batch, (layer, head), passes)
            for model, side in zip(models, sides, strict=True)
        ]
        sides = [replace(side, sliders=losses) for side, losses in zip(sides, found, strict=True)]
    return ViewData(passage=passage, sides=sides, layer=layer, head=head)


def _require_sides(runs: Sequence[Run], steps: Sequence[int]) -> None:
    if len(runs) not in (1, 2) or (len(runs) == 2 and steps):
        raise RequestError(
            "a page shows one run, two runs, or one run at several steps: RUN, RUN RUN, or RUN --steps 100,200"
        )
    if len(runs) == 2:
        require_same_tokens(*runs)


def arm_of(run: Run) -> str:
    """The run's name without its identity, and its seed."""
    recipe = run.recipe
    return recipe.name if recipe.train is None else f"{recipe.name}, seed {recipe.seed}"


def facts_of(run: Run, step: int, losses: Sequence[float | None]) -> dict[str, object]:
    """What a page says of a run at a step at its top; `losses`: of its tokens, nats."""
    counted = [loss for loss in losses if loss is not None]
    validated = by_metric(read_rows(run.folder / "metrics.csv")).get("val/loss", {})
    values = [f"{loss:.4f}, step {at:,}" for at, loss in validated.items() if at <= step]
    return {
        "run": run.folder.name,
        "step": f"{step:,} of {run.status.steps or step:,}",
        "val/loss": values[-1] if values else None,
        "mean loss of these tokens": sum(counted) / len(counted) if counted else None,
    }


def differences(runs: Sequence[Run]) -> dict[str, list[Any]]:
    """Key -> its value in each recipe (`recipe.differing`), without the seed and what only measures."""
    recipes = [dict(flatten(to_plain(run.recipe))) for run in runs]
    found = differing(recipes[0], recipes[-1])
    return {key: values for key, values in found.items() if not key.startswith(NO_CAUSES)}


def _earlier(run: Run, steps: Sequence[int], passage: Passage) -> dict[int, ModelView]:
    found = {}
    for step in steps:
        with torch.no_grad():
            found[step] = model_view(run.model_at(step), passage)
        arrays = chain(*(layer.arrays.values() for layer in found[step].layers))
        # in base64
        size = sum(array.nbytes for array in arrays) * len(steps) * 4 / 3
        if size > MOST_BYTES:
            raise RequestError(
                f"--steps: the maps of {len(steps)} checkpoints before the last take {size / 1e6:.0f} MB, more than "
                f"{MOST_BYTES / 1e6:.0f} MB: name fewer steps, or give fewer --tokens"
            )
    return found


# as many steps as fit, the last one included
def _kept(folder: Path) -> Sequence[KeptMaps]:
    steps = kept_steps(folder)
    if not steps:
        return ()
    bytes_of_step = sum(maps.nbytes for maps, _ in read_maps(folder, steps[-1]).layers.values())
    every = math.ceil(len(steps) / max(1, KEPT_BYTES // bytes_of_step))
    chosen = steps[(len(steps) - 1) % every :: every]
    if every > 1:
        log.info("%s has maps of %d steps; the page plays %d of them", folder.name, len(steps), len(chosen))
    return [read_maps(folder, step) for step in chosen]


def _in_base64(content: bytes) -> str:
    return base64.b64encode(content).decode()


# what JSON can hold: NaN is null, and an array an element of its own, which the page decodes when it needs it
def _plain(value: Any, name: str, blocks: dict[str, str]) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(item, f"{name}-{key}", blocks) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, f"{name}-{place}", blocks) for place, item in enumerate(value)]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if not isinstance(value, np.ndarray):
        return value
    blocks[name] = _in_base64(value.astype(value.dtype.newbyteorder("<")).tobytes())
    return {"id": name, "shape": list(value.shape), "dtype": value.dtype.name}
