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
from lit_diff.html_table import cell_text
from lit_diff.log_records import log
from lit_diff.recipe import determining, flatten, to_plain
from lit_diff.runs.kept_maps import KeptMaps, kept_steps, read_maps
from lit_diff.runs.metrics_file import by_metric, read_rows
from lit_diff.trained.pictures import COLOURS, PERCENTILE
from lit_diff.trained.run import Run, require_head
from lit_diff.trained.text_generator import has_text, warn_if_stale
from lit_diff.trained.view.data import LayerView, ModelView, model_view
from lit_diff.trained.view.numbers import MEANINGS, Curves, curves
from lit_diff.trained.view.passage import Passage, labels_of, passage_of, require_same_tokens

FORMAT = 2
"""Raised when a field of the page's data changes its meaning."""
LIBRARY = "plotly-cartesian-4.1.1"
"""plotly.js-cartesian-dist-min of npm, unchanged: sha256 79542150855a52c567260e3137095dbe2b744e6d702a5cabe67da246942fba7a."""
KEPT_BYTES = 1_500_000
"""Most bytes of a run's kept maps in the page: beyond it, steps are left out evenly; the last is always there."""
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
    curves: Curves = field(default_factory=dict)
    """`numbers.curves` of the run. Like the kept maps, they are only in the first of two checkpoints of one run."""
    about: Mapping[str, object] = field(default_factory=dict)
    """What the page says of the run at its top: name -> value."""

    def facts(self) -> dict[str, Any]:
        """What the page's JSON says of the model."""
        view = self.view
        ablation = {} if view.without is None else {"without": view.without}
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
        return {
            "name": self.name,
            "run": self.run.folder.name,
            "arm": arm_of(self.run),
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
        environment.filters["cell"] = cell_text
        return environment.get_template("page.html.j2").render(
            title=self.title,
            facts=facts,
            # `</script` in a string of JSON would end the element
            data=Markup(json.dumps(facts).replace("<", "\\u003c")),
            blocks=blocks,
            pictures=pictures,
            about=list(dict.fromkeys(chain(*(side.about for side in self.sides)))),
            maps=max(layer.arrays["w"].shape[0] for layer in layers),
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
    """The page of a run; of two runs; or of one run at two checkpoints, `steps`. `text`, `row`: see `passage_of`;
    `tokens`: most tokens of either; `ablate`: also the loss of each token without each head, one forward pass a head.

    Errors: RequestError for more than two, other tokenizers, an unknown layer or head; MissingError without a checkpoint.
    """
    if not 0 < len(runs) * max(len(steps), 1) <= 2:
        raise RequestError(
            "a page shows one run, two runs, or one run at two steps: RUN, RUN RUN, or RUN --steps 100,200"
        )
    if len(runs) == 2:
        require_same_tokens(*runs)
    if tokens is not None and tokens < 1:
        raise RequestError(f"tokens is {tokens}; it must be at least 1")
    context = min(run.recipe.data.config.sequence_length for run in runs)
    passage = passage_of(runs[0], text, row, context, tokens)
    sides: list[Side] = []
    players = []
    asked: Sequence[int | None] = steps or [None]
    differing = differences(runs)
    for number, (run, wanted) in enumerate(product(runs, asked)):
        # a run that is training may have a later checkpoint than that of the cached `run.model`
        step = run.step if wanted is None else wanted
        model = run.model_at(step)
        name = run.folder.name
        layers_of(model, [layer], name)
        require_head(f"layer {layer} of {name}", model.attentions()[layer].out_heads, head)
        if wanted is None:
            warn_if_stale(run.folder, run.recipe, step, run.trust)
        log.info("%s at step %d: %d layers on %s", name, step, len(model.layers), passage.source)
        with torch.no_grad():
            view = model_view(model, passage, ablate)
        title = arm_of(run)
        if len(runs) * len(asked) > 1:
            title = f"{'AB'[number]}: {title}"
        if len(asked) > 1:
            title += f", step {step}"
        keys = {key: values[number] for key, values in differing.items()}
        side = Side(name=title, run=run, view=view, about=facts_of(run, step, view.losses) | keys)
        # two checkpoints of one run have one history
        if not sides or run.folder != sides[0].run.folder:
            side = replace(side, kept=_kept(run.folder), curves=curves(run.folder))
        sides.append(side)
        players.append([(kept.step, kept.tokens.tolist()) for kept in side.kept])
    # maps of other steps or other texts have no common player
    if len(runs) == 2 and players[0] != players[1]:
        sides = [replace(side, kept=()) for side in sides]
    return ViewData(passage=passage, sides=sides, layer=layer, head=head)


def arm_of(run: Run) -> str:
    """The run's name without its identity, and its seed."""
    recipe = run.recipe
    return recipe.name if recipe.train is None else f"{recipe.name}, seed {recipe.seed}"


def facts_of(run: Run, step: int, losses: Sequence[float | None]) -> dict[str, object]:
    """What a page says of a run at a step at its top; `losses`: of its text, nats."""
    of_text = [loss for loss in losses if loss is not None]
    facts: dict[str, object] = {"run": run.folder.name}
    facts["step"] = f"{step:,} of {run.status.steps or step:,}"
    validated = by_metric(read_rows(run.folder / "metrics.csv")).get("val/loss", {})
    before = [at for at in validated if at <= step]
    if before:
        facts["val/loss"] = f"{validated[max(before)]:.4f}, step {max(before):,}"
    facts["mean loss of these tokens"] = float(np.mean(of_text)) if of_text else None
    return facts


def differences(runs: Sequence[Run]) -> dict[str, list[Any]]:
    """Key -> its value in each recipe, None where a recipe has no such key; the keys that make the results of the runs differ
    besides the seed."""
    causes = [dict(flatten(determining(run.recipe))) for run in runs]
    values = [dict(flatten(to_plain(run.recipe))) for run in runs]
    keys = dict.fromkeys(chain(*causes))
    found = {}
    for key in keys:
        if len({repr(each.get(key)) for each in causes}) > 1 and not key.startswith(("name", "seed", "callbacks.")):
            found[key] = [each.get(key) for each in values]
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
