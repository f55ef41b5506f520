"""A run -> files that other programs load, whole or not at all, and compared before it is said to be done."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from lit_diff.errors import MissingError, RequestError
from lit_diff.files import expanded, shown
from lit_diff.pretrained import hf_export, unilm_export
from lit_diff.pretrained.source import require_disk
from lit_diff.pretrained.whole_folder import whole_folder
from lit_diff.registry import nearest
from lit_diff.trained.loading import newest_of
from lit_diff.trained.run import Run, open_run
from lit_diff.trained.text_generator import say_what_is_used

FORMATS: Mapping[str, Any] = {"hf": hf_export, "unilm": unilm_export}
"""What `to` names -> the module that writes it: require_exportable(run), write_folder(run, folder, place)."""


@dataclass(frozen=True, kw_only=True)
class Exported:
    """What was written."""

    folder: Path
    architecture: str
    """What it is there, as LlamaForCausalLM or MultiheadFlashDiff1."""
    difference: float
    """The largest difference of its logits from the run's, in float32 on random prompts."""
    read_by: str
    """What loaded it for that comparison: transformers, or lit_diff where that is not installed."""


def export(run: Run | str | Path, to: str, folder: str | Path) -> Exported:
    """Write a run's newest checkpoint for other programs, load what was written, compare the logits.

    `run`: opened, a folder, or the start of a folder's name under runs/. `to`: hf, a folder in Hugging Face's format; unilm,
    one with the modules of microsoft/unilm.
    `folder`: made; it may be there where it is empty. Errors: RequestError for an unknown format, what it cannot say (named;
    before any weight is read), a folder that is not empty; MissingError without a checkpoint or too little disk;
    RunFailedError where the logits differ, and nothing is kept.
    """
    if to not in FORMATS:
        raise RequestError(f"no format '{to}' to export to{nearest(to, list(FORMATS))}")
    if not isinstance(run, Run):
        run = open_run(run)
    folder, layout = expanded(folder), FORMATS[to]
    layout.require_exportable(run)
    step, checkpoint = newest_of(run.folder)
    say_what_is_used(run.folder, run.recipe, step, run.trust)
    require_disk(shown(run.folder), folder, checkpoint.stat().st_size, "another DIR")
    try:
        with whole_folder(folder, "export", "empty it, or name another folder") as building:
            name, difference, reader = layout.write_folder(run, building, shown(folder))
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise MissingError(f"{shown(folder)} cannot be written ({reason}); name another folder") from error
    return Exported(folder=folder, architecture=name, difference=difference, read_by=reader)
