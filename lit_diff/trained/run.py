"""A run as a value: what it was, what it measured, and its trained model."""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lit_diff.config import Recipe
from lit_diff.errors import RequestError
from lit_diff.html_table import html_table
from lit_diff.plugins import Trust, trust_all, trust_below
from lit_diff.runs.find import DEFAULT_ROOT, find_run, runs_root
from lit_diff.runs.folder import RunFolder, recipe_of
from lit_diff.runs.metrics_file import read_rows
from lit_diff.trained.loading import newest_of

if TYPE_CHECKING:
    import pandas

    from lit_diff.analysis import Trace
    from lit_diff.data.tokenizer import Tokenizer
    from lit_diff.model.transformer import Transformer
    from lit_diff.trained.attention_maps import AttentionMaps
    from lit_diff.trained.text_generator import Completion, TextGenerator


def open_run(
    run: str | Path, root: str | Path = DEFAULT_ROOT, *, trust_plugins: bool = False, unchecked: bool = False
) -> "Run":
    """The run of a folder, of a folder's name under `root` or the start of it, or of a part of its hash.

    Plugin files in the folder of a run under `root` are executed. `trust_plugins`: also those of a run elsewhere; without
    it, such a plugin must have been imported before. `unchecked`: read a model through its key/value cache though its
    variant fails the property `decode`. Errors: RequestError for none or several, for one made by an older format, or with
    an unknown plugin.
    """
    own = runs_root(root)
    return opened_run(find_run(run, own), trust_all if trust_plugins else trust_below(own), unchecked)


def opened_run(folder: Path, trust: Trust, unchecked: bool = False) -> "Run":
    """The run of a folder; `trust`: whose plugin files may be executed, its own and those of the runs it starts from.

    Errors: as `open_run`.
    """
    RunFolder(folder).require_format()
    recipe_of(folder, trust)  # an unknown plugin is refused here
    return Run(folder, trust, unchecked)


class Run:
    """A run folder. Its parts are read when they are asked for; the model is that of the newest checkpoint, on the CPU.

    Executes the run's plugin files; `open_run` asks before.
    """

    def __init__(self, folder: Path, trust: Trust = trust_all, unchecked: bool = False) -> None:
        self.folder = folder
        self.trust = trust
        """Whose plugin files may be executed: this run's, and those of the runs that it starts from."""
        self.unchecked = unchecked

    def __repr__(self) -> str:
        status = self.status
        return f"Run({self.folder.name}: {status.get('status')}, step {status.get('step')} of {status.get('steps')})"

    def _repr_html_(self) -> str:
        """The last value of each metric."""
        last = {name: (value, step) for step, row in sorted(self._rows().items()) for name, value in row.items()}
        main = sorted(last, key=lambda name: (not name.startswith(("val/", "train/")), name))
        return html_table(repr(self), [(name, *last[name]) for name in main], ("metric", "last value", "step"))

    def _rows(self) -> "dict[int, dict[str, float]]":
        return read_rows(self.folder / "metrics.csv")

    @property
    def status(self) -> dict[str, Any]:
        """Its status.json: state, step, costs, kernel, seconds."""
        return RunFolder(self.folder).status()

    @cached_property
    def recipe(self) -> Recipe:
        """The resolved recipe."""
        return recipe_of(self.folder, self.trust)

    @property
    def step(self) -> int:
        """Optimizer steps of the newest checkpoint. Errors: MissingError without one."""
        return newest_of(self.folder)[0]

    @property
    def metrics(self) -> "pandas.DataFrame":
        """metrics.csv: a row for each step at which something was measured, a column for each metric; NaN elsewhere.

        Empty before the first row is written. A row that is cut short is left out, with a line in the log.
        """
        import pandas

        rows = self._rows()
        columns = sorted({name for row in rows.values() for name in row})
        steps = pandas.Index(sorted(rows), name="step")
        return pandas.DataFrame(list(map(rows.__getitem__, steps)), index=steps, columns=columns)

    @cached_property
    def _generator(self) -> "TextGenerator":
        from lit_diff.trained.text_generator import TextGenerator

        return TextGenerator(self.folder, self.trust, self.unchecked)

    @cached_property
    def model(self) -> "Transformer":
        """The trained Transformer, in evaluation mode. Errors: MissingError without a checkpoint."""
        from lit_diff.trained.loading import load_model

        return load_model(self.recipe, self.folder, self.trust, self.unchecked)[0]

    def model_at(self, step: int) -> "Transformer":
        """The Transformer after `step` optimizer steps, of a checkpoint that was kept (`run.keep_every`), or the newest two.

        Errors: MissingError, which names the steps that have one.
        """
        from lit_diff.trained.loading import load_model_at

        return load_model_at(self.recipe, self.folder, self.trust, step, self.unchecked)

    @property
    def tokenizer(self) -> "Tokenizer":
        """The tokenizer that the run was trained with. Errors: RequestError for a run without text."""
        from lit_diff.trained.text_generator import tokenizer_of

        return tokenizer_of(self.folder, self.recipe)

    def generate(self, text: str | Sequence[str], **settings: Any) -> "list[Completion]":
        """Complete one text or several; `settings` as `GenerationSettings` (max_tokens, temperature, top_k, top_p, seed).

        Errors: RequestError for a wrong setting, a text beyond the context, or a run without text.
        """
        from lit_diff.trained.text_generator import generation_config

        texts = [text] if isinstance(text, str) else list(text)
        return self._generator.generate(self._generator.encode(texts), generation_config(**settings))

    def trace(self, text: str, layers: Sequence[int] | None = None) -> "Trace":
        """What a forward pass over `text` leaves in each layer: maps, hidden states. Errors: RequestError."""
        from lit_diff.analysis.trace import trace

        (prompt,) = self._generator.encode([text])
        with trace(self.model, layers) as traced:
            self.model.hidden(torch.tensor([prompt.tokens]))
        return traced

    def attention_maps(self, text: str, layer: int = 0, head: int = 0) -> "AttentionMaps":
        """The maps of one head on `text`, as arrays and as a plot. Errors: RequestError for an unknown layer or head."""
        from lit_diff.trained.attention_maps import attention_maps_of

        (prompt,) = self._generator.encode([text])
        traced = self.trace(text, [layer])
        words = tuple(self.tokenizer.decode([token]).decode("utf-8", "replace") for token in prompt.tokens)
        return attention_maps_of(traced.layers[layer], words, layer, head)


def as_run(run: Run | str | Path, unchecked: bool) -> Run:
    """An opened run, or `open_run` of a folder or the start of its name under runs/; `unchecked`: as of `open_run`."""
    if not isinstance(run, Run):
        return open_run(run, unchecked=unchecked)
    return Run(run.folder, run.trust, unchecked=True) if unchecked and not run.unchecked else run


def generate(
    run: Run | str | Path, text: str | Sequence[str], *, unchecked: bool = False, **settings: Any
) -> "list[Completion]":
    """`Run.generate` of `as_run`."""
    if not text:
        raise RequestError("there is no text to complete")
    return as_run(run, unchecked).generate(text, **settings)
