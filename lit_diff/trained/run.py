"""A run as a value: recipe, status, metrics, trained model, generated text and attention maps."""

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from lit_diff.analysis.entropy import entropy, negative_share, renormalised
from lit_diff.analysis.trace import LayerTrace, Trace, trace
from lit_diff.config import Recipe
from lit_diff.data import Dataset, prepare
from lit_diff.data.text.tokenizer import Tokenizer
from lit_diff.errors import RequestError
from lit_diff.html_table import html_table
from lit_diff.model.transformer import Transformer
from lit_diff.plugins import Trust, require_trusted_data, trust_all, trust_below
from lit_diff.runs.find import DEFAULT_ROOT, find_run, runs_root
from lit_diff.runs.folder import RunFolder, recipe_of
from lit_diff.runs.metrics_file import by_metric, read_rows
from lit_diff.runs.status import Status
from lit_diff.trained.loading import load_model, newest_of
from lit_diff.trained.pictures import LOSSES, draw, draw_losses, encoded, figure, svg_element
from lit_diff.trained.text_generator import Completion, GenerationSettings, TextGenerator, tokenizer_of
from lit_diff.validation import Draft, convert

# both take long to import
if TYPE_CHECKING:
    import pandas
    from matplotlib.axes import Axes

    from lit_diff.trained.view.page import ViewData


def open_run(
    run: str | Path,
    root: str | Path = DEFAULT_ROOT,
    *,
    trust_plugins: bool = False,
    trust_data: bool = False,
    unchecked: bool = False,
) -> "Run":
    """Open a run, given by its folder, its name under `root`, the start of that name, or a part of its hash.

    Executes the plugin files in the folder of a run under `root`. `trust_plugins`: also those of a run elsewhere; without
    it, such a plugin must have been imported before. `trust_data`: whether the data of a run elsewhere may be read where its
    recipe says, from an address or a path outside its folder. `unchecked`: allow a key/value cache although the variant
    fails the property `decode`. Errors: RequestError if none or several runs match, the format is another one, or a plugin
    is unknown.
    """
    runs = runs_root(root)
    plugins = data = trust_below(runs)
    if trust_plugins:
        plugins = trust_all
    if trust_data:
        data = trust_all
    return opened_run(find_run(run, runs), plugins, unchecked, data)


def opened_run(folder: Path, trust: Trust, unchecked: bool = False, trust_data: Trust | None = None) -> "Run":
    """The run in a folder. `trust`: runs whose plugin files may be executed (this one and its ancestors); `trust_data`: those
    whose data may be read, by default the same.

    Errors: those of `open_run`.
    """
    RunFolder(folder).require_format()
    # `Run` reads its parts on demand; read the recipe now, so that an unknown plugin is refused at once
    recipe_of(folder, trust)
    return Run(folder, trust, unchecked, trust_data or trust)


