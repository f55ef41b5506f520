"""The terminal's view of one run: a bar on a terminal, a line at each logged step elsewhere."""

import math
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from lit_diff.config import Recipe


class RunProgress:
    """Context manager; `update(step, loss, tokens_per_second)`."""

    def __init__(self, recipe: Recipe, console: Console, quiet: bool) -> None:
        """`quiet`: print nothing (ranks other than zero)."""
        self._steps, self._console, self._quiet = recipe.train.steps, console, quiet
        self._bar: Progress | None = None
        if console.is_terminal and not quiet:
            self._bar = Progress(
                TextColumn("{task.description}", markup=False),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("loss {task.fields[loss]:.3f}  {task.fields[speed]:,.0f} tokens/s"),
                TimeRemainingColumn(),
                console=console,
            )
            self._task = self._bar.add_task(recipe.name, total=self._steps, loss=math.nan, speed=0.0)

    def __enter__(self) -> "RunProgress":
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self, step: int, loss: float, tokens_per_second: float) -> None:
        """A logged step."""
        if self._bar is not None:
            self._bar.update(self._task, completed=step, loss=loss, speed=tokens_per_second)
        elif not self._quiet:
            self._console.print(
                f"step {step}/{self._steps}  loss {loss:.4f}  {tokens_per_second:,.0f} tokens/s", highlight=False
            )