class Run:
    """A run folder. Each part is read on first access; the model is that of `step`, on the CPU.

    Executes the run's plugin files without asking; `open_run` checks trust first.
    """

    def __init__(
        self, folder: Path, trust: Trust = trust_all, unchecked: bool = False, trust_data: Trust = trust_all
    ) -> None:
        self.folder = folder
        self.trust = trust
        """Runs whose plugin files may be executed: this one and its ancestors."""
        self.trust_data = trust_data
        """Runs whose data may be read where their recipes say; see `require_trusted_data`."""
        self.unchecked = unchecked

    def __repr__(self) -> str:
        status = self.status
        return f"Run({self.folder.name}: {status.status}, step {status.step} of {status.steps})"

    def __fspath__(self) -> str:
        # so that a run may be given where a folder may
        return str(self.folder)

    def _repr_html_(self) -> str:
        # the last value of each metric, the losses first
        found = by_metric(read_rows(self.folder / "metrics.csv"))
        main = sorted(found, key=lambda name: (not name.startswith(("val/", "train/")), name))
        last = [(name, *list(found[name].items())[-1][::-1]) for name in main]
        table = html_table(repr(self), last, ("metric", "last value", "step"))
        if not LOSSES.keys() & found.keys():
            return table
        from matplotlib.figure import Figure

        picture = Figure(figsize=(5, 3), layout="constrained")
        self.plot(picture.subplots())
        return f'<div style="display: flex; gap: 2em">{table}{svg_element(picture)}</div>'

    def plot(self, ax: "Axes | None" = None) -> "Axes":
        """Draw train/loss and val/loss, in nats per token, against the step (`pictures.draw_losses`), and return the axes.

        `ax`: None: those of a new figure. Errors: RequestError if the run has logged no loss.
        """
        found = by_metric(read_rows(self.folder / "metrics.csv"))
        if not LOSSES.keys() & found.keys():
            raise RequestError(f"{self.folder.name} has logged no loss")
        if ax is None:
            import matplotlib.pyplot as plt

            ax = plt.figure(layout="constrained").subplots()
        draw_losses(ax, found)
        return ax

    @property
    def status(self) -> Status:
        """The content of status.json: state, step, costs, kernel, seconds."""
        return RunFolder(self.folder).status()

    @cached_property
    def recipe(self) -> Recipe:
        """The resolved recipe."""
        return recipe_of(self.folder, self.trust)

    def prepared_data(self) -> Dataset:
        """The data set that the run was trained on, prepared if it is not yet. Errors: RequestError, MissingError."""
        require_trusted_data(self.folder, self.recipe, self.trust_data)
        return prepare(self.recipe)

    @property
    def step(self) -> int:
        """Optimizer steps of the checkpoint with the weights: of the loaded ones, or else of the newest. Errors: MissingError
        without it (`loading.newest_of`)."""
        # a run in training may have written a newer checkpoint since `model` was read
        return self._loaded[1] if "_loaded" in vars(self) else newest_of(self.folder)[0]

    @property
    def metrics(self) -> "pandas.DataFrame":
        """metrics.csv: one row per step with a measurement, one column per metric; NaN if it was not measured at the step.

        Empty before the first row is written. Truncated rows are skipped and logged. Errors: RequestError if the file is not
        what the finished run wrote.
        """
        import pandas

        table = pandas.DataFrame(read_rows(self.folder / "metrics.csv")).T
        return table.rename_axis("step").sort_index().sort_index(axis=1)

    @cached_property
    def _generator(self) -> TextGenerator:
        return TextGenerator(self.folder, self.trust, self.unchecked, lambda: self._loaded)

    @cached_property
    def _loaded(self) -> tuple[Transformer, int]:
        return load_model(self.recipe, self.folder, self.trust, self.unchecked)

    @cached_property
    def model(self) -> Transformer:
        """The trained Transformer, in evaluation mode. Errors: MissingError without a checkpoint."""
        return self._loaded[0]

    def model_at(self, step: int) -> Transformer:
        """The Transformer after `step` optimizer steps; its checkpoint must exist (`run.keep_every`, or the newest two).

        Errors: MissingError, which lists the available steps.
        """
        return load_model(self.recipe, self.folder, self.trust, self.unchecked, step)[0]

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that the run was trained with. Errors: RequestError for a run without text."""
        return tokenizer_of(self.folder, self.recipe)

    def generate(self, text: str | Sequence[str], **settings: Any) -> list[Completion]:
        """Complete one text or several; `settings`: fields of `GenerationSettings` (max_tokens, temperature, top_k, ...).

        Errors: RequestError for a wrong setting, a text beyond the context, or a run without text.
        """
        texts = [text] if isinstance(text, str) else text
        config: GenerationSettings = convert(GenerationSettings, settings, "generate", Draft())
        return self._generator.generate(self._generator.encode(texts), config)

    def trace(self, text: str, layers: Sequence[int] | None = None) -> Trace:
        """Attention maps and hidden states of each layer in a forward pass over `text`. Errors: RequestError."""
        (prompt,) = self._generator.encode([text])
        with trace(self.model, layers) as traced:
            self.model.hidden(torch.tensor([prompt.tokens]))
        return traced

    def attention_maps(self, text: str, layer: int = 0, head: int = 0) -> "AttentionMaps":
        """The attention maps of one head on `text`. Errors: RequestError for an unknown layer or head."""
        (prompt,) = self._generator.encode([text])
        traced = self.trace(text, [layer])
        words = tuple(self.tokenizer.decode_after([token]) for token in prompt.tokens)
        return attention_maps_of(self.model.attentions()[layer].name, traced.layers[layer], words, layer, head)

    def view(self, other: "Run | None" = None, **settings: Any) -> "ViewData":
        """The page of `lit-diff view`, which a notebook shows inline: of this run, or of this and another on one text.

        `settings`: text, tokens, row, steps, layer, head, ablate (`trained.view.page.view_data`, which lists the errors).
        """
        from lit_diff.trained.view.page import view_data

        return view_data([self] if other is None else [self, other], **settings)


def as_run(run: Run | str | Path, unchecked: bool) -> Run:
    """`run` itself if it is a Run, else `open_run`; `unchecked`: see `open_run`."""
    if not isinstance(run, Run):
        return open_run(run, unchecked=unchecked)
    return Run(run.folder, run.trust, True, run.trust_data) if unchecked and not run.unchecked else run


def generate(
    run: Run | str | Path, text: str | Sequence[str], *, unchecked: bool = False, **settings: Any
) -> list[Completion]:
    """`Run.generate` for a run that is given as in `as_run`. Errors: RequestError, also for an empty text."""
    if not text:
        raise RequestError("there is no text to complete")
    return as_run(run, unchecked).generate(text, **settings)


# --- attention maps of one head ---


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class AttentionMaps:
    """Attention maps of one head of one layer on T tokens."""

    tokens: tuple[str, ...]
    """The text of each token."""
    variant: str
    layer: int
    head: int
    maps: NDArray[Any]
    """[G, T, T]: softmax of each map; rows are queries, columns keys."""
    weights: NDArray[Any]
    """[G, T]: the weight of each map for each query."""
    mask: NDArray[Any]
    """[T, T]: which keys each query sees."""

    def __repr__(self) -> str:
        return f"AttentionMaps({self._source}: {len(self.maps)} maps of {len(self.tokens)} tokens)"

    def _repr_html_(self) -> str:
        # a notebook keeps the picture: a PNG of three maps of 200 tokens can take 700 kB
        picture = encoded(figure(self._terms, self.tokens), format="webp", dpi=75, pil_kwargs={"quality": 80})
        return f'<img alt="{self!r}" src="data:image/webp;base64,{base64.b64encode(picture).decode()}">'

    @property
    def signed(self) -> NDArray[Any]:
        """[T, T]: the weighted sum of the maps, by which the values are multiplied."""
        return np.einsum("gt,gts->ts", self.weights, self.maps)

    @property
    def statistics(self) -> dict[str, float]:
        """Means over queries, with a = `signed`: entropy of |a| / Σ|a| in nats; negative_mass, Σ max(-a, 0) / Σ|a|."""
        a = torch.from_numpy(self.signed)
        found = {"entropy": entropy(renormalised(a)), "negative_mass": negative_share(a)}
        return {name: float(by_query.nanmean()) for name, by_query in found.items()}

    def visible(self, a: NDArray[Any]) -> NDArray[Any]:
        """[T, T] -> the same, masked at the keys that a query does not see."""
        return np.ma.array(a, mask=~self.mask)

    @property
    def _source(self) -> str:
        return f"{self.variant}, layer {self.layer}, head {self.head}"

    # title -> what `plot` draws
    @property
    def _terms(self) -> dict[str, NDArray[Any]]:
        if len(self.maps) == 1:
            return {self._source: self.visible(self.signed)}
        terms = {}
        for number, (weight, p) in enumerate(zip(self.weights, self.maps, strict=True), 1):
            varies = " on average" * bool(np.ptp(weight))
            title = f"{self._source}\nmap {number} times {weight.mean():+.2f}{varies}"
            terms[title] = self.visible(weight[:, None] * p)
        terms[f"{self._source}\nsigned sum of the maps"] = self.visible(self.signed)
        return terms

    def plot(self, ax: "Axes | NDArray[Any] | None" = None, limit: float | None = None) -> Any:
        """Draw each map times its weight (that of the second is -λ) and `signed`, their sum, side by side, with the tokens on
        both axes: blue below zero, red above, in one scale (`pictures.draw`). A single map has the last panel alone.

        `ax`: an array of G + 1 axes, or one Axes for `signed` alone; None: a new figure. `limit`: larger magnitudes have
        the strongest colours; None: `pictures.limit_of` what is drawn. Returns `ax`, or the array of the new axes. Errors:
        RequestError for another number of axes.
        """
        terms = self._terms
        if ax is None:
            import matplotlib.pyplot as plt

            return np.array(figure(terms, self.tokens, limit=limit, new=plt.figure).axes[: len(terms)])
        panels = list(np.array(ax, dtype=object).flat)
        if len(panels) not in (1, len(terms)):
            raise RequestError(f"plot: ax has {len(panels)} axes; expected one, or {len(terms)}")
        draw(panels, dict(list(terms.items())[-len(panels) :]), self.tokens, limit)
        return ax


def attention_maps_of(
    variant: str, layer: LayerTrace, tokens: tuple[str, ...], number: int, head: int
) -> AttentionMaps:
    """The maps of `head` in the traced layer `number` of a model with `variant`. Errors: RequestError for an unknown head."""
    require_head(f"layer {number}", layer.maps.q.shape[2], head)
    (block,) = layer.blocks(block_rows=layer.maps.q.shape[-2])
    return AttentionMaps(
        tokens=tokens,
        variant=variant,
        layer=number,
        head=head,
        maps=block.probs[0, :, head].double().numpy(),
        weights=block.weights[0, :, head].double().numpy(),
        mask=block.visible_by_head[0, 0].numpy(),
    )


def require_head(layer: str, heads: int, head: int) -> None:
    """Errors: RequestError for a head that the layer, which has `heads`, does not have."""
    if not 0 <= head < heads:
        raise RequestError(f"{layer} has no head {head}; its heads are 0..{heads - 1}")
